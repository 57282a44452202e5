"""Prefix groups of a step: which rows share which pages, from their page tables alone.

A page of the tree stands for one prefix, so rows whose tables agree up to a page agree in every token up to it. The
groups are the inner nodes of the compressed trie over the rows' tables: a system prompt's pages are shared by all, a
document's by those who ask about it, a conversation's by its turns.

Tables that have one page in one place have the same pages before it. So how far two of them agree is found by
bisection: a few comparisons, where reading them takes thousands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from p99lab.engine.costs import StepCost
from p99lab.engine.plan import PrefixGroup, Row
from p99lab.engine.request import IntArray


@dataclass(frozen=True, slots=True)
class TrieNode:
    """Rows `order[first:last]`, at least two, which share exactly their first `num_pages` shareable pages."""

    first: int
    last: int
    num_pages: int


def arrange(
    rows: Sequence[Row], page_size: int, min_shared_tokens: int, costs: StepCost | None = None
) -> tuple[list[int], tuple[PrefixGroup, ...]]:
    """An order of `rows` (their indices) in which the rows of every group are neighbours, and the groups in that order.

    Groups are of at least two rows and `min_shared_tokens` tokens each; see `PrefixGroup` for what holds of them. Only
    pages computed entirely before the step are shared. A node of the trie that is too short, or that `costs` say is
    read faster by whoever comes below it, is not given up where rows share more there: its pages then belong to the
    groups below, each of which reads them once. With `costs` the groups are never predicted slower than none at all.
    """
    order, nodes = trie([row.page_table[: row.num_computed_tokens // page_size] for row in rows])
    rows = [rows[i] for i in order]
    readers = _readers(nodes, [len(row.token_ids) for row in rows]) if costs is not None else []
    groups = []
    above: list[tuple[int, int]] = []  # of the nodes around the next one: where it ends, and pages spoken for
    for index, node in enumerate(nodes):
        while above and above[-1][0] <= node.first:
            above.pop()
        start = above[-1][1] if above else 0
        num_keys = (node.num_pages - start) * page_size
        if num_keys >= min_shared_tokens and (costs is None or costs.group_pays(num_keys, readers[index])):
            groups.append(PrefixGroup(tuple(range(node.first, node.last)), start, node.num_pages - start))
            start = node.num_pages
        above.append((node.last, start))
    if groups and costs is not None and costs.groups_cost(rows, groups):
        groups = []
    return order, tuple(groups)


def _readers(nodes: Sequence[TrieNode], num_tokens: Sequence[int]) -> list[list[int]]:
    """Who would read each node's pages if it were no group: the nodes and rows directly below, as their tokens."""
    until = [0, *accumulate(num_tokens)]
    deepest = [0] * len(num_tokens)
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        if index:
            readers[deepest[node.first]].append(until[node.last] - until[node.first])
        deepest[node.first : node.last] = [index] * (node.last - node.first)
    if nodes:
        for index, size in zip(deepest, num_tokens, strict=True):
            readers[index].append(size)
    return readers


def trie(tables: Sequence[IntArray]) -> tuple[list[int], list[TrieNode]]:
    """The tables' indices in the order of a walk through their trie; its inner nodes, each before those below it."""
    order: list[int] = []
    nodes: list[TrieNode] = []
    stack = [(list(range(len(tables))), 0)]  # tables that agree on so many pages at least; the next one last
    while stack:
        members, num_known = stack.pop()
        if len(members) < 2:
            order += members
            continue
        num_pages = _num_common(tables, members, num_known)
        ended = [i for i in members if len(tables[i]) == num_pages]
        nodes.append(TrieNode(len(order), len(order) + len(members), num_pages))
        order += ended
        stack += [(part, num_pages) for part in _parts(tables, members, num_pages)]
    return order, nodes


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
