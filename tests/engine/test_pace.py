"""Planning as late as the device allows."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from p99lab.engine import pace
from p99lab.engine.costs import H200, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.pace import Pace
from p99lab.engine.pipeline import Pipeline
from p99lab.engine.plan import StepPlan, StepResult
from p99lab.engine.stepping import StepLoop
from tests.engine.scheduler_bench import Bench

pytestmark = pytest.mark.light

COSTS = StepCost(H200, Geometry.named("llama-3.1-8b"), page_size=64)


def test_nothing_is_spared_before_steps_are_known() -> None:
    assert Pace(COSTS).spare_s(0.03) == 0
    without_costs = Pace(None)
    without_costs.ended(without_costs.predict_s(StepPlan(0, ())), 0.03)
    assert without_costs.spare_s(0.03) == 0
    on_cpu = Pace(COSTS)
    on_cpu.ended(0.03, None)
    assert on_cpu.spare_s(0.03) == 0


def test_the_host_begins_before_the_step_ends() -> None:
    """By what it has needed of late, and by what a prediction may be wrong; both are learnt."""
    known = Pace(COSTS)
    known.launched(0.006)
    known.ended(0.03, 0.03)
    assert known.spare_s(0.03) == pytest.approx(0.03 * (1 - pace.MARGIN) - 0.006 - pace.SLACK_S)
    assert known.spare_s(0.006) == 0
    for _ in range(100):
        known.launched(0.001)
        known.ended(0.03, 0.045)
    assert known.spare_s(0.03) == pytest.approx(0.045 * (1 - pace.MARGIN) - 0.001 - pace.SLACK_S, rel=0.01)


class Steps:
    """A device whose steps last 20 ms of a clock that stands still between two of its own times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.free_s = 0.0

    def launch(self, plan: StepPlan) -> Steps.Step:
        self.now_s += 0.002  # the host's own
        self.free_s = max(self.now_s, self.free_s) + 0.02
        return Steps.Step(self, plan, self.free_s)

    class Step:
        def __init__(self, steps: Steps, plan: StepPlan, ends_s: float) -> None:
            self._steps, self._plan, self._ends_s = steps, plan, ends_s

        def result(self) -> StepResult:
            self.abandon()
            sampled = tuple(0 if row.samples else None for row in self._plan.rows)
            return StepResult(self._plan.epoch, sampled, (None,) * len(sampled), device_s=0.02)

        def abandon(self) -> None:
            self._steps.now_s = max(self._steps.now_s, self._ends_s)


class Unheard:
    """Requests whose tokens nobody hears of."""

    def emit(self, *event: object) -> None: ...


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pipeline_has_time_while_one_step_runs_and_none_is_behind_it(overlap: bool) -> None:
    device, bench = Steps(), Bench(num_pages=64, overlap=overlap)
    pipeline = Pipeline(bench.scheduler, Unheard(), overlap, Pace(COSTS), lambda: device.now_s)  # type: ignore[arg-type]
    for number in range(2):
        bench.add(list(range(1, 40 + number)), max_tokens=8)
    assert pipeline.spare_s == 0
    for _ in range(3):
        pipeline.advance(device.launch)
    if not overlap:
        assert pipeline.spare_s == 0
        return
    assert pipeline.has_steps
    ends_s = device.free_s
    assert 0.01 < pipeline.spare_s < 0.02 - 0.002
    device.now_s += pipeline.spare_s
    assert pipeline.spare_s == pytest.approx(0, abs=1e-9)
    pipeline.advance(device.launch)  # it is launched before the step in flight ends: the device never waits
    assert device.free_s == pytest.approx(ends_s + 0.02)


def test_a_step_may_be_taken_in_at_any_moment_while_another_thread_asks_for_the_time_left() -> None:
    device, bench = Steps(), Bench(num_pages=64, overlap=True)
    pipeline = Pipeline(bench.scheduler, Unheard(), True, Pace(COSTS), lambda: device.now_s)  # type: ignore[arg-type]
    bench.add(list(range(1, 40)), max_tokens=20)
    spare_s = Pipeline.spare_s.fget
    assert spare_s is not None
    before, num_moments, num_spared = sys.gettrace(), 0, 0
    for moment in range(10):
        pipeline.advance(device.launch)
        assert pipeline.has_steps
        left = iter(range(moment, -1, -1))

        def trace(frame: FrameType, event: str, arg: object, left: Iterator[int] = left) -> Any:
            if frame.f_code is not spare_s.__code__:
                return None
            if event == "line" and next(left, 1) == 0:
                nonlocal num_moments
                num_moments += 1
                pipeline.take_in()
            return trace

        sys.settrace(trace)
        try:
            num_spared += pipeline.spare_s >= 0.0
        finally:
            sys.settrace(before)
    assert num_moments > 1
    assert num_spared == 10


class Spared:
    """An engine that always has time for a command, and counts what it does."""

    failure = None
    has_requests = True
    is_awaited = False

    def __init__(self) -> None:
        self.spare_s = 60.0
        self.done: list[str] = []
        self.advanced = threading.Event()

    def advance(self) -> None:
        self.done.append("step")
        self.advanced.set()
        self.has_requests = False


def test_what_arrives_while_there_is_time_is_in_the_next_step() -> None:
    engine = Spared()
    loop = StepLoop(engine)  # type: ignore[arg-type]
    try:
        for name in ("first", "second"):
            loop.submit(lambda there, name=name: engine.done.append(name))
            loop.wait_for_inbox()
            time.sleep(0.02)
        assert engine.done == ["first", "second"]
        loop.submit(lambda there: setattr(engine, "spare_s", 0.0))
        assert engine.advanced.wait(10)
    finally:
        loop.stop()
    assert engine.done == ["first", "second", "step"]
