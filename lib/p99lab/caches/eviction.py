"""Which cached item goes first: a heap ordered by a rank that may only grow while the item lives."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Used(Protocol):
    """Something that carries the logical time of its last use."""

    last_used: int


def least_recently_used(item: Used) -> int:
    """The rank of LRU."""
    return item.last_used


class EvictionOrder(Generic[T]):
    """The items that may be evicted, smallest `rank` first; a policy is its rank function.

    Using an item costs nothing here: its rank grows behind the heap's back, and an entry found out of date is pushed
    again with the rank of today. So there is one entry per item, however often it is used. Items are told apart by
    identity or hash; of equal ranks the one that entered first goes first.
    """

    def __init__(self, rank: Callable[[T], int]) -> None:
        self._rank = rank
        self._heap: list[tuple[int, int, T]] = []
        self._entered: set[T] = set()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entered)

    def __contains__(self, item: T) -> bool:
        return item in self._entered

    def enter(self, item: T) -> None:
        """`item` may be evicted from now on; entering it again changes nothing."""
        if item not in self._entered:
            self._entered.add(item)
            heapq.heappush(self._heap, (self._rank(item), next(self._numbers), item))

    def pop(self) -> T | None:
        """Take out the item of smallest rank; None when there is none."""
        while self._heap:
            rank, number, item = self._heap[0]
            if rank == self._rank(item):
                heapq.heappop(self._heap)
                self._entered.remove(item)
                return item
            heapq.heapreplace(self._heap, (self._rank(item), number, item))
        return None
