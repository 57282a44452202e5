"""How FlashInfer's planner of FA3 deals a layer's items to the multiprocessors, in plain numbers.

It goes through the heads of keys and values one after the other, within each through the longest keys first, and gives
each item to the processor that has the least so far, by its own count. The processor that ends up with the most by that
count decides how long the layer takes, but for some per cent where items are many and short.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

ITEM_KEYS = 256  # what the planner counts for an item besides its keys
ONE_KEY = 1 << 20  # a processor's account is one integer: keys in units of this, and below that how many items


class Dealt(NamedTuple):
    """What one processor works off; `num_keys` may be a mean."""

    num_keys: float
    num_items: int


def fullest_processor(pieces: Sequence[tuple[int, int]], num_heads: int, num_processors: int) -> Dealt:
    """What the processor that is given the most has.

    Args:
        pieces: (keys, how many items have so many) of one head, the longest first; all heads have the same.
    """
    steps = [(num_keys + ITEM_KEYS) * ONE_KEY + 1 for num_keys, count in pieces for _ in range(count)]
    accounts = [0] * num_processors  # a heap
    for _ in range(num_heads):
        for step in steps:
            heapreplace(accounts, accounts[0] + step)
    cost, num_items = divmod(max(accounts), ONE_KEY)
    return Dealt(cost - num_items * ITEM_KEYS, num_items)
