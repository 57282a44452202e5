"""One answer as it grows, and the usage of all answers of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from p99lab.engine.events import TokenEvent, Usage
from p99lab.engine.request import FinishReason, IntArray, Logprobs, SamplingParams, Timeline, TimeShare


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """What one choice asks of the engine. `echo`: the prompt's text, where the answer begins with it.

    `return_token_ids`: the answer's are wanted, as they come. `discards_token`: the engine samples at least one
    token, and the request has asked for none.
    """

    token_ids: IntArray  # [num_prompt_tokens]
    sampling: SamplingParams
    echo: str | None = None
    return_token_ids: bool = False
    discards_token: bool = False


@dataclass(frozen=True, slots=True)
class Scored:
    """A token and its log-probabilities; None for the first of a prompt."""

    token_id: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer; the last one has a reason. `token_ids` are None where nobody asked for them."""

    index: int
    text: str
    scored: tuple[Scored, ...]
    finish_reason: str | None
    token_ids: tuple[int, ...] | None = None

    @property
    def ids_field(self) -> dict[str, list[int]]:
        """What a written choice has of them."""
        return {} if self.token_ids is None else {"token_ids": list(self.token_ids)}


@dataclass(slots=True)
class Choice:
    """Takes events in, gives pieces out. Text lags the tokens where a character or a stop string is incomplete.

    Every sampled token is scored, also one that shows no text (an end-of-sequence token, the rest of a stop string).
    """

    index: int
    request: ChoiceRequest
    began: bool = False
    usage: Usage | None = None
    _text: str = ""
    _scored: list[Scored] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _finish_reason: str | None = None

    def add(self, event: TokenEvent) -> None:
        if not self.began:
            self.began = True
            self._echo(event)
        if not self.request.discards_token:
            self._text += event.text
            if event.logprobs is not None and event.token_id is not None:
                self._scored.append(Scored(event.token_id, event.logprobs))
            if self.request.return_token_ids and event.token_id is not None:
                self._token_ids.append(event.token_id)
        if event.finish_reason is not None:
            reason = FinishReason.LENGTH if self.request.discards_token else event.finish_reason
            self._finish_reason, self.usage = reason.value, event.usage

    @property
    def has_news(self) -> bool:
        """Whether there is text, a token id or the end to write."""
        return bool(self._text or self._token_ids) or self._finish_reason is not None

    def take(self) -> Piece:
        """All that was not taken yet."""
        token_ids = tuple(self._token_ids) if self.request.return_token_ids else None
        piece = Piece(self.index, self._text, tuple(self._scored), self._finish_reason, token_ids)
        self._text, self._scored, self._token_ids = "", [], []
        return piece

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.usage is None or self.request.discards_token else self.usage.num_output_tokens

    def _echo(self, first: TokenEvent) -> None:
        if self.request.echo is not None:
            self._text = self.request.echo
            scores = zip(self.request.token_ids.tolist(), first.prompt_logprobs or (), strict=False)
            self._scored = [Scored(token_id, logprobs) for token_id, logprobs in scores]


def usage(choices: Sequence[Choice], num_per_prompt: int) -> dict[str, Any]:
    """The API's `usage` of finished choices: a prompt counts once, however many answers it has.

    A single choice's has a field of this project's own, `p99lab_timeline`: where its time went, in seconds.
    """
    first = [choice.usage for choice in choices[::num_per_prompt] if choice.usage is not None]
    num_prompt_tokens = sum(one.num_prompt_tokens for one in first)
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    whole: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in first)},
    }
    return {**whole, "p99lab_timeline": _timeline(first[0].timeline)} if len(choices) == len(first) == 1 else whole


def _timeline(timeline: Timeline) -> dict[str, float]:
    shares = {share.value: getattr(timeline, share.value) for share in TimeShare}
    return {**shares, "num_preemptions": timeline.num_preemptions}
