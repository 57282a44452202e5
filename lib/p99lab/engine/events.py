"""What an engine emits: tokens as they come, and a request's usage at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from p99lab.engine.plan import Logprobs
from p99lab.engine.request import FinishReason, Timeline


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and timeline of a finished request; `num_cached_tokens` of its prompt came from the prefix cache."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One sampled token, or the end of a request without one (`token_id` None: cancelled).

    `text` is what became certain with this token: nothing while a character or a possible stop string is incomplete.
    `time_s` is on the engine's clock. `finish_reason` and `usage` are set on a request's last event only.
    `prompt_logprobs`, where asked for, comes with the first token: one entry for each prompt token, None for the first.
    """

    request_id: str
    token_id: int | None
    text: str
    time_s: float
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(slots=True)
class Completion:
    """All of one request's output."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish_reason is not None:
            self.finish_reason, self.usage = event.finish_reason, event.usage
