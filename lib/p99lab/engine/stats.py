"""Counts and times of an engine, as plain numbers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from p99lab.caches.pages import PagePool
from p99lab.engine.plan import StepPath, StepPlan, StepResult
from p99lab.engine.scheduler import Scheduler

NUM_KEPT_STEPS = 4096
DEVICE_BOUNDS_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class StepTimes:
    """Every step counted; the latest `NUM_KEPT_STEPS` remembered one by one.

    What the host did for them: `schedule_s` planned, `launch_s` launched (where a device computes by itself; else the
    computing is in it), `wait_s` waited for results, `update_s` took them in and told them. While steps overlap, a
    device is kept busy as long as the host has to wait. `device_s`: the steps by the device's own clock, where it has
    one, and `num_by_device_s` how many of them lasted up to each of DEVICE_BOUNDS_S, the longer ones last.

    How they ran: see `StepPath`; steps that are neither `num_graph_steps` nor `num_fallback_steps` ran eagerly.
    `num_padded_tokens` were computed by graphs for nobody. `num_moved_pages`: copied to where a prefix lies in one run.
    `num_shared_tokens`: of `num_tokens`, those of rows in a prefix group.
    """

    num_steps: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_STEPS))
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    device_s: float = 0.0
    num_by_device_s: list[int] = field(default_factory=lambda: [0] * (len(DEVICE_BOUNDS_S) + 1))
    num_graph_steps: int = 0
    num_fallback_steps: int = 0
    num_padded_tokens: int = 0
    num_moved_pages: int = 0
    num_shared_tokens: int = 0
    ended_s: float = -math.inf  # the latest step

    def add(self, num_tokens: int, launched_s: float, ended_s: float) -> None:
        """A step: from its launch, or the end of the step before it where that came later, to its end."""
        step_s = ended_s - max(launched_s, self.ended_s)
        self.ended_s = ended_s
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.busy_s += step_s
        self.recent_s.append(step_s)

    def add_result(self, plan: StepPlan, result: StepResult) -> None:
        """How a step ran that `add` has counted."""
        self.num_graph_steps += result.path is StepPath.GRAPH
        self.num_fallback_steps += result.path is StepPath.FALLBACK
        self.num_padded_tokens += result.num_padded_tokens
        self.num_moved_pages += sum(len(move.sources) for move in plan.moves)
        self.num_shared_tokens += plan.num_shared_tokens
        if result.device_s is not None:
            self.device_s += result.device_s
            self.num_by_device_s[bisect_left(DEVICE_BOUNDS_S, result.device_s)] += 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Since the engine's start or its last `reconfigure`; pages and requests as they are now.

    `schedule_s` and what follows: what host and device did in this time, see `StepTimes`.
    """

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_active_pages: int
    num_queries: int
    num_hits: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_page_waits: int
    num_steps: int
    num_step_tokens: int
    busy_s: float
    step_p50_s: float | None
    step_p99_s: float | None
    step_max_s: float | None
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    device_s: float = 0.0
    num_by_device_s: list[int] = field(default_factory=list)
    num_graph_steps: int = 0
    num_fallback_steps: int = 0
    num_padded_tokens: int = 0
    num_moved_pages: int = 0
    num_shared_tokens: int = 0

    @classmethod
    def of(cls, scheduler: Scheduler, pool: PagePool, steps: StepTimes) -> Self:
        counters = scheduler.counters
        num_free, num_cached = pool.num_free, pool.num_cached  # once: a step may be changing them
        recent = np.array(steps.recent_s)
        p50, p99, longest = np.percentile(recent, [50, 99, 100]).tolist() if len(recent) else [None] * 3
        return cls(
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_free_pages=num_free,
            num_cached_pages=num_cached,
            num_active_pages=pool.num_pages - num_free - num_cached,
            num_queries=counters.num_queries,
            num_hits=counters.num_hits,
            num_queried_tokens=counters.num_queried_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_preemptions=counters.num_preemptions,
            num_page_waits=counters.num_page_waits,
            num_steps=steps.num_steps,
            num_step_tokens=steps.num_tokens,
            busy_s=steps.busy_s,
            step_p50_s=p50,
            step_p99_s=p99,
            step_max_s=longest,
            schedule_s=steps.schedule_s,
            launch_s=steps.launch_s,
            wait_s=steps.wait_s,
            update_s=steps.update_s,
            device_s=steps.device_s,
            num_by_device_s=[*steps.num_by_device_s],
            num_graph_steps=steps.num_graph_steps,
            num_fallback_steps=steps.num_fallback_steps,
            num_padded_tokens=steps.num_padded_tokens,
            num_moved_pages=steps.num_moved_pages,
            num_shared_tokens=steps.num_shared_tokens,
        )

    @property
    def graph_share(self) -> float:
        """Of all steps; nan: there was none."""
        return self.num_graph_steps / self.num_steps if self.num_steps else math.nan

    @property
    def fallback_share(self) -> float:
        """Of all steps; nan: there was none."""
        return self.num_fallback_steps / self.num_steps if self.num_steps else math.nan

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
