"""The processor that FA3's planner gives the most, against its rule said item by item."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.dealing import ITEM_KEYS, Dealt, fullest_processor

pytestmark = pytest.mark.light


def dealt(pieces: list[tuple[int, int]], num_heads: int, num_processors: int) -> list[list[int]]:
    """Keys of each item, processor by processor."""
    processors: list[list[int]] = [[] for _ in range(num_processors)]
    for _ in range(num_heads):
        for num_keys, count in sorted(pieces, reverse=True):
            for _ in range(count):
                min(processors, key=cost).append(num_keys)
    return processors


def cost(items: list[int]) -> int:
    return sum(items) + ITEM_KEYS * len(items)


some_pieces = st.dictionaries(st.integers(1, 131_072), st.integers(1, 12), min_size=1, max_size=5)


@settings(deadline=None, derandomize=True)
@given(some_pieces, st.sampled_from([1, 2, 8]), st.sampled_from([1, 3, 16]))
def test_it_is_the_fullest_of_all_that_are_dealt(pieces: dict[int, int], num_heads: int, num_processors: int) -> None:
    longest_first = sorted(pieces.items(), reverse=True)
    processors = dealt(longest_first, num_heads, num_processors)
    fullest = fullest_processor(longest_first, num_heads, num_processors)
    assert fullest.num_keys + ITEM_KEYS * fullest.num_items == max(map(cost, processors))
    assert fullest in {Dealt(sum(items), len(items)) for items in processors}


@pytest.mark.parametrize(("num_items", "rounds"), [(1, 1), (132, 1), (133, 2), (264, 2)])
def test_one_item_too_many_is_another_round(num_items: int, rounds: int) -> None:
    assert fullest_processor([(1000, num_items)], 1, 132) == (1000 * rounds, rounds)
