"""Who is admitted next: the policy's order, in which company may be preferred for a bounded time among equals.

Requests that share a long prefix share the reading of it, and fill each other's tiles. So a waiting request may be
passed by others of its urgency whose document has more company, for at most `max_hold_s` after its arrival. What that
can win depends on the kernels: on an H200 with query heads folded into rows a question of 64 tokens fills its tiles
alone (`docs/log.md`), so it is off unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.grouping import trie
from p99lab.engine.policy import Urgency
from p99lab.engine.request import IntArray, Request

LOOKAHEAD = 32  # waiting requests that may change places; looking up more documents would cost the step


class Company(NamedTuple):
    """Sorts what a request shares with others: the larger company first, then that which waits longest."""

    minus_num_members: int
    rank: int


ALONE = Company(0, 0)


class Admission:
    """Orders the waiting. `max_hold_s` 0: as the policy has it. `urgency`: the policy's, with which its keys begin."""

    def __init__(self, tree: PrefixTree, max_hold_s: float, min_shared_tokens: int, urgency: Urgency) -> None:
        self._tree = tree
        self._max_hold_s = max_hold_s
        self._min_shared_tokens = min_shared_tokens
        self._urgency = urgency
        self._found: dict[int, IntArray] = {}  # by request number: pages that the tree held of it when last looked up

    def order(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> list[Request]:
        """`waiting` (in the policy's order) in the order of admission.

        Only requests of equal urgency pass each other. Whoever has waited for `max_hold_s` comes first among them, in
        the policy's order, and is passed no more.
        """
        if self._max_hold_s == 0 or len(waiting) < 2:
            return [*waiting]
        near = waiting[:LOOKAHEAD]
        held = [request for request in near if not self._is_overdue(request, now)]
        company = dict(zip((request.number for request in held), self._company(held, running), strict=True))

        def key(request: Request) -> tuple[float, bool, Company]:
            return self._urgency(request), request.number in company, company.get(request.number, ALONE)

        return [*sorted(near, key=key), *waiting[LOOKAHEAD:]]

    def _is_overdue(self, request: Request, now: float) -> bool:
        return now - request.timeline.arrival_s >= self._max_hold_s

    def _company(self, waiting: Sequence[Request], running: Sequence[Request]) -> list[Company]:
        """Of each waiting request: those that share the deepest node of the trie with it which anybody shares."""
        size = self._tree.pool.page_size
        computed = [request.page_table[: request.num_computed_tokens // size] for request in running]
        order, nodes = trie([*self._look_up(waiting), *computed])
        company = [ALONE] * len(waiting)
        for node in nodes:
            if node.num_pages * size >= self._min_shared_tokens:
                members = order[node.first : node.last]
                for i in members:
                    if i < len(waiting):
                        company[i] = Company(-len(members), min(members))
        return company

    def _look_up(self, waiting: Sequence[Request]) -> list[IntArray]:
        """Pages of the tree for each, looked up once, and again when they have been evicted.

        A page that was evicted and holds something else by now goes unnoticed; that costs a preference, no more.
        """
        in_tree = self._tree.pool.in_tree
        found = {}
        for request in waiting:
            pages = self._found.get(request.number)
            if pages is None or (len(pages) and not in_tree[pages[-1]]):
                pages = self._tree.find(request.token_ids[: request.num_reusable_tokens])
            found[request.number] = pages
        self._found = found
        return [*found.values()]
