"""The scheduler: who holds pages, and what each step computes.

There are no phases. A running request has `num_tokens` and is done with `num_computed_tokens` of them, and each step
makes the second approach the first. A prompt in one piece or in chunks, a prefix found in the tree, a request computed
again after it gave way, and decoding differ only in how far there is to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from p99lab.caches.pages import PageCopy
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.grouping import group_rows, prefix_order
from p99lab.engine.plan import Row, StepPlan, StepResult
from p99lab.engine.policy import POLICIES
from p99lab.engine.request import FinishReason, Logprobs, Request, Status
from p99lab.errors import AccountingError, BadParameterError, QueueFullError

NUM_PROTECTED = 4  # waiting requests whose cached prefix is evicted last; matching more would cost the step


class RequestTooLargeError(BadParameterError):
    """A request that needs more pages than the pool has, even alone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the latest `schedule` did besides its plan. `running` hold pages while the step runs, scheduled or not."""

    running: tuple[Request, ...] = ()
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What a step did to one request: a token it sampled, or its end (`request.finish_reason`), or both."""

    request: Request
    token_id: int | None
    logprobs: Logprobs | None


@dataclass(slots=True)
class Counters:
    """Since the start. Queries count each request that may read the cache once, at its first admission."""

    num_queries: int = 0
    num_hits: int = 0  # queries that found at least one token
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_refusals: int = 0  # admissions that had to wait for pages


class Composition(Protocol):
    """How a step is put together from the requests that hold pages (most urgent first)."""

    def room(self, running: Sequence[Request]) -> int:
        """Prompt tokens that a step could still take if one more request were admitted."""
        ...

    def shares(self, running: Sequence[Request]) -> list[tuple[Request, int]]:
        """Who computes how many tokens in this step; at least one share when anything runs."""
        ...


@dataclass(frozen=True, slots=True)
class Chunked:
    """Decode rows first, then prompts in pieces, as many tokens as fit (Sarathi-Serve, arXiv:2403.02310)."""

    max_num_batched_tokens: int

    def room(self, running: Sequence[Request]) -> int:
        return self.max_num_batched_tokens - sum(remaining(request) for request in running)

    def shares(self, running: Sequence[Request]) -> list[tuple[Request, int]]:
        shares = []
        left = self.max_num_batched_tokens
        for request in sorted(running, key=is_prompt):
            num_tokens = min(remaining(request), left)
            if num_tokens:
                shares.append((request, num_tokens))
            left -= num_tokens
        return shares


@dataclass(frozen=True, slots=True)
class Stock:
    """Whole prompts alone while there are any, else all decode rows: the baseline. A prompt too long runs by itself."""

    max_num_batched_tokens: int

    def room(self, running: Sequence[Request]) -> int:
        return self.max_num_batched_tokens - sum(remaining(request) for request in running if is_prompt(request))

    def shares(self, running: Sequence[Request]) -> list[tuple[Request, int]]:
        prompts = [request for request in running if is_prompt(request)]
        shares: list[tuple[Request, int]] = []
        left = self.max_num_batched_tokens
        for request in prompts:
            left -= remaining(request)
            if left < 0 and shares:
                break
            shares.append((request, remaining(request)))
        return shares or [(request, remaining(request)) for request in running]


COMPOSITIONS: Mapping[str, Callable[[int], Composition]] = MappingProxyType({"chunked": Chunked, "stock": Stock})


def remaining(request: Request) -> int:
    """Tokens still to compute before the next one can be sampled."""
    return request.num_tokens - request.num_computed_tokens


def is_prompt(request: Request) -> bool:
    """Not merely one sampled token behind: a prompt, or a request that is computed again after it gave way."""
    return request.is_prefill or remaining(request) > 1


class Scheduler:
    """Admits, plans and ends requests. `schedule` and `update` alternate; every other method may be called between.

    `tree` belongs to this scheduler. `running` and `waiting` are for others to read.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        grouping: GroupingConfig,
        tree: PrefixTree,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.turn = Turn()
        self.counters = Counters()
        self.tree = tree
        self._max_num_seqs = config.max_num_seqs
        self._max_num_waiting = config.max_num_waiting
        self._grouping = grouping
        self._policy = POLICIES[config.policy]
        self._composition: Composition = COMPOSITIONS[config.composition](config.max_num_batched_tokens)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._once_admitted: set[str] = set()  # live requests that run, or ran and gave way
        self._copies: list[PageCopy] = []  # granted, and their step has not ended
        self._ending: dict[str, FinishReason] = {}  # end when the step in flight does
        self._in_flight: StepPlan | None = None
        self._epoch = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestTooLargeError: the pool could not hold it even alone.
            BadParameterError: its id is in use.
            QueueFullError: as many as may wait for their first admission do.
        """
        pool = self.tree.pool
        num_pages = pool.pages_for(len(request.tokens) - 1)  # the last token sampled is never computed
        if num_pages > pool.num_pages:
            raise RequestTooLargeError(
                f"request '{request.request_id}' needs {num_pages} pages of {pool.page_size} tokens, "
                f"the pool has {pool.num_pages}"
            )
        if request.request_id in self._requests:
            raise BadParameterError(f"request id '{request.request_id}' is in use")
        self._require_place()
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def cancel(self, request_id: str) -> bool:
        """End a request, computed or not; False when no live request has this id. See `finish` for when it ends."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.CANCELLED)
        return request is not None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request now; while a step is in flight that may touch its pages, when that step ends."""
        if request.status is Status.FINISHED:
            return
        if self._in_flight is not None and request.status is Status.RUNNING:
            self._ending.setdefault(request.request_id, reason)
        else:
            self._end(request, reason)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do."""
        if self._in_flight is not None:
            raise AccountingError(f"schedule() while step {self._in_flight.epoch} is in flight")
        self._sort(self.running, now)
        self._sort(self.waiting, now)
        self._protect_waiting()
        preempted = self._grow()
        admitted = self._admit() if not preempted else []
        self._sort(self.running, now)
        self.turn = Turn(tuple(self.running), tuple(admitted), tuple(preempted))
        if self.running:
            self._in_flight = self._plan(self._composition.shares(self.running))
        elif self.waiting:
            raise AccountingError("an idle pool cannot hold the next request")
        return self._in_flight

    def update(self, result: StepResult) -> list[Change]:
        """Take in what the step in flight computed. Returns one change per request that sampled a token or ended."""
        plan = self._in_flight
        if plan is None or plan.epoch != result.epoch:
            raise AccountingError(f"the result of step {result.epoch} is not the one in flight")
        self._in_flight = None
        for copy in self._copies:
            self.tree.finish_copy(copy)
        self._copies = []
        changes = []
        for index, (row, token_id, logprobs) in enumerate(
            zip(plan.rows, result.token_ids, result.logprobs, strict=True)
        ):
            if (token_id is not None) != row.samples:
                raise AccountingError(f"'{row.request_id}' sampled {token_id}, planned was {row.samples}")
            request = self._requests[row.request_id]
            self._advance(request, row.num_scheduled_tokens)
            self._keep_scores(request, row, result.prompt_logprobs.get(index, ()))
            if token_id is not None and request.request_id not in self._ending:
                self._append(request, token_id)
                changes.append(Change(request, token_id, logprobs))
        changes += [Change(self._requests[request_id], None, None) for request_id in self._ending]
        for request_id, reason in self._ending.items():
            self._end(self._requests[request_id], reason)
        self._ending = {}
        return changes

    def check(self) -> None:
        """Prove all accounts: pages against tree, page tables and copies, and every request's place and progress.

        Raises:
            AccountingError: anything that does not add up.
        """
        size = self.tree.pool.page_size
        self.tree.check([request.pages for request in self.running], self._copies)
        for request in (*self.running, *self.waiting):
            is_running = request.status is Status.RUNNING
            for ok, problem in (
                (self._requests.get(request.request_id) is request, "is not known"),
                (request.status is not Status.FINISHED, "has finished"),
                (any(request is other for other in (self.running if is_running else self.waiting)), "is misplaced"),
                (is_running or request.num_pages == 0, "waits and holds pages"),
                (is_running or request.num_computed_tokens == 0, "waits and counts computed tokens"),
                (request.num_computed_tokens < request.num_tokens, "has nothing to compute"),
                (request.num_computed_tokens <= request.num_reusable_tokens, "has computed tokens and not scored them"),
                (request.num_computed_tokens <= request.num_pages * size, "has computed more than its pages hold"),
            ):
                if not ok:
                    raise AccountingError(f"request '{request.request_id}' {problem}")
        if len(self._requests) != len(self.running) + len(self.waiting):
            raise AccountingError("a live request neither waits nor runs")
        if self._in_flight is None and (self._copies or self._ending):
            raise AccountingError("no step is in flight, and something waits for its end")

    def _require_place(self) -> None:
        if self._max_num_waiting is None:
            return
        num_newcomers = sum(request.request_id not in self._once_admitted for request in self.waiting)
        if num_newcomers >= self._max_num_waiting:  # those that gave way were let in before, and take nobody's place
            raise QueueFullError(f"the queue is full: {num_newcomers} requests wait already")

    def _sort(self, requests: list[Request], now: float) -> None:
        requests.sort(key=lambda request: self._policy(request, now))

    def _protect_waiting(self) -> None:
        """Before pages are evicted: what the next requests will find counts as used, the most urgent's last of all."""
        pool = self.tree.pool
        if self.waiting and pool.num_free < pool.pages_for(self.waiting[0].num_tokens):
            for request in reversed(self.waiting[:NUM_PROTECTED]):
                self.tree.touch(request.token_ids[: request.num_reusable_tokens])

    def _grow(self) -> list[Request]:
        """Give every running request pages for all its tokens, the most urgent first. The least urgent give way."""
        preempted: list[Request] = []
        for request in [*self.running]:
            while request.status is Status.RUNNING and not self._extend(request):
                preempted.append(self._preempt(self.running[-1]))
        return preempted

    def _extend(self, request: Request) -> bool:
        num_pages = self.tree.pool.pages_for(request.num_tokens)
        if num_pages > request.num_pages:
            pages = self.tree.extend(num_pages - request.num_pages)
            if pages is None:
                return False
            request.page_table[request.num_pages : num_pages] = pages
            request.num_pages = num_pages
        return True

    def _preempt(self, victim: Request) -> Request:
        """Take a request's pages; it waits again, and starts from what the tree still has of it then."""
        self._release(victim)
        self.running.remove(victim)
        self.waiting.append(victim)
        victim.status = Status.WAITING
        victim.num_computed_tokens = 0
        self.counters.num_preemptions += 1
        return victim

    def _admit(self) -> list[Request]:
        """Grant pages to waiting requests in order, while a step has room for their tokens. Nobody overtakes."""
        admitted: list[Request] = []
        room = self._composition.room(self.running)
        while self.waiting and room > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if not self._start(request):
                self.counters.num_refusals += 1
                break
            self.running.append(self.waiting.pop(0))
            admitted.append(request)
            room -= remaining(request)
        return admitted

    def _start(self, request: Request) -> bool:
        grant = self.tree.grant(request.token_ids, request.num_tokens, request.num_reusable_tokens)
        if grant is None:
            return False
        request.num_pages = len(grant.pages)
        request.page_table[: request.num_pages] = grant.pages
        request.num_computed_tokens = grant.num_cached_tokens
        request.status = Status.RUNNING
        if grant.copy is not None:
            self._copies.append(grant.copy)
        if request.request_id not in self._once_admitted:
            self._once_admitted.add(request.request_id)
            if not request.scores_prompt:
                self._count_query(request, grant.num_cached_tokens)
        return True

    def _count_query(self, request: Request, num_cached_tokens: int) -> None:
        request.num_cached_tokens = num_cached_tokens
        self.counters.num_queries += 1
        self.counters.num_hits += num_cached_tokens > 0
        self.counters.num_queried_tokens += request.num_tokens
        self.counters.num_cached_tokens += num_cached_tokens

    def _plan(self, shares: list[tuple[Request, int]]) -> StepPlan:
        self._epoch += 1
        rows = [self._row(request, num_tokens) for request, num_tokens in shares]
        copies = tuple(self._copies)
        if not self._grouping.enabled:
            return StepPlan(self._epoch, tuple(rows), (), copies)
        size = self.tree.pool.page_size
        rows = [rows[i] for i in prefix_order(rows, size)]
        groups = group_rows(rows, size, self._grouping.min_shared_tokens)
        return StepPlan(self._epoch, tuple(rows), groups, copies)

    def _row(self, request: Request, num_tokens: int) -> Row:
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        return Row(
            request_id=request.request_id,
            number=request.number,
            token_ids=request.tokens[start:stop].copy(),
            num_computed_tokens=start,
            page_table=request.page_table[: self.tree.pool.pages_for(stop)].copy(),
            samples=stop == request.num_tokens,
            sampling=request.sampling,
            num_output_tokens=request.num_output_tokens,
            target_ids=request.target_ids(start, stop),
        )

    def _advance(self, request: Request, num_tokens: int) -> None:
        """Count tokens as computed; pages that became full enter the tree, whose pages replace the request's own."""
        size = self.tree.pool.page_size
        num_full_before = request.num_computed_tokens // size
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens // size > num_full_before:
            kept = self.tree.insert(request.tokens[: request.num_computed_tokens], request.pages)
            request.page_table[: len(kept)] = kept

    def _keep_scores(self, request: Request, row: Row, scores: Sequence[Logprobs]) -> None:
        if len(scores) != (0 if row.target_ids is None else len(row.target_ids)):
            raise AccountingError(f"'{row.request_id}' got {len(scores)} scores of its prompt, asked were others")
        if scores:
            first = row.num_computed_tokens + 1
            request.prompt_logprobs[first : first + len(scores)] = scores

    def _append(self, request: Request, token_id: int) -> None:
        request.append_token(token_id)
        sampling = request.sampling
        is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            self._end(request, FinishReason.STOP)
        elif request.num_output_tokens == sampling.max_tokens:
            self._end(request, FinishReason.LENGTH)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._release(request)
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._once_admitted.discard(request.request_id)

    def _release(self, request: Request) -> None:
        """Leave all that a request has computed in the tree, its partial last page too, and give its pages back."""
        computed = request.tokens[: request.num_computed_tokens]
        kept = self.tree.insert(computed, request.pages, final=True)
        self.tree.release(np.concatenate([kept, request.pages[len(kept) :]]))
        request.num_pages = 0
