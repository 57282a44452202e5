"""Spans of keys dealt to lanes that work side by side: what `decode_kernel` is given, planned in integers.

The spans lie on a line, one behind the other, and the line is cut into as many stretches as there are lanes, of about
the same length (stream-K; for decoding see LeanAttention, arXiv 2405.10480). So a long span is shared by many lanes, a
lane may have many short spans, and all end at about the same time, whatever the lengths are. A cut that would fall
close to the end of a span is moved there: it would cost another partial result, and waiting for its keys, and even out
next to nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p99lab.engine.request import IntArray

BLOCK_KEYS = 128  # cuts within a span fall on multiples: no block of a kernel is cut, whose blocks divide this
LEAST_KEYS = 256  # a shorter stretch is not worth a lane
ITEM_KEYS = 64  # what beginning and ending an item costs, in keys read
SNAP = 1 / 8  # of a stretch: a cut that is closer to the end of a span is moved there


@dataclass(frozen=True, slots=True)
class Lanes:
    """Spans cut into N items, int32; lane i has those from indptr[i] to indptr[i + 1]."""

    items: IntArray  # [N, 4]: first partial row, number of rows, first slot, number of keys
    indptr: IntArray  # [L + 1]
    spans: IntArray  # [N], the span that each item is a part of, ascending


def deal(num_rows: IntArray, key_starts: IntArray, num_keys: IntArray, num_lanes: int, first_partial: int = 0) -> Lanes:
    """Cut spans, and deal the items. There are at most num_lanes - 1 items more than spans.

    Args:
        num_rows: [B], rows that see each span.
        key_starts, num_keys: [B], its first slot, and how many there are: at least 1.
        first_partial: partial rows that stand before those of the first item.
    """
    extents = num_keys.astype(np.int64) + ITEM_KEYS
    begins = np.cumsum(extents) - extents
    total = int(extents.sum())
    cuts = _cuts(begins.tolist(), num_keys.tolist(), total, num_lanes)
    at = np.union1d(begins, cuts[cuts < total])
    spans = np.searchsorted(begins, at, "right") - 1
    offsets = at - begins[spans]
    stops = np.minimum(np.append(at[1:], total) - begins[spans], num_keys[spans])
    rows = num_rows[spans]
    firsts = first_partial + np.cumsum(rows) - rows
    items = np.stack((firsts, rows, key_starts[spans] + offsets, stops - offsets), 1)
    indptr = np.searchsorted(at, np.concatenate(([0], cuts, [total])))
    return Lanes(items.astype(np.int32), indptr.astype(np.int32), spans.astype(np.int32))


def _cuts(begins: list[int], num_keys: list[int], total: int, num_lanes: int) -> NDArray[np.int64]:
    """Where on the line one lane ends and the next begins, [num_lanes - 1]."""
    cuts = np.full(num_lanes - 1, total, np.int64)
    at = 0
    for lane in range(num_lanes - 1):
        share = max(LEAST_KEYS, (total - at) / (num_lanes - lane))
        if at + share >= total:
            break
        span = bisect_right(begins, at + share) - 1
        offset = round((at + share - begins[span]) / BLOCK_KEYS) * BLOCK_KEYS
        if offset <= share * SNAP:
            offset = 0
        elif num_keys[span] - offset <= share * SNAP:
            offset, span = 0, span + 1
        at = cuts[lane] = begins[span] + offset if span < len(begins) else total
    return cuts
