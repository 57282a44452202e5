"""The eviction order: least recently used first, however items are used in between."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.caches.eviction import EvictionOrder, least_recently_used

pytestmark = pytest.mark.light


@dataclass(eq=False)
class Item:
    last_used: int = 0


def test_an_empty_order_has_nothing_to_pop() -> None:
    assert EvictionOrder(least_recently_used).pop() is None


def test_entering_twice_is_entering_once() -> None:
    order: EvictionOrder[Item] = EvictionOrder(least_recently_used)
    item = Item()
    order.enter(item)
    order.enter(item)
    assert item in order
    assert len(order) == 1
    assert order.pop() is item
    assert order.pop() is None


def test_another_policy_is_another_rank() -> None:
    order: EvictionOrder[str] = EvictionOrder(len)
    for word in ("three", "a", "of"):
        order.enter(word)
    assert [order.pop(), order.pop(), order.pop()] == ["a", "of", "three"]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["enter", "use", "pop"]), st.integers(0, 5)), max_size=60))
def test_like_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    order: EvictionOrder[Item] = EvictionOrder(least_recently_used)
    items = [Item() for _ in range(6)]
    entered: list[Item] = []
    for clock, (operation, index) in enumerate(operations, start=1):
        item = items[index]
        if operation == "enter":
            item.last_used = clock
            order.enter(item)
            entered += [] if item in entered else [item]
        elif operation == "use":
            item.last_used = clock
        else:
            expected = min((other.last_used for other in entered), default=None)
            popped = order.pop()
            assert (popped.last_used if popped else None) == expected
            entered = [other for other in entered if other is not popped]
        assert len(order) == len(entered)
