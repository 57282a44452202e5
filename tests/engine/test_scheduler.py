"""The scheduler with an executor that knows, for every slot of the cache, which prefix its content belongs to.

The executor samples a token as a function of the whole prefix, and every row must find at each earlier position of its
page table the content of exactly its own prefix. A stale, foreign, early freed or overwritten page cannot pass. Steps
are executed as late as may be: when they are taken in, with the next one planned already where they overlap.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.costs import TWO_CORES, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.plan import Row, StepPlan, StepResult
from p99lab.engine.request import FinishReason, Logprobs, Request, SamplingParams, Status
from p99lab.engine.scheduler import Change, RequestTooLargeError, Scheduler
from p99lab.errors import AccountingError, BadParameterError, QueueFullError
from tests.engine.grouped import group_rows

pytestmark = pytest.mark.light

EOS = 3


def next_token(prefix: Sequence[int]) -> int:
    """0, 1 or 2, now and then EOS."""
    value = hash(tuple(prefix)) % 97
    return EOS if value < 4 else value % 3


def expected_output(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] == EOS and not sampling.ignore_eos):
            break
    return tokens[len(prompt) :]


def score(prefix: Sequence[int], target: int) -> Logprobs:
    """As much a function of the whole prefix as the next token."""
    return Logprobs(-float(hash((*prefix, -1, target)) % 1009))


def expected_scores(prompt: Sequence[int]) -> list[Logprobs | None]:
    return [None, *(score(prompt[:at], prompt[at]) for at in range(1, len(prompt)))]


class Executor:
    """A cache of page × offset → the prefix whose key and value lie there. Of tokens it knows what it has sampled."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}  # by the request's number
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.sampled: list[tuple[int, int | None]] = []  # by the step before: of whose row which token

    def expect(self, number: int, prompt: Sequence[int]) -> None:
        self.prompts[number] = self.tokens[number] = tuple(prompt)

    def execute(self, plan: StepPlan) -> StepResult:
        for moves in plan.moves:
            self._move(dict(zip(moves.sources.tolist(), moves.targets.tolist(), strict=True)))
        for copy in plan.copies:
            for offset in range(copy.num_tokens):
                self.slots[copy.target, offset] = self.slots[copy.source, offset]
        written = [self._write(row, self.tokens[row.number]) for row in plan.rows]
        assert len(set().union(*written)) == sum(map(len, written)), "two rows write one slot"
        scores = {i: self._score(row, self.tokens[row.number]) for i, row in enumerate(plan.rows)}
        asked = {i: some for i, some in scores.items() if plan.rows[i].target_ids is not None}
        sampled = tuple(self._attend(row, self.tokens[row.number]) for row in plan.rows)
        self.sampled = [(row.number, token) for row, token in zip(plan.rows, sampled, strict=True)]
        for number, token in self.sampled:
            self.tokens[number] += () if token is None else (token,)
        return StepResult(plan.epoch, sampled, (None,) * len(plan.rows), asked)

    def _move(self, targets: dict[int, int]) -> None:
        assert not set(targets) & set(targets.values())
        moved = {(targets[page], offset): prefix for (page, offset), prefix in self.slots.items() if page in targets}
        gone = {*targets, *targets.values()}
        self.slots = {slot: prefix for slot, prefix in self.slots.items() if slot[0] not in gone} | moved

    def _score(self, row: Row, tokens: tuple[int, ...]) -> tuple[Logprobs, ...]:
        targets = [] if row.target_ids is None else row.target_ids.tolist()
        assert len(targets) <= row.num_scheduled_tokens
        positions = range(row.num_computed_tokens + 1, row.num_computed_tokens + 1 + len(targets))
        return tuple(score(tokens[:at], target) for at, target in zip(positions, targets, strict=True))

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return int(row.page_table[position // self.page_size]), position % self.page_size

    def _write(self, row: Row, tokens: tuple[int, ...]) -> set[tuple[int, int]]:
        positions = range(row.num_computed_tokens, row.seq_len)
        token_ids = row.token_ids.tolist()
        if row.follows is not None:
            assert token_ids[-1] == 0
            number, token_ids[-1] = self.sampled[row.follows]
            assert number == row.number
        assert token_ids == [tokens[position] for position in positions]
        slots = {self._slot(row, position): tokens[: position + 1] for position in positions}
        self.slots |= slots
        return set(slots)

    def _attend(self, row: Row, tokens: tuple[int, ...]) -> int | None:
        assert len(row.page_table) == -(-row.seq_len // self.page_size)
        for position in range(row.seq_len):
            assert self.slots[self._slot(row, position)] == tokens[: position + 1], "stale or foreign content"
        assert row.num_output_tokens == len(tokens) - len(self.prompts[row.number])
        assert row.samples == (row.seq_len == len(tokens))
        return next_token(tokens) if row.samples else None


class Bench:
    """A scheduler, its executor and the requests so far."""

    def __init__(
        self,
        page_size: int = 4,
        num_pages: int = 64,
        prefix_cache: bool = True,
        grouping: bool = True,
        min_run_pages: int = 16,
        reserve_tokens: int = 0,
        **config,
    ):
        self.pool = PagePool(num_pages, page_size)
        self.config = SchedulerConfig(reserve_tokens=reserve_tokens, **config)
        self.scheduler = Scheduler(
            self.config,
            GroupingConfig(enabled=grouping, decide_by="length", min_shared_tokens=1),
            PrefixTree(self.pool, prefix_cache, min_run_pages),
            eos_token_ids=(EOS,),
            costs=StepCost(TWO_CORES, Geometry.named("smollm2-135m"), page_size),
        )
        self.executor = Executor(page_size)
        self.requests: list[Request] = []
        self.let_in: set[Request] = set()
        self.in_flight: deque[StepPlan] = deque()

    @property
    def may_schedule(self) -> bool:
        return len(self.in_flight) < 1 + self.config.overlap

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **options) -> Request:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=options.pop("ignore_eos", True),
            stop_token_ids=options.pop("stop_token_ids", ()),
            prompt_logprobs=options.pop("prompt_logprobs", None),
        )
        number = len(self.requests)
        ids = np.array(prompt, np.int32)
        request = Request.create(number, ids, sampling, float(number), self.pool.page_size, **options)
        self.scheduler.add(request)
        self.executor.expect(number, prompt)
        self.requests.append(request)
        return request

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(0.0)
        self.scheduler.check()
        if plan is not None:
            self.let_in |= set(self.scheduler.turn.admitted)
            self.check_plan(plan)
            self.in_flight.append(plan)
        self.check_fence()
        return plan

    def update(self) -> list[Change]:
        changes = self.scheduler.update(self.executor.execute(self.in_flight.popleft()))
        self.scheduler.check()
        self.check_fence()
        return changes

    def step(self) -> StepPlan | None:
        """Plan a step, and take in the oldest in flight, unless it is that one and may overlap."""
        plan = self.schedule()
        if len(self.in_flight) > (plan is not None and self.config.overlap):
            self.update()
        return plan

    def run(self) -> int:
        """Steps until nothing is left to do; how many were planned."""
        num_steps = num_idle = 0
        while not self.may_schedule:
            self.update()
        while self.scheduler.has_work:
            is_planned = self.step() is not None
            num_steps, num_idle = num_steps + is_planned, 0 if is_planned else num_idle + 1
            assert num_steps < 3000, "no progress"
            assert num_idle < 2, "nothing planned with nothing in flight"
        assert self.step() is None
        return num_steps

    def check_fence(self) -> None:
        """Whatever steps in flight touch is held, and what they write is nobody else's."""
        for plan in self.in_flight:
            for row in plan.rows:
                assert self.pool.references[row.page_table].all(), "a page was freed too early"
                written = row.page_table[row.num_computed_tokens // self.pool.page_size :]
                assert not self.pool.in_tree[written].any(), "a page of the tree is written"
            for copy in plan.copies:
                assert self.pool.references[[copy.source, copy.target]].all(), "a page was freed too early"

    def check_plan(self, plan: StepPlan) -> None:
        by_id = {r.request_id: r for r in self.scheduler.running}
        rows = [(row, by_id[row.request_id]) for row in plan.rows]
        assert len({row.request_id for row in plan.rows}) == len(rows) > 0
        prompts = [
            row
            for row, request in rows
            if row.num_scheduled_tokens > 1 or row.num_computed_tokens < request.num_prompt_tokens
        ]
        if self.config.composition == "stock":
            assert prompts == [] or len(prompts) == len(rows)
            assert all(row.samples for row in plan.rows), "a prompt was split"
            assert len(prompts) <= 1 or plan.num_tokens <= self.config.max_num_batched_tokens
        else:
            assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        assert self.in_flight or len(self.scheduler.running) <= self.config.max_num_seqs
        assert not (self.in_flight and self.scheduler.turn.preempted)
        assert set(self.scheduler.turn.running) == set(self.scheduler.running)
        assert not (self.scheduler.turn.preempted and self.scheduler.turn.admitted)
        if plan.groups:
            assert plan.groups == group_rows(plan.rows, self.pool.page_size, 1)
            for group in plan.groups:
                assert list(group.rows) == list(range(group.rows[0], group.rows[-1] + 1))

    def check_outputs(self) -> None:
        for request in self.requests:
            prompt = request.tokens[: request.num_prompt_tokens].tolist()
            expected = expected_output(prompt, request.sampling)
            output = request.token_ids[request.num_prompt_tokens :].tolist()
            self.check_scores(request, prompt)
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert output == expected
                stopped = output[-1] in request.sampling.stop_token_ids
                stopped |= output[-1] == EOS and not request.sampling.ignore_eos
                assert (request.finish_reason is FinishReason.STOP) == stopped
            else:
                assert output == expected[: len(output)]

    def check_scores(self, request: Request, prompt: list[int]) -> None:
        if request.sampling.prompt_logprobs is None:
            assert request.prompt_logprobs == []
            return
        assert request.num_cached_tokens == 0
        scores = expected_scores(prompt)
        if request.num_output_tokens:
            assert request.prompt_logprobs == scores
        else:
            assert request.prompt_logprobs == scores[: len(request.prompt_logprobs)]


def test_one_request_from_prompt_to_end() -> None:
    bench = Bench()
    request = bench.add([0, 1, 2, 0, 1], max_tokens=3)
    assert bench.run() == 3
    assert (request.status, request.finish_reason) == (Status.FINISHED, FinishReason.LENGTH)
    bench.check_outputs()
    assert bench.pool.num_active == 0
    assert not bench.scheduler.has_work


def test_rows_are_copies() -> None:
    bench = Bench()
    request = bench.add([0, 1, 2, 0, 1])
    plan = bench.schedule()
    assert not np.shares_memory(plan.rows[0].token_ids, request.tokens)
    assert not np.shares_memory(plan.rows[0].page_table, request.page_table)


def test_chunks_fill_what_decode_rows_leave() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add([0, 1], max_tokens=8)
    bench.step()
    bench.add([2] * 7)
    assert sorted(row.num_scheduled_tokens for row in bench.step().rows) == [1, 3]
    assert sorted(row.num_scheduled_tokens for row in bench.step().rows) == [1, 3]
    plan = bench.step()
    assert [row.num_scheduled_tokens for row in plan.rows] == [1, 1]
    assert all(row.samples for row in plan.rows)


def test_steps_are_bounded_only_where_their_time_is_known() -> None:
    with pytest.raises(BadParameterError, match="max_step_s"):
        Scheduler(SchedulerConfig(max_step_s=0.1), GroupingConfig(), PrefixTree(PagePool(8, 4)))


def test_while_somebody_decodes_prompts_get_what_the_bound_leaves() -> None:
    bench = Bench(max_num_batched_tokens=512, max_step_s=0.25, num_pages=400)
    bench.add([0, 1], max_tokens=30)
    bench.step()
    bench.add([2] * 1000)
    chunks = [max(row.num_scheduled_tokens for row in bench.step().rows) for _ in range(4)]
    assert 64 < min(chunks) <= max(chunks) < 200


def test_a_document_being_read_does_not_keep_questions_waiting() -> None:
    bench = Bench(max_num_batched_tokens=16, num_pages=200)
    document = bench.add([2] * 400)
    bench.step()
    questions = [bench.add([0, 1, 0], max_tokens=2) for _ in range(3)]
    before = document.num_computed_tokens
    bench.step()
    assert all(question.num_output_tokens == 1 for question in questions)
    assert document.num_computed_tokens == before + 16 - 9


def test_decode_rows_come_before_even_the_most_urgent_prompt() -> None:
    bench = Bench(max_num_batched_tokens=4, policy="priority")
    decoding = bench.add([0, 1], max_tokens=8, priority=1)
    bench.step()
    bench.add([2] * 12, priority=0)
    for num_tokens in range(2, 5):
        bench.step()
        assert decoding.num_output_tokens == num_tokens


def test_stock_decodes_only_when_no_prompt_waits() -> None:
    bench = Bench(composition="stock", max_num_batched_tokens=8)
    bench.add([0, 1], max_tokens=8)
    bench.step()
    for prompt in ([0] * 5, [1] * 5, [2] * 12):
        bench.add(prompt)
    steps = [bench.step() for _ in range(4)]
    assert [plan.num_tokens for plan in steps] == [5, 5, 12, 4]
    assert [len(plan.rows) for plan in steps] == [1, 1, 1, 4]


def test_a_document_is_found_again_to_the_token() -> None:
    bench = Bench(page_size=4)
    document = [0, 1, 2, 0, 1, 2, 1, 1, 0]
    bench.add([*document, 2])
    bench.run()
    request = bench.add([*document, 1])
    bench.run()
    assert request.num_cached_tokens == len(document)
    counters = bench.scheduler.counters
    assert (counters.num_queries, counters.num_hits) == (2, 1)
    assert (counters.num_queried_tokens, counters.num_cached_tokens) == (20, 9)
    bench.check_outputs()


def test_rows_over_one_document_form_a_group() -> None:
    bench = Bench(page_size=2)
    bench.add([0, 1, 2, 0, 1, 2])
    bench.run()
    bench.add([1, 1])
    first, second = bench.add([0, 1, 2, 0, 1, 0, 0]), bench.add([0, 1, 2, 0, 1, 1, 1])
    plan = bench.schedule()
    (group,) = plan.groups
    assert {plan.rows[i].request_id for i in group.rows} == {first.request_id, second.request_id}
    assert (group.first_page, group.num_pages) == (0, 2)


def test_equal_prompts_computed_side_by_side_end_up_on_the_same_pages() -> None:
    bench = Bench(page_size=2)
    first, second = bench.add([0, 1, 2, 0, 1]), bench.add([0, 1, 2, 0, 1])
    bench.step()
    assert first.pages[:2].tolist() == second.pages[:2].tolist()
    assert first.pages[2] != second.pages[2]
    bench.run()
    bench.check_outputs()


def test_a_long_prompt_gets_one_run_of_pages_though_cached_ones_lay_between() -> None:
    bench = Bench(num_pages=12, min_run_pages=4)
    kept = [[first, 2, 1, 2, 0] for first in (0, 1, 2)]
    for prompt in (kept[0], [2, 2, 0, 0, 1], kept[1], [2, 2, 1, 0, 1], kept[2]):
        bench.add(prompt, max_tokens=1)
        bench.run()
    for prompt in kept:
        bench.scheduler.tree.touch(np.array(prompt, np.int32))
    long = bench.add([1] * 20, max_tokens=1)
    plan = bench.schedule()
    assert plan is not None
    assert sum(len(moves.sources) for moves in plan.moves) > 0
    assert np.diff(long.pages).tolist() == [1] * 4
    bench.update()
    bench.scheduler.check()
    asked = [bench.add([*prompt, 0], max_tokens=1) for prompt in kept]
    bench.run()
    bench.check_outputs()
    assert [request.num_cached_tokens for request in asked] == [5] * 3  # found where they have been moved to


def test_pages_for_an_answer_lie_beside_its_prompts_as_far_as_they_can_be_had() -> None:
    bench = Bench(num_pages=12, reserve_tokens=12, max_num_batched_tokens=100)
    first, second = bench.add([0] * 4, max_tokens=17), bench.add([1] * 4, max_tokens=17)
    bench.step()
    assert [request.num_pages for request in (first, second)] == [4, 4]  # for 12 tokens more
    third = bench.add([2] * 11, max_tokens=9)
    bench.step()
    assert third.num_pages == 3  # for its answer there are none
    for request in (first, second, third):
        assert (np.diff(request.pages) == 1).all()
    bench.run()
    bench.check_outputs()
    assert bench.pool.num_active == 0


def test_when_pages_run_out_the_last_to_come_gives_way() -> None:
    bench = Bench(page_size=2, num_pages=6, prefix_cache=False)
    first, second = bench.add([0, 1, 2], max_tokens=8), bench.add([1, 1, 1], max_tokens=8)
    preempted = []
    while bench.step() is not None:
        preempted += bench.scheduler.turn.preempted
    assert preempted
    assert set(preempted) == {second}
    assert bench.scheduler.counters.num_preemptions == len(preempted)
    assert bench.scheduler.counters.num_queries == 2
    assert first.finish_reason is FinishReason.LENGTH
    bench.check_outputs()


def test_the_least_urgent_gives_way_under_priority() -> None:
    bench = Bench(page_size=2, num_pages=6, policy="priority")
    first, second = bench.add([0, 1, 2], max_tokens=8, priority=1), bench.add([1, 1, 1], max_tokens=8, priority=0)
    victims = set()
    while bench.step() is not None:
        victims |= set(bench.scheduler.turn.preempted)
    assert victims == {first}
    assert second.finish_reason is FinishReason.LENGTH
    bench.check_outputs()


def test_a_request_that_can_never_fit_is_refused() -> None:
    bench = Bench(page_size=2, num_pages=4)
    bench.add([0] * 6, max_tokens=3)
    with pytest.raises(RequestTooLargeError, match="needs 5 pages of 2 tokens, the pool has 4"):
        bench.add([0] * 6, max_tokens=4)
    bench.run()
    bench.check_outputs()


def test_two_live_requests_cannot_have_one_id() -> None:
    bench = Bench()
    bench.add([0], request_id="a")
    with pytest.raises(BadParameterError):
        bench.add([1], request_id="a")


def test_cancel_while_a_step_is_in_flight_keeps_the_pages_until_it_ends() -> None:
    bench = Bench(page_size=2)
    request = bench.add([0, 1, 2])
    bench.schedule()
    assert bench.scheduler.cancel(request.request_id)
    assert request.finish_reason is FinishReason.CANCELLED
    assert bench.pool.num_active == 2
    assert bench.update() == []  # nobody wants what it has sampled
    assert request.num_output_tokens == 0
    assert bench.pool.num_active == 0
    assert not bench.scheduler.cancel(request.request_id)


def test_cancel_while_waiting() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add([0, 1])
    waiting = bench.add([1, 1])
    bench.schedule()
    bench.scheduler.cancel(waiting.request_id)
    assert waiting.status is Status.FINISHED
    bench.update()
    bench.run()


def test_finish_ends_a_request_between_steps() -> None:
    bench = Bench()
    request = bench.add([0, 1], max_tokens=9)
    bench.step()
    bench.scheduler.finish(request, FinishReason.STOP)
    bench.scheduler.finish(request, FinishReason.CANCELLED)
    assert (request.finish_reason, request.num_output_tokens) == (FinishReason.STOP, 1)
    assert bench.schedule() is None


def test_results_come_in_the_order_of_their_steps_two_at_most() -> None:
    bench = Bench()
    bench.add([0, 1])
    with pytest.raises(AccountingError):
        bench.scheduler.update(StepResult(1, (0,), (None,)))
    plan, behind = bench.schedule(), bench.schedule()
    with pytest.raises(AccountingError, match="while 2 steps are in flight"):
        bench.scheduler.schedule(0.0)
    with pytest.raises(AccountingError, match="not that of the oldest"):
        bench.scheduler.update(StepResult(behind.epoch, (0,), (None,)))
    assert (plan.epoch, behind.epoch) == (1, 2)


def test_what_waits_next_is_evicted_last() -> None:
    bench = Bench(page_size=2, num_pages=10, max_num_seqs=1)
    for prompt in ([0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]):
        bench.add(prompt, max_tokens=1)
    bench.run()
    bench.add([5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5], max_tokens=1)  # six pages where four are free
    next_one = bench.add([0, 0, 0, 0, 1], max_tokens=1)  # will find the least recently used
    bench.run()
    assert next_one.num_cached_tokens == 4


def test_a_scored_prompt_is_computed_whole_though_the_tree_holds_it_and_leaves_its_pages_there() -> None:
    bench = Bench(page_size=2, max_num_batched_tokens=3)
    prompt = [0, 1, 2, 0, 1, 2, 1]
    scored = [bench.add(prompt, prompt_logprobs=0)]
    bench.run()
    found = bench.add(prompt)
    bench.run()
    scored.append(bench.add(prompt, prompt_logprobs=0))
    num_computed = []
    while (plan := bench.step()) is not None:
        num_computed.append(plan.num_tokens)
    assert num_computed == [3, 3, 1, 1, 1, 1]
    assert [request.num_cached_tokens for request in (*scored, found)] == [0, 0, 6]
    assert bench.scheduler.counters.num_queries == 1
    bench.check_outputs()


def test_a_scored_prompt_that_gave_way_goes_on_from_what_it_has_scored() -> None:
    bench = Bench(page_size=2, num_pages=8, max_num_batched_tokens=2, policy="priority")
    bench.add([0, 1, 2], max_tokens=8, priority=0)
    scored = bench.add([1] * 9, max_tokens=1, priority=1, prompt_logprobs=0)
    preempted_at: list[int] = []
    starts: list[int] = []
    while (plan := bench.step()) is not None:
        preempted_at += [len(request.prompt_logprobs) - 1 for request in bench.scheduler.turn.preempted]
        starts += [row.num_computed_tokens for row in plan.rows if row.request_id == scored.request_id]
    (num_scored,) = preempted_at
    assert 0 < num_scored < scored.num_prompt_tokens - 1
    assert starts == sorted(starts)  # what it has scored is found in the tree
    bench.check_outputs()


def test_scores_that_were_not_asked_for_are_no_result() -> None:
    for num_scores in (0, 2, 4):
        bench = Bench()
        bench.add([0, 1, 2, 0], prompt_logprobs=0)
        plan = bench.schedule()
        with pytest.raises(AccountingError, match=f"{num_scores} scores"):
            bench.scheduler.update(StepResult(plan.epoch, (0,), (None,), {0: (Logprobs(0.0),) * num_scores}))


def test_newcomers_are_refused_while_as_many_wait_as_may() -> None:
    bench = Bench(max_num_waiting=2, max_num_seqs=1)
    first, second = bench.add([0, 1]), bench.add([1, 1])
    with pytest.raises(QueueFullError, match="the queue is full: 2 requests wait already"):
        bench.add([2])
    assert (bench.scheduler.waiting, bench.scheduler.running) == ([first, second], [])
    bench.step()
    third = bench.add([2])  # one runs, one waits
    with pytest.raises(QueueFullError):
        bench.add([2, 1])
    assert bench.scheduler.cancel(second.request_id)
    bench.add([2, 1])
    bench.run()
    assert third.finish_reason is FinishReason.LENGTH
    bench.check_outputs()


def test_what_can_never_be_served_is_told_so_even_by_a_full_queue() -> None:
    bench = Bench(page_size=2, num_pages=4, max_num_waiting=1)
    bench.add([0], request_id="a")
    with pytest.raises(RequestTooLargeError):
        bench.add([0] * 9)
    with pytest.raises(BadParameterError, match="in use"):
        bench.add([0], request_id="a")


def test_those_that_gave_way_keep_their_place_and_take_none_of_a_newcomers() -> None:
    bench = Bench(page_size=2, num_pages=6, prefix_cache=False, max_num_waiting=1)
    bench.add([0, 1, 2], max_tokens=8)
    bench.step()
    second = bench.add([1, 1, 1], max_tokens=8)
    while second not in bench.scheduler.turn.preempted:
        assert bench.step() is not None
    assert bench.scheduler.waiting == [second]
    newcomer = bench.add([2], max_tokens=2)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        bench.add([2])
    bench.run()
    assert newcomer.finish_reason is second.finish_reason is FinishReason.LENGTH
    bench.check_outputs()


def test_a_row_follows_the_one_that_samples_its_token() -> None:
    bench = Bench(overlap=True, grouping=False)
    bench.add([1] * 5, max_tokens=8)
    first = bench.schedule()
    second = bench.add([2, 2, 2, 1], max_tokens=8)
    behind = bench.schedule()
    assert [row.follows for row in first.rows] == [None]
    assert [(row.follows, row.num_computed_tokens, row.num_output_tokens) for row in behind.rows] == [
        (0, 5, 1),
        (None, 0, 0),
    ]
    assert behind.rows[0].token_ids.tolist() == [0]
    assert [change.request.number for change in bench.update()] == [0]
    third = bench.schedule()
    assert [(row.number, row.follows) for row in third.rows] == [(0, 0), (second.number, 1)]
    bench.run()
    bench.check_outputs()


def test_a_request_whose_last_token_is_in_flight_has_no_more_rows_and_leaves_its_seat() -> None:
    bench = Bench(overlap=True, max_num_seqs=1)
    bench.add([0, 1], max_tokens=3)
    next_one = bench.add([1, 1], max_tokens=1)
    planned = [[row.number for row in bench.step().rows] for _ in range(4)]
    assert planned == [[0], [0], [0], [next_one.number]]
    assert bench.schedule() is None
    assert bench.scheduler.has_work
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("how", ["stop id", "cancelled", "finished"])
def test_a_request_that_ends_while_the_next_step_has_a_row_of_it_keeps_its_pages_until_then(how: str) -> None:
    bench = Bench(page_size=2, overlap=True)
    prompt = next([0, 1, token] for token in range(9) if next_token([0, 1, token]) in (1, 2))
    stop = next_token(prompt)
    request = bench.add(prompt, max_tokens=9, stop_token_ids=(stop,) if how == "stop id" else ())
    bench.schedule()
    bench.schedule()
    if how == "cancelled":
        assert bench.scheduler.cancel(request.request_id)
    changes = bench.update()
    if how == "finished":
        bench.scheduler.finish(request, FinishReason.STOP)
    assert [change.token_id for change in changes] == ([] if how == "cancelled" else [stop])
    assert (request.status, bench.pool.num_active) == (Status.FINISHED, 2)
    bench.scheduler.check()
    twin = bench.add([5], request_id=request.request_id)  # its id is free at once
    bench.schedule()
    assert bench.update() == []
    assert bench.pool.num_active == 1
    bench.run()
    assert bench.executor.tokens[twin.number][: twin.num_tokens] == tuple(twin.token_ids.tolist())
    found = bench.add([*prompt, 0 if how == "cancelled" else stop, 7], max_tokens=1)
    bench.run()
    assert found.num_cached_tokens == (3 if how == "cancelled" else 4)  # a placeholder is no token


def test_a_page_replaced_by_the_trees_is_free_when_the_step_that_reads_it_has_ended() -> None:
    bench = Bench(page_size=2, overlap=True)
    first, second = bench.add([0, 1, 2, 0, 1]), bench.add([0, 1, 2, 0, 1])
    bench.schedule()
    bench.schedule()
    assert bench.pool.num_active == 6
    bench.update()
    assert first.pages[:2].tolist() == second.pages[:2].tolist()
    assert bench.pool.num_active == 6
    bench.update()
    assert bench.pool.num_active == 3  # the third page is full by now, and the tree's too
    bench.run()
    bench.check_outputs()


def test_nobody_gives_way_while_a_step_is_in_flight() -> None:
    bench = Bench(page_size=2, num_pages=6, prefix_cache=False, overlap=True)
    first, second = bench.add([0, 1, 2], max_tokens=8), bench.add([1, 1, 1], max_tokens=8)
    num_planned = 0
    while bench.step() is not None:
        num_planned += 1
    assert (len(bench.in_flight), bench.scheduler.running) == (0, [first, second])
    assert first.num_output_tokens == second.num_output_tokens == num_planned
    assert bench.step() is not None
    assert bench.scheduler.turn.preempted == (second,)
    bench.run()
    assert (first.finish_reason, second.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    bench.check_outputs()


def test_one_that_was_let_in_keeps_its_pages_until_its_copy_is_done_though_it_has_no_row() -> None:
    bench = Bench(composition="stock", max_num_batched_tokens=8)
    document = [0, 1, 2, 0, 1, 2]
    bench.add(document, max_tokens=1)
    bench.run()
    bench.add([1] * 5)
    second = bench.add([*document, *[2] * 5])
    plan = bench.schedule()
    assert (len(plan.rows), len(plan.copies)) == (1, 1)
    assert bench.scheduler.cancel(second.request_id)
    bench.check_fence()
    bench.scheduler.check()
    bench.update()
    bench.run()
    assert bench.pool.num_active == 0


@pytest.mark.parametrize("name", ["num_placeholders", "num_computed_tokens", "num_pages"])
def test_wrong_accounts_are_found_while_steps_are_in_flight(name: str) -> None:
    bench = Bench(page_size=2, overlap=True)
    request = bench.add([0, 1, 2], max_tokens=9)
    bench.schedule()
    bench.schedule()
    setattr(request, name, getattr(request, name) - 1)
    with pytest.raises(AccountingError):
        bench.scheduler.check()


class Serving(RuleBasedStateMachine):
    """Requests come, are cancelled and finish at any moment, over pools too small for them."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(8, 24),
        prefix_cache=st.booleans(),
        grouping=st.booleans(),
        min_run_pages=st.sampled_from([2, 16]),
        composition=st.sampled_from(["chunked", "stock"]),
        policy=st.sampled_from(["fcfs", "priority", "deadline"]),
        max_num_batched_tokens=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        max_num_waiting=st.none() | st.integers(1, 4),
        overlap=st.booleans(),
        max_step_s=st.sampled_from([None, 1e-6, 0.1]),
        max_hold_s=st.sampled_from([0.0, 2.0, 1e9]),
        reserve_tokens=st.sampled_from([0, 3, 256]),
    )
    def start(self, **config) -> None:
        self.bench = Bench(**config)

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=10),
        max_tokens=st.integers(1, 8),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (0,), (1, 2)]),
        priority=st.integers(0, 2),
        deadline_s=st.none() | st.integers(0, 5).map(float),
        prompt_logprobs=st.none() | st.just(0),
    )
    def add(self, prompt: list[int], max_tokens: int, **options) -> None:
        pool, limit = self.bench.pool, self.bench.config.max_num_waiting
        num_newcomers = len(set(self.bench.scheduler.waiting) - self.bench.let_in)
        if pool.pages_for(len(prompt) + max_tokens - 1) > pool.num_pages:
            with pytest.raises(RequestTooLargeError):
                self.bench.add(prompt, max_tokens, **options)
        elif limit is not None and num_newcomers >= limit:
            with pytest.raises(QueueFullError):
                self.bench.add(prompt, max_tokens, **options)
        else:
            self.bench.add(prompt, max_tokens, **options)

    @precondition(lambda self: self.bench.requests)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), max_size=3),
        max_tokens=st.integers(1, 6),
        prompt_logprobs=st.none() | st.just(0),
    )
    def ask_again(self, data: st.DataObject, more: list[int], max_tokens: int, prompt_logprobs: int | None) -> None:
        """A prompt that goes on from what another request has so far."""
        earlier = data.draw(st.sampled_from(self.bench.requests))
        self.add(
            [*earlier.token_ids.tolist()[:10], *more],
            max_tokens,
            ignore_eos=True,
            prompt_logprobs=prompt_logprobs,
        )

    @precondition(lambda self: self.bench.may_schedule)
    @rule()
    def schedule(self) -> None:
        if self.bench.schedule() is None:
            assert self.bench.in_flight or not self.bench.scheduler.has_work

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def update(self) -> None:
        self.bench.update()

    @precondition(lambda self: self.bench.may_schedule)
    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.step()

    @precondition(lambda self: self.bench.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.bench.requests))
        is_live = request.status is not Status.FINISHED
        assert self.bench.scheduler.cancel(request.request_id) == is_live

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check()
            self.bench.check_fence()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            while self.bench.in_flight:
                self.bench.update()
            self.bench.run()
            self.bench.check_outputs()
            assert all(request.status is Status.FINISHED for request in self.bench.requests)
            assert self.bench.pool.num_active == 0


TestServing = Serving.TestCase
TestServing.settings = settings(deadline=None, derandomize=True, max_examples=200, stateful_step_count=30)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 8)), min_size=1, max_size=8
    ),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 8),
    st.sampled_from([None, 0]),
)
def test_tokens_do_not_depend_on_how_steps_are_put_together(
    asked: list[tuple[list[int], int]], page_size: int, budget: int, prompt_logprobs: int | None
) -> None:
    for composition, prefix_cache, overlap in itertools.product(("chunked", "stock"), (True, False), (True, False)):
        bench = Bench(
            page_size,
            num_pages=-(-20 // page_size),  # any one fits; several must give way
            prefix_cache=prefix_cache,
            composition=composition,
            max_num_batched_tokens=budget,
            overlap=overlap,
        )
        for prompt, max_tokens in asked:
            bench.add(prompt, max_tokens, ignore_eos=False, prompt_logprobs=prompt_logprobs)
        bench.run()
        bench.check_outputs()
