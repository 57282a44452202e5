"""What an engine tells its callers: tokens as they come, and a request's bill at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

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


class Detokenizer(Protocol):
    """Turns a request's tokens into text one at a time, never half a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """What is left of an incomplete character at the end."""
        ...


class OutputText:
    """A request's text as it grows, cut before the first stop string, which may span tokens."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""  # could still become a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain now. Sets `stopped` where a stop string is complete; nothing follows it."""
        self._held += self._detokenizer.push(token_id)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        num_certain = len(self._held) - max((self._overlap(stop) for stop in self._stop), default=0)
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        return certain

    def flush(self) -> str:
        """The rest, once no token follows."""
        return "" if self.stopped else self._held + self._detokenizer.flush()

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the held text ends with."""
        return next(n for n in range(len(stop) - 1, -1, -1) if self._held.endswith(stop[:n]))


class NoText:
    """The text of a request whose tokens somebody else turns into text."""

    stopped = False

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
