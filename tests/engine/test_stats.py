"""Counts and times of an engine."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.plan import PageMoves, PrefixGroup, Row, StepPath, StepPlan, StepResult
from p99lab.engine.request import SamplingParams
from p99lab.engine.stats import DEVICE_BOUNDS_S, NUM_KEPT_STEPS, EngineStats, StepTimes

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


def test_a_fresh_engine_has_no_step_times(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.step_p50_s, stats.step_p99_s, stats.step_max_s) == (None, None, None)
    assert (stats.num_steps, stats.busy_s, stats.num_free_pages) == (0, 0.0, 200)


def test_counts_of_a_known_history(engine: Engine) -> None:
    engine.generate([list(range(1, 12))], FOUR)  # 11 tokens and 3 of 4 computed: 14
    engine.generate([[*range(1, 12), 100]], FOUR)
    stats = engine.stats()
    assert (stats.num_queries, stats.num_hits) == (2, 1)
    assert (stats.num_queried_tokens, stats.num_cached_tokens) == (11 + 12, 11)
    assert (stats.num_steps, stats.num_step_tokens) == (4 + 4, 11 + 3 + 1 + 3)
    assert (stats.num_waiting, stats.num_running, stats.num_active_pages) == (0, 0, 0)
    assert stats.num_cached_pages == 4 + 2  # of the second only what follows page [1 … 8]
    assert stats.step_p50_s is not None
    assert stats.step_p99_s is not None
    assert stats.step_max_s is not None
    assert 0.0 < stats.step_p50_s <= stats.step_p99_s <= stats.step_max_s <= stats.busy_s


def test_pages_and_requests_in_mid_flight(tiny_llama: str) -> None:
    config = EngineConfig(
        model=tiny_llama,
        cache=CacheConfig(page_size=4, num_pages=20, prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=1),
    )
    with Engine(config) as engine:
        for _ in range(3):
            engine.add([1] * 9, FOUR)
        engine.step()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (1, 2)
        assert (stats.num_active_pages, stats.num_free_pages, stats.num_cached_pages) == (3, 17, 0)


def test_counters_begin_anew_when_reconfigured_and_outlive_the_engine(engine: Engine) -> None:
    engine.generate([[1, 2, 3]], FOUR)
    engine.reconfigure(SchedulerConfig())
    stats = engine.stats()
    assert (stats.num_queries, stats.num_steps) == (0, 0)
    assert stats.num_cached_pages == 2
    engine.generate([[1, 2, 3]], FOUR)
    engine.close()
    assert engine.stats().num_queries == 1


def test_only_the_latest_steps_are_kept_one_by_one() -> None:
    times = StepTimes()
    for number in range(NUM_KEPT_STEPS + 10):
        times.add(2, 0.0, 0.5 * number * (number + 1))
    assert times.num_steps == NUM_KEPT_STEPS + 10
    assert times.num_tokens == 2 * times.num_steps
    assert len(times.recent_s) == NUM_KEPT_STEPS
    assert times.recent_s[0] == 10.0


def test_a_step_begins_when_launched_or_when_the_one_before_has_ended() -> None:
    times = StepTimes()
    for launched_s, ended_s in ((1.0, 4.0), (2.0, 5.0), (7.0, 9.0)):
        times.add(1, launched_s, ended_s)
    assert list(times.recent_s) == [3.0, 1.0, 2.0]
    assert times.busy_s == 6.0


def test_how_steps_ran_is_counted() -> None:
    times = StepTimes()
    one, pages = np.zeros(1, np.int32), np.arange(3, dtype=np.int32)
    rows = tuple(
        Row(str(i), i, np.zeros(num, np.int32), 8, pages, True, SamplingParams(), 0) for i, num in enumerate((2, 1, 5))
    )
    groups = (PrefixGroup((0, 1), 0, 1), PrefixGroup((0, 1), 1, 1))  # nested: rows count once
    plan = StepPlan(1, rows, groups, moves=(PageMoves(one, one), PageMoves(pages, pages)))
    assert plan.num_shared_tokens == 3
    for path, num_padded, device_s in (
        (StepPath.GRAPH, 3, 0.0025),
        (StepPath.GRAPH, 0, 0.004),
        (StepPath.EAGER, 0, None),
        (StepPath.FALLBACK, 0, 100.0),
    ):
        times.add_result(plan, StepResult(1, (None,) * 3, (None,) * 3, {}, device_s, path, num_padded))
    assert (times.num_graph_steps, times.num_fallback_steps, times.num_padded_tokens) == (2, 1, 3)
    assert (times.num_moved_pages, times.num_shared_tokens) == (4 * 4, 4 * 3)
    assert times.num_by_device_s == [1, 1, *[0] * (len(DEVICE_BOUNDS_S) - 2), 1]
    assert times.device_s == pytest.approx(100.0065)


def test_an_engine_counts_what_its_steps_share_and_move(tiny_llama: str) -> None:
    grouping = GroupingConfig(decide_by="length", min_shared_tokens=4)
    config = EngineConfig(model=tiny_llama, cache=CacheConfig(page_size=4, num_pages=200), grouping=grouping)
    with Engine(config) as engine:
        document = list(range(1, 13))
        engine.generate([document], SamplingParams(max_tokens=1, ignore_eos=True))
        engine.reconfigure()
        engine.generate([[*document, 20], [*document, 21], [99]], FOUR)
        stats = engine.stats()
        assert (stats.num_steps, stats.num_step_tokens, stats.num_shared_tokens) == (4, 3 * 4, 2 * 4)
        assert (stats.num_graph_steps, stats.num_fallback_steps, stats.num_padded_tokens) == (0, 0, 0)
        shares = replace(stats, num_graph_steps=3, num_fallback_steps=1)
        assert (shares.graph_share, shares.fallback_share) == (0.75, 0.25)
        assert sum(stats.num_by_device_s) == 0  # a CPU has no clock of its own
        assert stats.device_s == 0.0


def test_stats_are_plain_numbers(engine: Engine) -> None:
    engine.generate([[1, 2, 3]], FOUR)
    stats = engine.stats()
    assert EngineStats(**json.loads(json.dumps(stats.as_dict()))) == stats


@pytest.mark.parametrize("name", ["num_preemptions", "num_page_waits"])
def test_a_pool_too_small_is_seen(tiny_llama: str, name: str) -> None:
    config = EngineConfig(model=tiny_llama, cache=CacheConfig(page_size=4, num_pages=12, prefix_cache=False))
    with Engine(config) as engine:
        engine.generate([[number] * 9 for number in range(6)], SamplingParams(max_tokens=20, ignore_eos=True))
        assert engine.stats().as_dict()[name] > 0


def test_a_request_that_waits_for_pages_is_counted_once(tiny_llama: str) -> None:
    config = EngineConfig(model=tiny_llama, cache=CacheConfig(page_size=4, num_pages=12, prefix_cache=False))
    with Engine(config) as engine:
        engine.generate([[1] * 20, [2] * 40], SamplingParams(max_tokens=8, ignore_eos=True))  # 7 pages, and 12
        assert (engine.stats().num_page_waits, engine.stats().num_preemptions) == (1, 0)
