"""The steps between launch and result: one runs, and with overlap the next one is queued behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from p99lab.engine.outputs import LiveRequests
from p99lab.engine.pace import Pace
from p99lab.engine.plan import InFlight, StepPlan
from p99lab.engine.scheduler import Scheduler
from p99lab.engine.stats import StepTimes
from p99lab.engine.timekeeping import book_launch, book_step

Launch = Callable[[StepPlan], InFlight]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight: its plan, what runs it, since when, and for how long by the cost model (None: it has none)."""

    plan: StepPlan
    step: InFlight
    launched_s: float
    predicted_s: float | None


class Pipeline:
    """One scheduler's steps in flight, and the times of all that it has planned.

    What `advance` and `take_in` raise leaves accounts that nobody can vouch for; then only `abandon` is of use.

    Args:
        requests: emit what the steps have sampled.
        overlap: whether a step is launched while the one before it runs.
        pace: has seen no step of another pipeline.
        clock: seconds.
    """

    def __init__(
        self, scheduler: Scheduler, requests: LiveRequests, overlap: bool, pace: Pace, clock: Callable[[], float]
    ) -> None:
        self.scheduler = scheduler
        self.step_times = StepTimes()
        self._requests = requests
        self._overlap = overlap
        self._pace = pace
        self._clock = clock
        self._began_s = 0.0  # the oldest step in flight, on the device
        self._in_flight: tuple[LaunchedStep, ...] = ()  # oldest first; between two calls at most one

    @property
    def has_steps(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    @property
    def running(self) -> StepPlan | None:
        """The oldest step in flight."""
        return self._in_flight[0].plan if self._in_flight else None

    @property
    def spare_s(self) -> float:
        """For how long the next step need not be planned: what arrives meanwhile will be in it."""
        in_flight = self._in_flight  # read once: nobody who asks holds up a thread that takes in
        if not self._overlap or len(in_flight) != 1:
            return 0.0
        return max(0.0, self._began_s + self._pace.spare_s(in_flight[0].predicted_s) - self._clock())

    def advance(self, launch: Launch) -> None:
        """Launch the next step; then take in the oldest one in flight, unless it is that one and may overlap."""
        num_overlapping = int(self._launch(launch) and self._overlap)
        if len(self._in_flight) > num_overlapping:
            self.take_in()

    def take_in(self) -> None:
        """Wait for the oldest step in flight, and emit what it has sampled."""
        oldest = self._in_flight[0]
        began_s = self._clock()
        result = oldest.step.result()
        ended_s = self._clock()
        self._in_flight = self._in_flight[1:]
        self._began_s = ended_s
        self._pace.ended(oldest.predicted_s, result.device_s)
        next_admitted = self.scheduler.outcome.admitted if self._in_flight else ()
        book_step(self.scheduler.running, oldest.plan, next_admitted, ended_s)
        for sampled in self.scheduler.update(result):
            self._requests.emit(sampled, self.scheduler.finish)
        self.step_times.add(oldest.plan.num_tokens, oldest.launched_s, ended_s)
        self.step_times.add_result(oldest.plan, result)
        self.step_times.wait_s += ended_s - began_s
        self.step_times.update_s += self._clock() - ended_s

    def abandon(self) -> None:
        """Forget the steps in flight, once they touch no memory any more."""
        for launched in self._in_flight:
            with suppress(Exception):  # a device that has failed says so again
                launched.step.abandon()
        self._in_flight = ()

    def _launch(self, launch: Launch) -> bool:
        """False: there is nothing to launch, or not before a step in flight is taken in."""
        began_s = self._clock()
        plan = self.scheduler.schedule(began_s)
        planned_s = self._clock()
        self.step_times.schedule_s += planned_s - began_s
        if plan is None:
            return False
        if not self._in_flight:
            book_launch(self.scheduler.outcome, planned_s)
        step = launch(plan)
        launched_s = self._clock()
        if not self._in_flight:
            self._began_s = launched_s
        self._in_flight += (LaunchedStep(plan, step, planned_s, self._pace.predict_s(plan)),)
        self._pace.launched(launched_s - began_s)
        self.step_times.launch_s += launched_s - planned_s
        return True
