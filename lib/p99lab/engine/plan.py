"""What the control plane asks of one step, and what it gets back. Integers only; nothing here knows of tensors."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from p99lab.caches.pages import PageCopy as PageCopy
from p99lab.caches.pages import PageMoves as PageMoves
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.engine.request import Logprobs as Logprobs


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: `token_ids` are computed at positions `num_computed_tokens …`.

    `token_ids`: [num_scheduled_tokens] int32. `page_table`: int32, one page for every page_size of the
    `num_computed_tokens + num_scheduled_tokens` tokens that the row's last token attends to. Both are copies, so that
    the scheduler may go on while the step runs. `samples`: the row reaches its request's last token, whose logits
    choose the next. `follows`: where that last token is not known yet, the row of the step directly before that samples
    it; `token_ids` ends in a 0 in its place. `target_ids`: int32, the prompt tokens that the row's first tokens
    predict, where the request asks for their log-probabilities; else None.
    """

    request_id: str
    number: int
    token_ids: IntArray
    num_computed_tokens: int
    page_table: IntArray
    samples: bool
    sampling: SamplingParams
    num_output_tokens: int  # tokens sampled before this step: the position in the request's random stream
    target_ids: IntArray | None = None
    follows: int | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seq_len(self) -> int:
        """Tokens that the row's last token attends to, itself included."""
        return self.num_computed_tokens + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows whose page tables agree on pages `first_page … first_page + num_pages - 1`, all of them full and computed.

    `rows` are indices into `StepPlan.rows`, ascending, at least two. The attention of all their tokens over these
    pages is done once, without a causal mask (every one of these tokens lies before every token of the step).
    Groups may nest: the groups that hold a row cover pages [0, n) of it without gap or overlap; the rest is private.
    """

    rows: tuple[int, ...]
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: moves of pages first, in their order, then copies, then all rows in one forward pass."""

    epoch: int
    rows: tuple[Row, ...]
    groups: tuple[PrefixGroup, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    moves: tuple[PageMoves, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of rows that are in a prefix group."""
        return sum(len(self.rows[i].token_ids) for i in {i for group in self.groups for i in group.rows})


class StepPath(enum.Enum):
    """How a step ran. `FALLBACK`: eagerly, by slower kernels that read a shared prefix for each row anew, because its
    pages lie in too many pieces for the others."""

    GRAPH = "graph"
    EAGER = "eager"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids[i]` is what row i sampled, or None where the row did not sample; `logprobs[i]` likewise.

    `prompt_logprobs[i]`: one for each of row i's `target_ids`; rows without any are left out.
    `device_s`: from the step's beginning on the device to its end; None where the host computes.
    `num_padded_tokens`: what a graph computed beyond the step's own tokens.
    """

    epoch: int
    token_ids: tuple[int | None, ...]
    logprobs: tuple[Logprobs | None, ...]
    prompt_logprobs: Mapping[int, tuple[Logprobs, ...]] = field(default_factory=dict)
    device_s: float | None = None
    path: StepPath = StepPath.EAGER
    num_padded_tokens: int = 0


class InFlight(Protocol):
    """A step that has been launched."""

    def result(self) -> StepResult:
        """Wait for the step's end. Raises what the step has failed with."""
        ...

    def abandon(self) -> None:
        """Return once the step touches no memory any more, whatever has become of it; its result is not wanted."""
        ...
