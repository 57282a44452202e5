"""Prefix groups of a step: which rows share which pages, from their page tables alone.

A page of the tree stands for one prefix, so rows whose tables agree up to a page agree in every token up to it. The
groups are the inner nodes of the compressed trie over the rows' tables: a system prompt's pages are shared by all, a
document's by those who ask about it, a conversation's by its turns.

Tables that have one page in one place have the same pages before it. So how far two of them agree is found by
bisection: a few comparisons, where reading them takes thousands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from p99lab.engine.plan import PrefixGroup, Row
from p99lab.engine.request import IntArray


@dataclass(frozen=True, slots=True)
class Level:
    """Rows `order[first:last]`, at least two, which share exactly their first `num_pages` shareable pages."""

    first: int
    last: int
    num_pages: int


def arrange(rows: Sequence[Row], page_size: int, min_shared_tokens: int) -> tuple[list[int], tuple[PrefixGroup, ...]]:
    """An order of `rows` (their indices) in which the rows of every group are neighbours, and the groups in that order.

    Groups are of at least two rows and `min_shared_tokens` tokens each; see `PrefixGroup` for what holds of them. Only
    pages computed entirely before the step are shared. A level of the trie that is too short is not given up where rows
    share more below it: its pages then belong to the groups below, each of which reads them once.
    """
    order, levels = _trie([row.page_table[: row.num_computed_tokens // page_size] for row in rows])
    groups = []
    above: list[tuple[int, int]] = []  # of the levels around the next one: where it ends, and pages spoken for
    for level in levels:
        while above and above[-1][0] <= level.first:
            above.pop()
        start = above[-1][1] if above else 0
        if (level.num_pages - start) * page_size >= min_shared_tokens:
            groups.append(PrefixGroup(tuple(range(level.first, level.last)), start, level.num_pages - start))
            start = level.num_pages
        above.append((level.last, start))
    return order, tuple(groups)


def group_rows(rows: Sequence[Row], page_size: int, min_shared_tokens: int) -> tuple[PrefixGroup, ...]:
    """The groups of `arrange` for rows that stay in their order."""
    order, groups = arrange(rows, page_size, min_shared_tokens)
    return tuple(replace(group, rows=tuple(sorted(order[i] for i in group.rows))) for group in groups)


def _trie(tables: Sequence[IntArray]) -> tuple[list[int], list[Level]]:
    """The tables' indices in the order of a walk through their trie; its inner nodes, each before those below it."""
    order: list[int] = []
    levels: list[Level] = []
    stack = [(list(range(len(tables))), 0)]  # tables that agree on so many pages at least; the next one last
    while stack:
        members, num_known = stack.pop()
        if len(members) < 2:
            order += members
            continue
        num_pages = _num_common(tables, members, num_known)
        ended = [i for i in members if len(tables[i]) == num_pages]
        levels.append(Level(len(order), len(order) + len(members), num_pages))
        order += ended
        stack += [(part, num_pages) for part in _parts(tables, members, num_pages)]
    return order, levels


def _num_common(tables: Sequence[IntArray], members: Sequence[int], num_known: int) -> int:
    """How many pages all members share."""
    first = tables[members[0]]
    num_common = len(first)
    for i in members[1:]:
        low, high = num_known, min(num_common, len(tables[i]))  # at least, at most
        middle = high  # most share all that the members before them do
        while low < high:
            if first[middle - 1] == tables[i][middle - 1]:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        num_common = low
    return num_common


def _parts(tables: Sequence[IntArray], members: Sequence[int], at: int) -> Iterator[list[int]]:
    """The members that go on, by their page at `at`; the one that comes first last."""
    parts: dict[int, list[int]] = {}
    for i in members:
        if len(tables[i]) > at:
            parts.setdefault(int(tables[i][at]), []).append(i)
    for page in sorted(parts, reverse=True):
        yield parts[page]
