"""Any requests, in any order, over pools too small for them: every answer is its prompt's, and nothing is left."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p99lab.engine.request import Status
from p99lab.engine.scheduler import RequestTooLargeError
from p99lab.errors import QueueFullError
from tests.engine.scheduler_bench import Bench

pytestmark = pytest.mark.light


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
