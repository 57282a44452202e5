"""Prefix groups of a step: which rows share which pages, from their page tables alone.

A page of the tree stands for one prefix, so rows whose tables agree up to a page agree in every token up to it. The
groups are the inner nodes of the compressed trie over the rows' tables: a system prompt's pages are shared by all, a
document's by those who ask about it, a conversation's by its turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from p99lab.caches.prefix_tree import common_len
from p99lab.engine.plan import PrefixGroup, Row
from p99lab.engine.request import IntArray


def prefix_order(rows: Sequence[Row], page_size: int) -> list[int]:
    """Indices of `rows` in an order in which the rows of every group are neighbours."""
    keys = [_shareable(row, page_size).tobytes() for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def group_rows(rows: Sequence[Row], page_size: int, min_shared_tokens: int) -> tuple[PrefixGroup, ...]:
    """Groups of at least two rows and `min_shared_tokens` tokens each; see `PrefixGroup` for what holds of them.

    Only pages computed entirely before the step are shared. A level of the trie that is too short is not given up where
    rows share more below it: its pages then belong to the groups below, each of which reads them once.
    """
    order = prefix_order(rows, page_size)
    tables = [_shareable(rows[i], page_size) for i in order]
    common = [common_len(first, second) for first, second in pairwise(tables)]
    groups = []
    stack = [(0, len(order), 0)]  # rows order[first:last] whose pages before `start` are spoken for
    while stack:
        first, last, start = stack.pop()
        end = min(common[first : last - 1], default=0)
        if (end - start) * page_size >= min_shared_tokens:
            groups.append(PrefixGroup(tuple(sorted(order[first:last])), start, end - start))
            start = end
        stack += [(low, high, start) for low, high in _parts(common, first, last, end)]
    return tuple(groups)


def _parts(common: list[int], first: int, last: int, end: int) -> Iterator[tuple[int, int]]:
    """The stretches of at least two neighbours in [first, last) that share more than `end` pages, last one first."""
    high = last
    for at in range(last - 1, first - 1, -1):
        if at == first or common[at - 1] == end:
            if high - at >= 2:
                yield at, high
            high = at


def _shareable(row: Row, page_size: int) -> IntArray:
    return row.page_table[: row.num_computed_tokens // page_size]
