"""A step's index arrays as the CUDA kernels take them, also at the fixed sizes of a captured step. Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from p99lab.engine.attention.shape import GraphShape
from p99lab.engine.attention.spans import SpanPlan, Split, token_slots
from p99lab.engine.plan import StepPlan
from p99lab.engine.request import IntArray


class Lists(NamedTuple):
    """What a step's kernels read besides FlashInfer's lists, on the host or on the device, int32; see `SpanPlan`."""

    slots: Any  # [T], where keys and values are stored; negative: nowhere
    tokens: Any  # [M]
    items: Any  # [4 * N]
    lane_indptr: Any  # [L + 1]
    private_starts: Any  # [T]
    private_lens: Any  # [T]
    merge_indptr: Any  # [T + 1]
    merge_rows: Any


@dataclass(frozen=True, slots=True)
class Room:
    """Of a captured step: how many of each there can be."""

    num_tokens: int
    num_span_partials: int
    num_decode_partials: int
    num_items: int
    num_causal: int
    num_lanes: int

    @classmethod
    def of(cls, shape: GraphShape, split: Split) -> Self:
        """Cutting decode spans adds at most num_lanes - 1 items, each a part of the widest."""
        num_cuts = split.num_lanes - 1
        num_decode_partials = shape.num_decode_partials + num_cuts * min(shape.num_tokens, split.max_decode_tokens)
        sizes = (
            shape.num_span_partials,
            num_decode_partials,
            shape.num_decode_spans + num_cuts,
            shape.num_causal,
            split.num_lanes,
        )
        return cls(shape.num_tokens, *sizes)

    @property
    def sizes(self) -> Lists:
        """Elements of each list."""
        num_partials = self.num_span_partials + self.num_decode_partials
        decode = (4 * self.num_items, self.num_lanes + 1)
        merge = (self.num_tokens + 1, num_partials + self.num_tokens)
        return Lists(self.num_tokens, num_partials, *decode, self.num_tokens, self.num_tokens, *merge)

    def holds(self, spans: SpanPlan) -> bool:
        return (
            spans.num_span_partials <= self.num_span_partials
            and spans.num_partials - spans.num_span_partials <= self.num_decode_partials
            and len(spans.items) <= self.num_items
            and len(spans.causal_lens) <= self.num_causal
        )


def lists_of(step: StepPlan, spans: SpanPlan, page_size: int) -> Lists:
    """A step's lists, exactly as long as they are."""
    slots = token_slots(step, page_size)
    private = (spans.private_starts, spans.private_lens)
    decode = (spans.items.ravel(), spans.lane_indptr)
    return Lists(slots, spans.tokens, *decode, *private, spans.merge_indptr, spans.merge_rows)


def padded(lists: Lists, spans: SpanPlan, room: Room) -> Lists:
    """At the sizes of a captured step: tokens that a step has not store nothing and see nothing.

    Partial rows of decode spans begin behind the place of the last possible one of spans, causal ones behind them all.
    """
    num_spans, num_partials = spans.num_span_partials, spans.num_partials
    more_spans = np.int32(room.num_span_partials - num_spans)
    more_decode = np.int32(room.num_decode_partials - (num_partials - num_spans))
    rows = lists.merge_rows
    rows = (
        rows
        + np.where(rows < num_spans, np.int32(0), more_spans)
        + np.where(rows < num_partials, np.int32(0), more_decode)
    )
    sizes = room.sizes
    span_tokens, decode_tokens = np.split(lists.tokens, [num_spans])
    return Lists(
        slots=_filled(lists.slots, sizes.slots, -1),
        tokens=np.concatenate(
            [_filled(span_tokens, room.num_span_partials, -1), _filled(decode_tokens, room.num_decode_partials, -1)]
        ),
        items=_filled((spans.items + np.array([more_spans, 0, 0, 0], np.int32)).ravel(), sizes.items),
        lane_indptr=lists.lane_indptr,
        private_starts=_filled(lists.private_starts, sizes.private_starts),
        private_lens=_filled(lists.private_lens, sizes.private_lens),
        merge_indptr=np.pad(lists.merge_indptr, (0, sizes.merge_indptr - len(lists.merge_indptr)), mode="edge"),
        merge_rows=_filled(rows, sizes.merge_rows),
    )


def _filled(array: IntArray, size: int, value: int = 0) -> IntArray:
    return np.pad(array, (0, size - len(array)), constant_values=value)
