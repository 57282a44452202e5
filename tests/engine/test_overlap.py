"""Steps that overlap: what is launched when, what is emitted, and what is left whenever something ends in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from p99lab.engine.backends import make_runner
from p99lab.engine.config import EngineConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.plan import InFlight, StepPlan, StepResult
from p99lab.engine.request import FinishReason, SamplingParams
from p99lab.engine.runner import Runner
from p99lab.errors import EngineClosedError, EngineFailedError

PROMPTS = [list(range(1, 40)), [*range(1, 40), 5, 6], [9]]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
OVERLAP = SchedulerConfig(overlap=True)


@dataclass
class Late:
    """A runner whose steps end when asked to, and that remembers in which order it was asked for what."""

    runner: Runner
    calls: list[tuple[str, int]] = field(default_factory=list)
    fail: Callable[[str, int], None] = lambda call, epoch: None

    def launch(self, plan: StepPlan) -> InFlight:
        self.note("launch", plan.epoch)
        return LateStep(self, plan.epoch, self.runner.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def note(self, call: str, epoch: int) -> None:
        self.calls.append((call, epoch))
        self.fail(call, epoch)


@dataclass
class LateStep:
    runner: Late
    epoch: int
    step_result: StepResult

    def result(self) -> StepResult:
        self.runner.note("result", self.epoch)
        return self.step_result

    def abandon(self) -> None:
        self.runner.note("abandon", self.epoch)


@contextmanager
def late(config: EngineConfig, overlap: bool = True) -> Iterator[tuple[Engine, Late]]:
    runners: list[Late] = []

    def new_runner(*args: Any) -> Late:
        runners.append(Late(make_runner(*args)))
        return runners[0]

    scheduler = SchedulerConfig(overlap=overlap)
    with Engine(config.model_copy(update={"scheduler": scheduler}), new_runner=new_runner) as engine:
        yield engine, runners[0]


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_the_next_step_is_launched_before_the_one_in_flight_is_taken_in(config: EngineConfig) -> None:
    with late(config) as (engine, runner):
        engine.add(PROMPTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
        num_told = []
        while engine.has_work:
            num_told.append(len(engine.step()))
    expected = [("launch", 1), ("launch", 2), ("result", 1), ("launch", 3), ("result", 2), ("result", 3)]
    assert runner.calls == expected  # no step for a token after the last
    assert num_told == [0, 1, 1, 1]  # each waits once at most


def test_without_overlap_each_step_is_taken_in_at_once(config: EngineConfig) -> None:
    with late(config, overlap=False) as (engine, runner):
        engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert runner.calls == [("launch", 1), ("result", 1), ("launch", 2), ("result", 2)]


def test_overlap_changes_nothing_that_is_told(config: EngineConfig) -> None:
    answers = []
    for overlap in (False, True):
        scheduler = SchedulerConfig(overlap=overlap, max_num_batched_tokens=30)
        with Engine(config.model_copy(update={"scheduler": scheduler})) as engine:
            free = engine.generate([PROMPTS[0]], LONG)[0]
            words = free.text.split()
            asked = [
                LONG,
                SamplingParams(max_tokens=20, temperature=1.0, seed=3, logprobs=2, ignore_eos=True),
                SamplingParams(max_tokens=20, temperature=0.8, top_k=20, top_p=0.9, ignore_eos=True),
                SamplingParams(max_tokens=20, stop=(f"{words[6]} {words[7]}",), ignore_eos=True),
                SamplingParams(max_tokens=20, stop_token_ids=(free.token_ids[4],), prompt_logprobs=2),
                SamplingParams(max_tokens=1, logprobs=0),
                SamplingParams(max_tokens=60),
            ]
            answers.append([free, *engine.generate([PROMPTS[0]] * len(asked), asked)])
            assert engine.stats().num_active_pages == 0
            engine.check()
    for plain, overlapped in zip(*answers, strict=True):
        assert overlapped.token_ids == plain.token_ids
        assert (overlapped.text, overlapped.finish_reason) == (plain.text, plain.finish_reason)
        assert [score.chosen for score in overlapped.logprobs] == pytest.approx(
            [s.chosen for s in plain.logprobs], abs=1e-4
        )
        for one, other in zip(overlapped.prompt_logprobs or (), plain.prompt_logprobs or (), strict=True):
            assert (one is None) == (other is None)
            assert one is None or one.chosen == pytest.approx(other.chosen, abs=1e-4)
        assert overlapped.usage.num_output_tokens == plain.usage.num_output_tokens


def test_a_request_cancelled_while_its_step_runs_is_told_at_once_and_its_pages_are_free_when_it_has_ended(
    config: EngineConfig,
) -> None:
    with late(config) as (engine, _):
        completion = Completion("cancelled")
        engine.add(PROMPTS[0], LONG, request_id="cancelled", on_event=completion.add)
        engine.step()
        assert engine.cancel("cancelled")
        assert completion.finish_reason is FinishReason.CANCELLED
        assert completion.usage is not None
        accounted_s = completion.usage.timeline.accounted_s
        assert completion.usage.timeline.prefill_s > 0.0
        assert engine.stats().num_active_pages > 0
        engine.check()
        assert engine.has_work
        assert not engine.cancel("cancelled")
        engine.add(PROMPTS[2], LONG, request_id="cancelled")
        run(engine)
        assert engine.stats().num_active_pages == 0
        assert completion.token_ids == []
        assert completion.usage.timeline.accounted_s == accounted_s


@pytest.mark.parametrize("how", ["quiesce", "reconfigure", "forget", "generate"])
def test_what_needs_an_idle_engine_takes_in_the_step_in_flight(config: EngineConfig, how: str) -> None:
    with late(config) as (engine, _):
        engine.add(PROMPTS[0], LONG, request_id="cancelled")
        engine.step()
        if how == "quiesce":
            engine.quiesce()
        elif how == "generate":
            engine.cancel("cancelled")
            engine.generate([PROMPTS[2]], SamplingParams(max_tokens=1, ignore_eos=True))
        else:
            engine.cancel("cancelled")
            engine.forget_except([]) if how == "forget" else engine.reconfigure(OVERLAP)
        stats = engine.stats()
        assert stats.num_active_pages == 0
        assert (stats.num_cached_pages == 0) == (how == "forget")
        assert engine.generate([PROMPTS[0]], LONG)[0].finish_reason is FinishReason.LENGTH


def test_events_of_a_step_taken_in_by_forgetting_are_not_lost(config: EngineConfig) -> None:
    with late(config) as (engine, _):
        completion = Completion("")
        engine.add(PROMPTS[0], LONG, on_event=completion.add)
        engine.step()
        engine.forget_except([np.array(PROMPTS[0], np.int32)])
        assert len(completion.token_ids) == 1
        run(engine)
        assert len(completion.token_ids) == 20


@pytest.mark.parametrize("call", ["launch", "result"])
def test_memory_is_not_given_up_before_the_steps_in_flight_are_done_with_it(config: EngineConfig, call: str) -> None:
    def fail(called: str, epoch: int) -> None:
        if (called, epoch) == (call, 3) or called == "abandon":
            raise MemoryError("no room")

    with late(config) as (engine, runner):
        runner.fail = fail
        completion = Completion("")
        engine.add(PROMPTS[0], LONG, on_event=completion.add)
        with pytest.raises(MemoryError):
            run(engine)
        assert completion.finish_reason is FinishReason.ERROR
        assert not engine.has_work
        with pytest.raises(EngineFailedError):
            engine.step()
    abandoned = [epoch for called, epoch in runner.calls if called == "abandon"]
    assert abandoned == ([2] if call == "launch" else [3, 4])


def test_an_engine_may_be_closed_while_a_step_runs(config: EngineConfig) -> None:
    with late(config) as (engine, runner):
        completion = Completion("")
        engine.add(PROMPTS[0], LONG, on_event=completion.add)
        engine.step()
        engine.close()
        assert completion.finish_reason is FinishReason.ERROR
        with pytest.raises(EngineClosedError):
            engine.step()
    assert runner.calls == [("launch", 1), ("abandon", 1)]


def test_streams_of_an_overlapping_engine_equal_a_batch(engine: Engine) -> None:
    expected = [completion.token_ids for completion in engine.generate(PROMPTS, LONG)]
    engine.reconfigure(OVERLAP)

    async def answers(stop_at: int) -> list[list[int | None]]:
        async def answer(prompt: list[int]) -> list[int | None]:
            tokens = []
            async for event in (events := engine.stream(prompt, LONG)):
                tokens.append(event.token_id)
                if len(tokens) == stop_at:
                    await events.aclose()
            return tokens

        return await asyncio.gather(*(answer(prompt) for prompt in PROMPTS))

    assert asyncio.run(answers(5)) == [tokens[:5] for tokens in expected]
    assert asyncio.run(answers(20)) == expected
    engine.quiesce()
    assert engine.stats().num_active_pages == 0


def test_times_of_overlapping_steps_do_not_overlap(config: EngineConfig) -> None:
    now_s = iter(np.arange(0.0, 1e6))
    scheduler = SchedulerConfig(overlap=True, max_num_batched_tokens=8)
    with Engine(config.model_copy(update={"scheduler": scheduler}), clock=lambda: float(next(now_s))) as engine:
        engine.generate(PROMPTS, LONG)
        assert 0.0 < engine.stats().busy_s < engine.clock()
