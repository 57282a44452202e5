"""Paged attention in plain torch: the CPU path, and the oracle of every other backend.

A step's attention is a list of spans. Each span is a set of query tokens that all see the same kind of key range:

    shared     the pages of a prefix group, once for all tokens of the group, no causal mask (cascade attention:
               Hydragen, ChunkAttention, FlashInfer)
    past       the private pages of one row that were computed before this step, no causal mask
    new        the tokens a row computes in this step, causal, straight from the layer's k and v
    decode     the private part of all one-token rows, gathered side by side and masked to length, in one call

A token that appears in several spans gets them merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from p99lab.engine.attention.softmax import Attended, attend, merge
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import StepPath, StepPlan
from p99lab.engine.request import IntArray
from p99lab.engine.rope import HeadNorms, prepared

Select = slice | torch.Tensor  # a run, or indices

MAX_GATHERED_PAGES = 4  # of a decode row; above, copying its keys side by side costs more than a call of its own


def _length(select: Select) -> int:
    return select.stop - select.start if isinstance(select, slice) else len(select)


def _take(tensor: torch.Tensor, select: Select) -> torch.Tensor:
    """Along the first dimension; a view where the selection is a run. On CPUs `index_select` copies faster than []."""
    return tensor[select] if isinstance(select, slice) else tensor.index_select(0, select)


def _slots(pages: IntArray, positions: NDArray[np.integer[Any]], page_size: int) -> IntArray:
    """Where in the pool the tokens at `positions` of these pages lie."""
    slots: IntArray = pages[positions // page_size] * page_size + positions % page_size
    return slots


class Span(Protocol):
    """Attention of `tokens` (which of the step's [T] tokens) over one range of keys."""

    @property
    def tokens(self) -> Select: ...

    def attend(self, pool: KVPool, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
        """q: [n, q_heads, dim] of this span's tokens; k, v: [T, kv_heads, dim] of the whole step.

        Returns out [n, q_heads, dim] and lse [n, q_heads]."""
        ...


@dataclass(frozen=True, slots=True)
class PastSpan:
    """`tokens` see the first `num_keys` slots of `pages`."""

    tokens: Select
    pages: Select
    num_keys: int

    def attend(self, pool: KVPool, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
        keys, values = (_take(x[layer], self.pages).flatten(0, 1)[None, : self.num_keys] for x in (pool.k, pool.v))
        out, lse = attend(q[None], keys, values)
        return out[0], lse[0]


@dataclass(frozen=True, slots=True)
class NewSpan:
    """`tokens` see themselves and what comes before them in the same row of this step."""

    tokens: slice

    def attend(self, pool: KVPool, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
        out, lse = attend(q[None], k[None, self.tokens], v[None, self.tokens], causal=True)
        return out[0], lse[0]


@dataclass(frozen=True, slots=True)
class DecodeSpan:
    """One token each of several rows: `tokens[i]` sees the slots `slots[i]` that `key_mask[i]` allows.

    Hidden slots repeat one of the row's own. A masked key still enters the sums, multiplied by 0, and what a foreign
    slot holds may be infinite.
    """

    tokens: Select
    slots: torch.Tensor  # [rows, max_keys]
    key_mask: torch.Tensor  # [rows, max_keys] bool

    def attend(self, pool: KVPool, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
        slots, shape = self.slots.flatten(), (*self.slots.shape, *k.shape[1:])  # [rows, max_keys, kv_heads, dim]
        keys, values = (_take(x[layer].flatten(0, 1), slots).view(shape) for x in (pool.k, pool.v))
        out, lse = attend(q[:, None], keys, values, key_mask=self.key_mask)
        return out[:, 0], lse[:, 0]


class ReferenceAttention:
    """`AttentionBackend` over a `KVPool`, on any torch device."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._device = pool.k.device
        self._slots: Select = slice(0, 0)
        self._spans: list[Span] = []
        self._disjoint = True

    def plan(self, step: StepPlan) -> StepPath:
        """Work out slots and spans of a step, once for all layers."""
        ends = np.cumsum([row.num_scheduled_tokens for row in step.rows])
        self._slots = self._select(self._new_slots(step))
        self._spans = list(self._plan_spans(step, ends))
        covered = sum(_length(span.tokens) for span in self._spans)
        self._disjoint = covered == step.num_tokens
        return StepPath.EAGER

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """See `LayerAttention`."""
        return self.run(layer, *prepared(heads, self._pool.k.shape[3], table, norms))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v of the step's tokens, attend. q: [T, q_heads, dim]; k, v: [T, kv_heads, dim]; out like q."""
        self._pool.k[layer].flatten(0, 1)[self._slots] = k
        self._pool.v[layer].flatten(0, 1)[self._slots] = v
        if self._disjoint:
            return self._run_disjoint(layer, q, k, v)
        total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        total_lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
        for span in self._spans:
            out, lse = span.attend(self._pool, layer, q[span.tokens], k, v)
            at = span.tokens
            total[at], total_lse[at] = merge(total[at], total_lse[at], out, lse)
        return total.to(q.dtype)

    def _run_disjoint(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if len(self._spans) == 1:
            return self._spans[0].attend(self._pool, layer, q, k, v)[0]
        total = torch.empty_like(q)
        for span in self._spans:
            total[span.tokens] = span.attend(self._pool, layer, q[span.tokens], k, v)[0]
        return total

    def _new_slots(self, step: StepPlan) -> IntArray:
        """The slot of every token of the step, [T]."""
        size = self._pool.page_size
        rows = [(row.page_table, np.arange(row.num_computed_tokens, row.seq_len)) for row in step.rows]
        return np.concatenate([_slots(pages, positions, size) for pages, positions in rows])

    def _plan_spans(self, step: StepPlan, ends: IntArray) -> Iterator[Span]:
        page_size = self._pool.page_size
        num_shared_pages = [0] * len(step.rows)
        for group in step.groups:
            last_page = group.first_page + group.num_pages
            for index in group.rows:
                num_shared_pages[index] = max(num_shared_pages[index], last_page)
            tokens = [np.arange(ends[i] - step.rows[i].num_scheduled_tokens, ends[i]) for i in group.rows]
            pages = step.rows[group.rows[0]].page_table[group.first_page : last_page]
            yield PastSpan(self._select(np.concatenate(tokens)), self._select(pages), group.num_pages * page_size)
        decoding: list[int] = []
        for index, row in enumerate(step.rows):
            first_page = num_shared_pages[index]
            if row.num_scheduled_tokens == 1:
                decoding.append(index)
                continue
            tokens_of_row = slice(int(ends[index]) - row.num_scheduled_tokens, int(ends[index]))
            num_past = row.num_computed_tokens - first_page * page_size
            if num_past:
                pages = row.page_table[first_page : first_page + -(-num_past // page_size)]
                yield PastSpan(tokens_of_row, self._select(pages), num_past)
            yield NewSpan(tokens_of_row)
        yield from self._plan_decode(step, ends, decoding, num_shared_pages)

    def _plan_decode(
        self, step: StepPlan, ends: IntArray, decoding: list[int], num_shared_pages: list[int]
    ) -> Iterator[Span]:
        """One gathered span for all rows with a short private part; a long one is read where it lies."""
        page_size = self._pool.page_size
        private = {i: step.rows[i].page_table[num_shared_pages[i] :] for i in decoding}
        num_keys = {i: step.rows[i].seq_len - num_shared_pages[i] * page_size for i in decoding}
        short = [i for i in decoding if len(private[i]) <= MAX_GATHERED_PAGES]
        if len(short) < 2:
            short = []
        for i in decoding:
            if i not in short:
                yield PastSpan(slice(int(ends[i]) - 1, int(ends[i])), self._select(private[i]), num_keys[i])
        if short:
            positions = np.arange(max(num_keys[i] for i in short))
            mask = positions < np.array([[num_keys[i]] for i in short])
            slots = np.stack(
                [_slots(private[i], line, page_size) for i, line in zip(short, mask * positions, strict=True)]
            )
            yield DecodeSpan(self._select(ends[short] - 1), self._tensor(slots.astype(np.int64)), self._tensor(mask))

    def _select(self, indices: IntArray) -> Select:
        """A slice where the indices are consecutive (a view, no copy), otherwise a tensor of them."""
        first, last = int(indices[0]), int(indices[-1])
        if last - first == len(indices) - 1 and bool((np.diff(indices) == 1).all()):
            return slice(first, last + 1)
        return self._tensor(indices.astype(np.int64))

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
