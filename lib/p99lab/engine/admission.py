"""Who is admitted next: the policy's order, in which company may be preferred for a bounded time among equals, and long
prompts come in one by one.

Requests that share a long prefix share the reading of it, and fill each other's tiles. So a waiting request may be
passed by others of its urgency whose document has more company, for at most `max_hold_s` after its arrival. What that
can win depends on the kernels: on an H200 with query heads folded into rows a question of 64 tokens fills its tiles
alone (`docs/log.md`), so it is off unless asked for.

A prompt is long while no step holds what is left of it to compute. It takes all its pages at once, and of several only
the first in order is given work. So the next one waits until a step holds the rest of that, and shorter ones of its
urgency pass it meanwhile.

A long prompt that is refused pages is passed only by requests that leave it as many as it needs, even if they and all
others that came later kept theirs and took all that they may. So it waits for nobody but those that ran when it was
first refused, those that came earlier, and those that are more urgent: no stream of short ones keeps it waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.composition import remaining
from p99lab.engine.grouping import trie
from p99lab.engine.policy import Urgency, fcfs
from p99lab.engine.request import IntArray, Request, Status

LOOKAHEAD = 32  # waiting requests that may change places; looking up more documents would cost the step


class Company(NamedTuple):
    """Sorts what a request shares with others: the larger company first, then that which waits longest."""

    minus_num_members: int
    rank: int


ALONE = Company(0, 0)


class Admission:
    """Says who of the waiting is let in next.

    `max_hold_s` 0: the order is the policy's. `urgency`: the policy's, with which its keys begin.
    """

    def __init__(self, tree: PrefixTree, max_hold_s: float, min_shared_tokens: int, urgency: Urgency) -> None:
        self._tree = tree
        self._max_hold_s = max_hold_s
        self._min_shared_tokens = min_shared_tokens
        self._urgency = urgency
        self._found: dict[int, IntArray] = {}  # by request number: pages that the tree held of it when last looked up
        self._long_until: dict[int, int] = {}  # by request number: long until so many tokens have been planned

    def candidates(
        self, waiting: Sequence[Request], running: Sequence[Request], now: float, step_tokens: float, num_planned: int
    ) -> Iterator[Request]:
        """Those of `waiting` (in the policy's order) whom a step may let in, in the order of admission.

        Before the next one is asked for, each has been given pages and is in `running`, or has been refused them.

        Args:
            step_tokens: a prompt with more to compute is long.
            num_planned: tokens that steps have been planned to compute so far.
        """
        numbers = {request.number for request in waiting}
        self._long_until = {number: until for number, until in self._long_until.items() if number in numbers}
        reading = min((self._urgency(request) for request in running if remaining(request) > step_tokens), default=None)
        passed: float | None = None  # the urgency of a long prompt that waits
        refused: Request | None = None  # that one, if it waits for pages
        for request in self.order(waiting, running, now):
            urgency = self._urgency(request)
            if passed is not None and passed < urgency:
                return
            if passed is not None or (reading is not None and reading <= urgency):
                if self._is_long(request, step_tokens, num_planned):
                    passed = urgency
                    continue
                if refused is not None and not self._leaves_pages(request, refused, running):
                    return
            yield request
            if request.status is Status.WAITING:
                if not self._is_long(request, step_tokens, num_planned):
                    return
                passed, refused = urgency, request

    def next_ones(self, waiting: Sequence[Request], num_requests: int) -> list[Request]:
        """The first `num_requests` of `waiting`, and as many not known to be long, which may pass the others."""
        first = waiting[:num_requests]
        short = [request for request in waiting if request.number not in self._long_until]
        return [*first, *(request for request in short[:num_requests] if request not in first)]

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

    def _is_long(self, request: Request, step_tokens: float, num_planned: int) -> bool:
        """Whether no step holds what the tree lacks of a waiting request. A partial page of it may be there, unseen.

        The tree lacks what it lacked before, less what has been planned since, or more. So it is not asked each time.
        """
        if request.num_tokens <= step_tokens:
            return False
        if num_planned < self._long_until.get(request.number, 0):
            return True
        size = self._tree.pool.page_size
        num_cached = min((len(self._find(request)) + 1) * size - 1, request.num_reusable_tokens)
        num_missing = request.num_tokens - num_cached
        if num_missing > step_tokens:
            self._long_until[request.number] = num_planned + int(num_missing - step_tokens)
        else:
            self._long_until.pop(request.number, None)
        return num_missing > step_tokens

    def _leaves_pages(self, request: Request, refused: Request, running: Sequence[Request]) -> bool:
        """Whether `refused` could have its pages with `request` let in, once those that came before it have ended.

        Counted are all that the others hold and may yet take, with one page that `request` may copy from.
        """
        pool, found = self._tree.pool, self._find(request)
        held = pool.references.copy()
        num_later = pool.pages_for(len(request.tokens) - 1) + 1 - len(found)
        for other in running:
            if self._urgency(other) == self._urgency(refused) and fcfs(other, 0.0) > fcfs(refused, 0.0):
                num_later += pool.pages_for(len(other.tokens) - 1) - other.num_pages
            else:
                held[other.pages] -= 1
        held[found] += 1
        num_kept = int(np.count_nonzero(held)) + num_later
        return num_kept + pool.pages_for(refused.num_tokens) <= pool.num_pages

    def _find(self, request: Request) -> IntArray:
        return self._tree.find(request.token_ids[: request.num_reusable_tokens])

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
                pages = self._find(request)
            found[request.number] = pages
        self._found = found
        return [*found.values()]
