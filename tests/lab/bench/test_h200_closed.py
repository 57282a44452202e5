"""`bench h200`, closed-idle: its arithmetic, its scheduling, and that the engine is left as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p99lab.engine.engine import Engine
from p99lab.engine.stats import EngineStats
from p99lab.lab import parameters
from p99lab.lab.bench import h200_closed, h200_scheduling
from p99lab.lab.bench.h200_closed import ClosedRun
from p99lab.lab.bench.h200_engine import Ours
from p99lab.lab.bench.h200_sizes import IDLE_BAR, H200Bench
from tests.lab.bench.test_h200 import TINY

BEFORE = EngineStats(
    **dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"num_steps": 10, "num_step_tokens": 1000, "busy_s": 5.0},
)
AFTER = replace(
    BEFORE,
    num_steps=30,
    num_step_tokens=3000,
    busy_s=6.9,
    schedule_s=0.02,
    launch_s=0.1,
    wait_s=1.8,
    update_s=0.04,
    device_s=1.96,
    num_graph_steps=15,
    num_fallback_steps=1,
)
RUN = ClosedRun(2.0, BEFORE, AFTER, np.array([0.9, 1.0, 1.1]))


def test_idle_is_the_time_without_a_step() -> None:
    assert RUN.num_steps == 20
    assert RUN.idle_share == pytest.approx(0.02)
    assert replace(RUN, after=replace(AFTER, device_s=0.0)).idle_share == pytest.approx(0.05)  # no device: busy_s
    assert RUN.host_s("wait") == pytest.approx(0.09)
    assert RUN.host_s("rest") == pytest.approx((2.0 - 1.96) / 20)
    rows = {row.name.removeprefix("closed-idle: "): row for row in h200_closed.rows(H200Bench(), RUN, 0.5)}
    idle = rows["time without a step, closed load, in process"]
    assert (idle.value, idle.bar, idle.verdict, idle.n) == (pytest.approx(2.0), IDLE_BAR, "held", 20)
    assert idle.note.startswith("75 % of steps replayed from a graph; ")
    assert rows["tokens, a step"].value == 100
    assert rows["steps replayed from a graph"].value == pytest.approx(75.0)
    assert rows["steps left to slower kernels"].value == pytest.approx(5.0)
    assert rows["requests"].value == 1.5
    assert rows["E2E P50"].ratio_to_floor == pytest.approx(2.0)
    assert (rows["E2E P99"].floor, rows["E2E std"].n) == (None, 3)
    nobody = replace(RUN, e2e_s=np.array([]))
    assert not any("E2E" in row.name for row in h200_closed.rows(TINY, nobody, 0.5))


def test_steps_are_bounded_as_in_the_notebook() -> None:
    tier = parameters.load(parameters.find("01"), "h200")
    assert isinstance(tier, parameters.Headline01)
    found = h200_scheduling.closed(H200Bench())
    assert (found.max_num_batched_tokens, found.max_step_s) == (tier.chunk_tokens, tier.max_step_s)
    assert (found.max_num_seqs, found.overlap, found.composition) == (128, True, "chunked")
    own = h200_scheduling.closed(H200Bench(closed_chunk_tokens=320, closed_max_step_s=0.06))
    assert (own.max_num_batched_tokens, own.max_step_s) == (320, 0.06)


def test_clients_ask_until_they_are_stopped_and_the_engine_is_as_it_was() -> None:
    with Engine(TINY.engine) as engine:
        ours = Ours(TINY, engine)
        ours.prime()
        found = h200_closed.measure(TINY, engine, ours.documents)
        assert not engine.has_requests
        assert engine.config == TINY.engine
    assert len(found.e2e_s) > 0
    assert found.num_steps > 0
    assert 0.0 <= found.idle_share < 1.0
    assert found.after.num_running + found.after.num_waiting == TINY.num_requests
    assert found.after.num_hits == found.after.num_queries
