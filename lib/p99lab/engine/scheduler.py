"""The scheduler: who holds pages, and what each step computes.

There are no phases. A running request has `num_tokens` and is done with `num_computed_tokens` of them, and each step
makes the second approach the first. A prompt in one piece or in chunks, a prefix found in the tree, a request computed
again after it gave way, and decoding differ only in how far there is to go.

A step may be planned while the one before it is in flight, from what is known once that one has been planned: how many
tokens it computes and who samples, not what. Whatever a step in flight touches stays as it is until that step has been
taken in: its pages are not freed, its requests do not give way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from p99lab.caches.prefix_tree import Grant, PrefixTree
from p99lab.engine.accounts import PlannedStep, check_accounts
from p99lab.engine.admission import Admission
from p99lab.engine.composition import ScheduledTokens, compose, remaining
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.costs import StepCost
from p99lab.engine.grouping import arrange
from p99lab.engine.plan import PrefixGroup, Row, StepPlan, StepResult
from p99lab.engine.policy import POLICIES, URGENCIES
from p99lab.engine.request import FinishReason, Logprobs, Request, Status
from p99lab.engine.scheduler_output import Counters, SampledToken, ScheduleOutcome
from p99lab.engine.step_price import Reader, SharedKeys
from p99lab.errors import AccountingError, BadParameterError, QueueFullError

MAX_IN_FLIGHT = 2  # one step runs, one is queued behind it
NUM_PROTECTED = 4  # waiting requests whose cached prefix is evicted last; matching more would cost the step


class RequestTooLargeError(BadParameterError):
    """A request that needs more pages than the pool has, even alone."""


class Scheduler:
    """Admits, plans and ends requests.

    `schedule` plans a step, `update` takes in the oldest one in flight. Up to `MAX_IN_FLIGHT` steps are in flight, and
    are executed in the order they were planned in. Every other method may be called at any time. `tree` belongs to this
    scheduler. `running` and `waiting` are for others to read.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        grouping: GroupingConfig,
        tree: PrefixTree,
        eos_token_ids: Iterable[int] = (),
        costs: StepCost | None = None,
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.outcome = ScheduleOutcome()
        self.counters = Counters()
        self.tree = tree
        self._max_num_seqs = config.max_num_seqs
        self._max_num_waiting = config.max_num_waiting
        self._reserve_tokens = config.reserve_tokens
        self._grouping = grouping
        self._policy = POLICIES[config.policy]
        self._grouping_costs = costs if grouping.decide_by == "cost" else None
        urgency = URGENCIES[config.policy]
        self._admission = Admission(tree, config.max_hold_s, grouping.min_shared_tokens, urgency)
        self._composition = compose(config, costs, self._readers)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._short_of_pages: set[str] = set()  # waiting requests to which pages were refused
        self._once_admitted: set[str] = set()  # live requests that run, or ran and gave way
        self._in_flight: deque[PlannedStep] = deque()  # oldest first
        self._epoch = 0
        self._num_planned_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether there is a step to plan or to take in."""
        return bool(self._requests or self._in_flight)

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
        """End a request, computed or not; False when no live request has this id. See `finish`."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.CANCELLED)
        return request is not None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request. What steps in flight sample for it is dropped; they keep its pages until they have ended."""
        if request.status is not Status.FINISHED:
            self._end(request, reason)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step. None: there is nothing to compute, or nothing before a step in flight is taken in."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            raise AccountingError(f"schedule() while {MAX_IN_FLIGHT} steps are in flight")
        self._sort(self.running, now)
        self._sort(self.waiting, now)
        self._protect_waiting()
        preempted = self._grow()
        if preempted is None:
            return None
        admitted, grants = self._admit(now) if not preempted else ([], [])
        if admitted:
            self._sort(self.running, now)
        shares = self._composition.shares(self.running)
        if shares:
            self.outcome = ScheduleOutcome(tuple(self.running), tuple(admitted), tuple(preempted))
            return self._plan(shares, admitted, grants)
        if admitted:
            raise AccountingError("requests were let in, and the step computes nothing")
        if self.waiting and not self._in_flight:
            raise AccountingError("an idle pool cannot hold the next request")
        return None

    def update(self, result: StepResult) -> list[SampledToken]:
        """Take in what the oldest step in flight computed. Returns each token that counts."""
        if not self._in_flight or self._in_flight[0].plan.epoch != result.epoch:
            raise AccountingError(f"the result of step {result.epoch} is not that of the oldest in flight")
        step = self._in_flight.popleft()
        sampled = []
        for index, (request, row, token_id, logprobs) in enumerate(
            zip(step.requests, step.plan.rows, result.token_ids, result.logprobs, strict=True)
        ):
            if (token_id is not None) != row.samples:
                raise AccountingError(f"'{row.request_id}' sampled {token_id}, planned was {row.samples}")
            if request.status is Status.FINISHED:
                continue
            self._enter(request, row)
            self._keep_scores(request, row, result.prompt_logprobs.get(index, ()))
            if token_id is not None:
                self._append(request, token_id)
                sampled.append(SampledToken(request, token_id, logprobs))
        self._give_back(step)
        return sampled

    def check(self) -> None:
        """Prove all accounts: pages against tree, page tables and copies, and every request's place and progress.

        Raises:
            AccountingError: anything that does not add up.
        """
        check_accounts(self.tree, self._requests, self.waiting, self.running, self._in_flight)

    def _readers(self, requests: Sequence[Request]) -> list[Reader]:
        """The keys that each would see in a step of them all, as that step would share them."""
        order, groups = self._arrange(rows := [self._row(request, remaining(request)) for request in requests])
        keys: list[list[SharedKeys]] = [[] for _ in requests]
        for group in groups:
            shared = SharedKeys(group.num_pages * self.tree.pool.page_size)
            for place in group.rows:
                keys[order[place]].append(shared)
        for own, row in zip(keys, rows, strict=True):
            num_alone = row.num_computed_tokens - sum(shared.num_keys for shared in own)
            if num_alone:
                own.append(SharedKeys(num_alone))
        return [Reader(own) for own in keys]

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
            for request in reversed(self._admission.next_ones(self.waiting, NUM_PROTECTED)):
                self.tree.touch(request.token_ids[: request.num_reusable_tokens])

    def _grow(self) -> list[Request] | None:
        """Give every running request pages for all its tokens, the most urgent first. The least urgent give way.

        None: somebody would have to, but a step is in flight.
        """
        preempted: list[Request] = []
        for request in [*self.running]:
            while request.status is Status.RUNNING and not self._extend(request):
                if self._in_flight:
                    return None
                preempted.append(self._preempt(self.running[-1]))
        return preempted

    def _extend(self, request: Request) -> bool:
        pool = self.tree.pool
        num_due = request.num_due_tokens
        num_missing, num_wanted = (
            pool.pages_for(num_tokens) - request.num_pages
            for num_tokens in (num_due, self._with_reserve(request, num_due))
        )
        if num_missing <= 0:
            return True
        pages = self.tree.extend(num_wanted)
        if pages is None:
            pages = self.tree.extend(num_missing)
        if pages is None:
            return False
        request.page_table[request.num_pages : request.num_pages + len(pages)] = pages
        request.num_pages += len(pages)
        return True

    def _with_reserve(self, request: Request, num_tokens: int) -> int:
        """So many tokens and those to reserve pages for; the last token that a request samples is never computed."""
        return max(num_tokens, min(num_tokens + self._reserve_tokens, len(request.tokens) - 1))

    def _preempt(self, victim: Request) -> Request:
        """Take a request's pages; it waits again, and starts from what the tree still has of it then."""
        self._release(victim)
        self.running.remove(victim)
        self.waiting.append(victim)
        victim.status = Status.WAITING
        victim.num_computed_tokens = 0
        self.counters.num_preemptions += 1
        return victim

    def _admit(self, now: float) -> tuple[list[Request], list[Grant]]:
        """Grant pages to waiting requests in order of admission, while a step has room for their tokens."""
        admitted: list[Request] = []
        grants: list[Grant] = []
        room = self._composition.room(self.running) if self.waiting else 0
        if room <= 0:
            return admitted, grants
        num_seats = self._max_num_seqs - sum(remaining(request) > 0 for request in self.running)
        step_tokens = self._composition.step_tokens(self.running)
        for request in self._admission.candidates(
            self.waiting, self.running, now, step_tokens, self._num_planned_tokens
        ):
            if room <= 0 or len(admitted) == num_seats:
                break
            num_later = self._with_reserve(request, request.num_tokens) - request.num_tokens
            grant = self.tree.grant(request.token_ids, request.num_tokens, request.num_reusable_tokens, num_later)
            if grant is None:
                self._count_wait(request)
                continue
            self._start(request, grant)
            self.waiting.remove(request)
            self.running.append(request)
            admitted.append(request)
            grants.append(grant)
            room -= remaining(request)
        return admitted, grants

    def _start(self, request: Request, grant: Grant) -> None:
        request.num_pages = len(grant.pages)
        request.page_table[: request.num_pages] = grant.pages
        request.num_computed_tokens = grant.num_cached_tokens
        request.status = Status.RUNNING
        self._short_of_pages.discard(request.request_id)
        if request.request_id not in self._once_admitted:
            self._once_admitted.add(request.request_id)
            if not request.scores_prompt:
                self._count_query(request, grant.num_cached_tokens)

    def _count_wait(self, request: Request) -> None:
        if request.request_id not in self._short_of_pages:
            self._short_of_pages.add(request.request_id)
            self.counters.num_page_waits += 1

    def _count_query(self, request: Request, num_cached_tokens: int) -> None:
        request.num_cached_tokens = num_cached_tokens
        self.counters.num_queries += 1
        self.counters.num_hits += num_cached_tokens > 0
        self.counters.num_queried_tokens += request.num_tokens
        self.counters.num_cached_tokens += num_cached_tokens

    def _plan(
        self, shares: Sequence[ScheduledTokens], admitted: Iterable[Request], grants: Iterable[Grant]
    ) -> StepPlan:
        self._epoch += 1
        before = self._in_flight[-1].plan.rows if self._in_flight else ()
        index_before = {row.number: index for index, row in enumerate(before)}
        rows = [self._row(request, num_tokens, index_before) for request, num_tokens in shares]
        order, groups = self._arrange(rows)
        copies = tuple(grant.copy for grant in grants if grant.copy is not None)
        moves = tuple(grant.moves for grant in grants if grant.moves is not None)
        plan = StepPlan(self._epoch, tuple(rows[i] for i in order), groups, copies, moves)
        self._in_flight.append(PlannedStep(plan, tuple(shares[i][0] for i in order)))
        self._num_planned_tokens += plan.num_tokens
        for request, num_tokens in shares:
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == request.num_due_tokens:
                request.add_placeholder()
            request.last_epoch = self._epoch
        for request in admitted:  # scheduled or not: what it was granted is carried out
            request.last_epoch = self._epoch
        return plan

    def _arrange(self, rows: Sequence[Row]) -> tuple[Sequence[int], tuple[PrefixGroup, ...]]:
        if not self._grouping.enabled:
            return range(len(rows)), ()
        return arrange(rows, self.tree.pool.page_size, self._grouping.min_shared_tokens, self._grouping_costs)

    def _row(self, request: Request, num_tokens: int, index_before: Mapping[int, int] | None = None) -> Row:
        """`index_before`: the rows of the step before by request number; None: an estimate, arrays not copied."""
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        token_ids, page_table = request.tokens[start:stop], request.page_table[: self.tree.pool.pages_for(stop)]
        is_estimate = index_before is None
        return Row(
            request_id=request.request_id,
            number=request.number,
            token_ids=token_ids if is_estimate else token_ids.copy(),
            num_computed_tokens=start,
            page_table=page_table if is_estimate else page_table.copy(),
            samples=stop == request.num_due_tokens,
            sampling=request.sampling,
            num_output_tokens=request.num_output_tokens + request.num_placeholders,
            target_ids=request.target_ids(start, stop),
            follows=index_before[request.number] if index_before is not None and request.num_placeholders else None,
        )

    def _enter(self, request: Request, row: Row) -> None:
        """Pages that became full enter the tree, whose pages replace the request's own."""
        size = self.tree.pool.page_size
        if row.seq_len // size == row.num_computed_tokens // size:
            return
        last_step = self._last_step(request)
        kept = self.tree.insert(request.tokens[: row.seq_len], request.pages, keep_replaced=last_step is not None)
        own = request.pages[: len(kept)]
        if last_step is not None and (is_replaced := own != kept).any():
            last_step.replaced.append(own[is_replaced])
        own[:] = kept

    def _keep_scores(self, request: Request, row: Row, scores: Sequence[Logprobs]) -> None:
        if len(scores) != (0 if row.target_ids is None else len(row.target_ids)):
            raise AccountingError(f"'{row.request_id}' got {len(scores)} scores of its prompt, asked were others")
        if scores:
            first = row.num_computed_tokens + 1
            request.prompt_logprobs[first : first + len(scores)] = scores

    def _append(self, request: Request, token_id: int) -> None:
        request.fill_placeholder(token_id)
        sampling = request.sampling
        is_eos = token_id in self._eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            self._end(request, FinishReason.STOP)
        elif request.num_output_tokens == sampling.max_tokens:
            self._end(request, FinishReason.LENGTH)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            if (last_step := self._last_step(request)) is not None:
                last_step.leaving.append(request)
            else:
                self._release(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._once_admitted.discard(request.request_id)
        self._short_of_pages.discard(request.request_id)

    def _last_step(self, request: Request) -> PlannedStep | None:
        """The step in flight after which nothing touches the request's pages; None where nothing does now."""
        return next((step for step in self._in_flight if step.plan.epoch == request.last_epoch), None)

    def _give_back(self, step: PlannedStep) -> None:
        """What a step that has ended alone still held."""
        for copy in step.plan.copies:
            self.tree.finish_copy(copy)
        for pages in step.replaced:
            self.tree.release(pages)
        for request in step.leaving:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Leave all that a request has computed in the tree, its partial last page too, and give its pages back."""
        num_known = min(request.num_computed_tokens, request.num_tokens)  # a token sampled after its end is not
        kept = self.tree.insert(request.tokens[:num_known], request.pages, final=True)
        self.tree.release(np.concatenate([kept, request.pages[len(kept) :]]))
        request.num_pages = 0
