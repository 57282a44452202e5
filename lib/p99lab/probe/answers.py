"""What a target answers with: chunks, its own account of a request, and failures."""

from __future__ import annotations

from dataclasses import dataclass

from p99lab.engine.request import Timeline
from p99lab.probe.records import Outcome

_DETAIL_CHARS = 200


class RequestError(Exception):
    """One request failed: it is counted as `outcome`, with `kind` as the reason. Never the end of a run.

    `kind` is one of few, so that failures can be counted by it; `detail` is what the target said, in one short line.
    """

    def __init__(self, outcome: Outcome, kind: str, detail: str | None = None) -> None:
        self._said = line = " ".join((detail or "").split())
        self.outcome = outcome
        self.kind = kind
        self.detail = (line if len(line) <= _DETAIL_CHARS else line[:_DETAIL_CHARS] + "…") or None
        super().__init__(kind if self.detail is None else f"{kind}: {self.detail}")

    def without(self, secret: str) -> RequestError:
        """The same failure, `(secret)` wherever the target has repeated that text."""
        return RequestError(self.outcome, self.kind, self._said.replace(secret, "(secret)")) if secret else self


@dataclass(frozen=True, slots=True)
class Served:
    """The target's own account of a request, with its last chunk; None where it gives none."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Something arrived. `num_tokens` is 0 for a chunk that shows the reader nothing; a chunk of text counts 1."""

    num_tokens: int = 1
    served: Served | None = None
