"""Tokens as a client reads them: what becomes text, what is held back, and where a stop string ends it."""

from __future__ import annotations

from typing import Protocol

from p99lab.engine.request import FinishReason


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

    def add(self, token_id: int, finish_reason: FinishReason | None = None) -> str:
        """The text that is certain with the next token; `stopped` is set where it completes a stop string.

        Args:
            finish_reason: why the request ends with this token, so that nothing is held back any more; None: it goes
                on. A token that ends it with STOP, an end-of-sequence token or a stop id, has no text itself.
        """
        text = "" if finish_reason is FinishReason.STOP else self._push(token_id)
        return text if finish_reason is None else text + self._flush()

    def _push(self, token_id: int) -> str:
        self._held += self._detokenizer.push(token_id)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            certain, self._held = self._held[: min(found)], ""
            return certain
        num_certain = len(self._held) - max((self._overlap(stop) for stop in self._stop), default=0)
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        return certain

    def _flush(self) -> str:
        """The rest, once no token follows."""
        return "" if self.stopped else self._held + self._detokenizer.flush()

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the held text ends with."""
        return next(n for n in range(len(stop) - 1, -1, -1) if self._held.endswith(stop[:n]))


class NoText:
    """The text of a request whose tokens somebody else turns into text."""

    stopped = False

    def add(self, token_id: int, finish_reason: FinishReason | None = None) -> str:
        return ""
