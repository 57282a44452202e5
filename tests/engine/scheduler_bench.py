"""A scheduler with an executor that knows, for every slot of the cache, which prefix its content belongs to.

The executor samples a token as a function of the whole prefix, and every row must find at each earlier position of its
page table the content of exactly its own prefix. A stale, foreign, early freed or overwritten page cannot pass. Steps
are executed as late as may be: when they are taken in, with the next one planned already where they overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.costs import TWO_CORES, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.plan import Row, StepPlan, StepResult
from p99lab.engine.request import FinishReason, Logprobs, Request, SamplingParams
from p99lab.engine.scheduler import Scheduler
from p99lab.engine.scheduler_output import SampledToken
from tests.engine.grouped import group_rows

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
            self.let_in |= set(self.scheduler.outcome.admitted)
            self.check_plan(plan)
            self.in_flight.append(plan)
        self.check_fence()
        return plan

    def update(self) -> list[SampledToken]:
        sampled = self.scheduler.update(self.executor.execute(self.in_flight.popleft()))
        self.scheduler.check()
        self.check_fence()
        return sampled

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
        assert not (self.in_flight and self.scheduler.outcome.preempted)
        assert set(self.scheduler.outcome.running) == set(self.scheduler.running)
        assert not (self.scheduler.outcome.preempted and self.scheduler.outcome.admitted)
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
