"""Runs dealt to lanes: every key once, and lanes of like length."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.engine.attention.lanes import BLOCK_KEYS, ITEM_KEYS, LEAST_KEYS, Lanes, deal

pytestmark = pytest.mark.light

Span = tuple[int, int]  # rows, keys

LENGTHS = st.one_of(st.integers(1, 40), st.integers(1, 3_000), st.integers(1, 140_000))
SPANS = st.lists(st.tuples(st.integers(1, 16), LENGTHS), max_size=80)


def dealt(spans: list[Span], num_lanes: int, first_partial: int = 0) -> tuple[Lanes, np.ndarray]:
    """The lanes, and where each span begins in a pool in which they lie apart, the last one first."""
    num_rows, num_keys = np.array(spans, np.int32).reshape(-1, 2).T
    starts = (np.cumsum(num_keys[::-1] + 7) - num_keys[::-1])[::-1].astype(np.int32)
    return deal(num_rows, starts, num_keys, num_lanes, first_partial), starts


def lengths(lanes: Lanes) -> list[int]:
    """Of the lanes, as the dealer counts: an item costs more than its keys."""
    return [int((lanes.items[first:end, 3] + ITEM_KEYS).sum()) for first, end in pairwise(lanes.indptr.tolist())]


@given(spans=SPANS, num_lanes=st.integers(1, 70), first_partial=st.integers(0, 50))
def test_every_key_of_a_span_is_in_one_item_and_rows_follow_each_other(
    spans: list[Span], num_lanes: int, first_partial: int
) -> None:
    lanes, starts = dealt(spans, num_lanes, first_partial)
    for number, (num_rows, num_keys) in enumerate(spans):
        _, rows, firsts, counts = lanes.items[lanes.spans == number].T
        assert rows.tolist() == [num_rows] * len(rows)
        assert counts.min() >= 1
        assert counts.sum() == num_keys
        assert firsts.tolist() == (starts[number] + np.cumsum(counts) - counts).tolist()
        assert not ((firsts - starts[number]) % BLOCK_KEYS).any()
    partials, rows = lanes.items[:, 0], lanes.items[:, 1]
    assert partials.tolist() == (first_partial + np.cumsum(rows) - rows).tolist()
    assert (np.diff(lanes.spans) >= 0).all()
    assert all(array.dtype == np.int32 for array in (lanes.items, lanes.indptr, lanes.spans))


@given(spans=SPANS, num_lanes=st.integers(1, 70))
def test_lanes_have_all_items_and_are_of_like_length(spans: list[Span], num_lanes: int) -> None:
    lanes, _ = dealt(spans, num_lanes)
    assert len(lanes.indptr) == num_lanes + 1
    assert lanes.indptr[[0, -1]].tolist() == [0, len(lanes.items)]
    assert (np.diff(lanes.indptr) >= 0).all()
    assert len(lanes.items) <= max(0, len(spans) + num_lanes - 1)
    share = sum(num_keys + ITEM_KEYS for _, num_keys in spans) / num_lanes
    assert max(lengths(lanes)) <= 2 * max(share, LEAST_KEYS) + BLOCK_KEYS + ITEM_KEYS


@pytest.mark.parametrize(
    ("spans", "num_items"),
    [
        ([(16, 130_816)] * 4, 36),  # a lane beyond each document's end also begins the next
        ([(1, 130_816)], 33),
        ([(1, 3 * LEAST_KEYS)], 3),
        ([(1, LEAST_KEYS)], 1),
        ([(1, 2_048)] * 33, 33),
        ([(1, 4_000)] * 66, 66),
    ],
)
def test_spans_are_cut_no_more_than_lanes_need(spans: list[Span], num_items: int) -> None:
    assert len(dealt(spans, 33)[0].items) == num_items


def test_lanes_over_long_documents_end_at_the_same_time() -> None:
    for num_lanes in (16, 33, 49):
        of_lanes = lengths(dealt([(16, 130_816)] * 4, num_lanes)[0])
        assert max(of_lanes) - min(of_lanes) <= 2 * BLOCK_KEYS


def test_many_short_spans_fill_the_lanes_that_long_ones_leave() -> None:
    of_lanes = lengths(dealt([(1, 300)] * 200 + [(16, 130_816)] * 2, 33)[0])
    assert max(of_lanes) <= 1.1 * sum(of_lanes) / 33


def test_nothing_to_deal_is_nothing_dealt() -> None:
    lanes, _ = dealt([], 5)
    assert lanes.items.shape == (0, 4)
    assert lanes.indptr.tolist() == [0] * 6
