"""The slot that FA3's planner fills most, against its rule said item by item."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.slots import ITEM_KEYS, Slot, fullest_slot


def dealt(pieces: list[tuple[int, int]], num_heads: int, num_slots: int) -> list[list[int]]:
    """Keys of each item, slot by slot."""
    slots: list[list[int]] = [[] for _ in range(num_slots)]

    def cost(slot: list[int]) -> int:
        return sum(slot) + ITEM_KEYS * len(slot)

    for _ in range(num_heads):
        for num_keys, count in sorted(pieces, reverse=True):
            for _ in range(count):
                min(slots, key=cost).append(num_keys)
    return slots


some_pieces = st.dictionaries(st.integers(1, 131_072), st.integers(1, 12), min_size=1, max_size=5)


@settings(deadline=None, derandomize=True)
@given(some_pieces, st.sampled_from([1, 2, 8]), st.sampled_from([1, 3, 16]))
def test_it_is_the_fullest_of_all_that_are_dealt(pieces: dict[int, int], num_heads: int, num_slots: int) -> None:
    longest_first = sorted(pieces.items(), reverse=True)
    slots = dealt(longest_first, num_heads, num_slots)
    fullest = fullest_slot(longest_first, num_heads, num_slots)
    most = max(sum(slot) + ITEM_KEYS * len(slot) for slot in slots)
    assert fullest.num_keys + ITEM_KEYS * fullest.num_items == most
    assert fullest in {Slot(sum(slot), len(slot)) for slot in slots}


@pytest.mark.parametrize(("num_items", "rounds"), [(1, 1), (132, 1), (133, 2), (264, 2)])
def test_one_item_too_many_is_another_round(num_items: int, rounds: int) -> None:
    assert fullest_slot([(1000, num_items)], 1, 132) == (1000 * rounds, rounds)
