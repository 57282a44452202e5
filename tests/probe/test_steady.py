"""The steady window: what it accepts, rejects and cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from p99lab.lab.proof.steadiness import CLAIMS, Make, autoregressive, independent, lockstep
from p99lab.lab.proof.steadiness import verdicts as rates
from p99lab.probe.steady import SteadyWindow, steady_cycles, steady_window

pytestmark = pytest.mark.light


def several(make: Make, num: int = 100, **options: float) -> np.ndarray:
    rng = np.random.default_rng(17)
    return np.array([make(rng, **options) for _ in range(num)])


def verdicts(series: np.ndarray, concurrency: np.ndarray | None = None) -> list[str]:
    start_s = np.arange(series.shape[1], dtype=float)
    level = np.full(series.shape[1], 8.0) if concurrency is None else concurrency
    return [steady_window(start_s, one, level).verdict for one in series]


def whole_kept(series: np.ndarray) -> float:
    start_s, level = np.arange(series.shape[1], dtype=float), np.full(series.shape[1], 8.0)
    windows = [steady_window(start_s, one, level) for one in series]
    return float(np.mean([w.verdict == "steady" and w.first == 0 for w in windows]))


def test_stationary_series_are_steady_from_their_start() -> None:
    assert whole_kept(several(independent)) >= 0.98
    assert whole_kept(several(autoregressive)) >= 0.94
    assert whole_kept(several(lockstep)) >= 0.9


def test_few_independent_stretches_cannot_tell() -> None:
    rng = np.random.default_rng(25)
    assert verdicts(several(autoregressive, n=200, phi=0.99)).count("steady") <= 5  # worth about 1 of 200
    assert verdicts(np.exp(0.05 * np.cumsum(rng.normal(size=(100, 200)), axis=1))).count("steady") <= 5
    assert "steady" not in verdicts(several(lockstep, n=200, size=40))
    swing = 1 + 0.3 * np.sin(np.linspace(0, 2 * np.pi, 200))
    assert set(verdicts(swing + rng.normal(0, 0.01, (100, 200)))) == {"cannot tell"}
    window = steady_window(np.arange(200.0), swing, np.full(200, 8.0))
    assert "of the 16 independent ones" in (window.reason or "")


def test_enough_independent_stretches_can_tell() -> None:
    assert verdicts(several(autoregressive, phi=0.9)).count("steady") >= 80  # worth about 21
    assert verdicts(several(lockstep, n=240)).count("steady") >= 90
    assert verdicts(several(independent, n=40)).count("steady") >= 90


@pytest.mark.parametrize("name", CLAIMS)
def test_the_stated_rates_hold(name: str) -> None:
    claim = CLAIMS[name]
    allowed = 3.0 * (claim.at_least * (1.0 - claim.at_least) / 60) ** 0.5
    assert rates(claim.make, 60, seed=18)[claim.verdict] / 60 >= claim.at_least - allowed


def test_a_growing_queue_is_rejected_by_its_concurrency_alone() -> None:
    flat = np.random.default_rng(19).lognormal(0, 0.3, (1, 400))
    assert verdicts(flat, np.floor(np.linspace(8, 40, 400))) == ["drifting"]


def test_a_slow_start_is_left_out_of_the_window() -> None:
    latency = np.random.default_rng(20).lognormal(0, 0.1, 400)
    latency[:100] *= np.linspace(4, 1, 100)
    window = steady_window(np.arange(400.0), latency, np.full(400, 8.0))
    assert window.verdict == "steady"
    assert 20 <= window.first <= 200
    assert window.start_s == window.first


def test_a_significant_but_small_trend_is_steady() -> None:
    latency = np.random.default_rng(21).normal(1, 0.001, 4000) * np.linspace(1, 1.05, 4000)
    window = steady_window(np.arange(4000.0), latency, np.full(4000, 8.0))
    assert window.verdict == "steady"
    assert window.latency is not None
    assert window.latency.p_value < 0.01
    assert window.latency.change == pytest.approx(0.05 * 2 / 3, abs=0.01)


@pytest.mark.parametrize("n", [0, 1, 39])
def test_few_requests_cannot_tell(n: int) -> None:
    window = steady_window(np.arange(float(n)), np.ones(n), np.ones(n))
    assert window.verdict == "cannot tell"
    assert window.num_requests == n


def test_failures_do_not_break_the_test() -> None:
    latency = np.random.default_rng(22).lognormal(0, 0.3, 200)
    latency[::7] = np.inf
    assert steady_window(np.arange(200.0), latency, np.full(200, 8.0)).verdict == "steady"
    latency[150:] = np.inf
    assert steady_window(np.arange(200.0), latency, np.full(200, 8.0)).verdict == "drifting"
    assert steady_window(np.arange(200.0), np.full(200, np.inf), np.full(200, 8.0)).verdict == "steady"


def cycles(
    num: int,
    levels: tuple[float, ...] = (1.0,),
    noise: float = 0.1,
    rate: float = 20.0,
    first_s: float = 36.0,
    seed: int = 3,
    every_s: float = 60.0,
) -> SteadyWindow:
    """0.8 s for 38 s after each cold document, else 0.45 s; of each cycle times its level, with noise that lasts."""
    rng = np.random.default_rng(seed)
    start_s = np.arange(first_s, every_s * (num + 1) - 0.4, 1.0 / rate)
    busy = (start_s % every_s < 38.0) & (start_s >= every_s)
    wander = np.zeros(len(start_s))
    for i, step in enumerate(rng.normal(0, noise, len(start_s))):
        wander[i] = 0.9 * wander[i - 1] + 0.44 * step
    at = np.minimum((start_s // every_s).astype(int), num) % len(levels)
    latency = np.where(busy, 0.8, 0.45) * np.array(levels)[at] * np.exp(wander)
    return steady_cycles(start_s, latency, rate * latency, every_s, every_s * (num + 1))


def test_a_load_that_repeats_itself_is_steady_over_its_whole_cycles() -> None:
    assert [cycles(5, seed=seed).verdict for seed in range(50)].count("steady") >= 48
    window = cycles(5)
    assert (window.start_s, window.end_s) == pytest.approx((60.0, 359.6), abs=0.1)
    assert window.num_requests == pytest.approx(5992, abs=4)
    late = cycles(5, first_s=70.0)  # the first cycle is not whole
    assert (late.verdict, round(late.start_s)) == ("steady", 120)
    start_s = np.arange(36.0, 350.0, 0.05)  # the load itself ended earlier than its fifth cycle
    latency = np.where(start_s % 60 < 40, 0.8, 0.45) * np.random.default_rng(4).normal(1, 0.1, len(start_s))
    assert steady_cycles(start_s, latency, latency, 60.0, 350.0).end_s == pytest.approx(299.95, abs=0.06)


def test_cycles_that_grow_drift() -> None:
    windows = [cycles(5, levels=(1, 1.05, 1.1, 1.15, 1.2, 1.25), seed=seed) for seed in range(50)]
    assert [window.verdict for window in windows].count("drifting") >= 45
    assert "cycles never settle in latency and concurrency" in {window.reason for window in windows}


@pytest.mark.parametrize("levels", [(1, 1, 1.3, 1, 1.3, 1), (1, 1, 1, 1.3, 1, 1), (1, 3, 1, 3, 1, 3)], ids=str)
def test_cycles_that_differ_otherwise_cannot_tell(levels: tuple[float, ...]) -> None:
    windows = [cycles(5, levels=levels, seed=seed) for seed in range(50)]
    assert {window.verdict for window in windows} == {"cannot tell"}
    assert all((window.reason or "").startswith("cycles of 60 s may differ in latency by ") for window in windows)


def queue(seed: int, capacity: float, blocked_s: float) -> str:
    """One server at half of its capacity, which a cold document blocks every minute: stationary, and far from calm."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(2 / capacity, int(360 * capacity)))
    jobs = [(at_s, 1 / capacity, False) for at_s in arrivals_s[arrivals_s < 360.0]]
    jobs += [(60.0 * number, blocked_s, True) for number in range(1, 6)]
    free_s, found = 0.0, []
    for at_s, work_s, is_cold in sorted(jobs):
        free_s = max(at_s, free_s) + work_s
        if not is_cold:
            found.append((at_s, free_s))
    start_s, end_s = np.array(found).T
    in_flight = np.arange(1, len(start_s) + 1) - np.searchsorted(end_s, start_s, side="right")
    measured = start_s >= 36.0
    return steady_cycles(
        start_s[measured], (end_s - start_s)[measured], in_flight[measured].astype(float), 60.0, 360.0
    ).verdict


@pytest.mark.parametrize(("capacity", "blocked_s"), [(8.0, 10.2), (80.0, 5.0)])
def test_chance_alone_is_rarely_called_a_drift(capacity: float, blocked_s: float) -> None:
    assert [queue(seed, capacity, blocked_s) for seed in range(60)].count("drifting") <= 4


def test_cycles_that_are_few_or_noisy_cannot_tell() -> None:
    assert cycles(5, levels=(1, 1.02, 1, 1.03, 1, 1.01)).verdict == "steady"
    window = cycles(2)
    assert (window.verdict, window.reason) == ("cannot tell", "2 of the 3 whole cycles of 60 s that it takes")
    assert cycles(3, levels=(1, 1, 1.2, 1.4)).verdict == "cannot tell"
    slow = [cycles(5, noise=0.6, rate=1.0, seed=seed).verdict for seed in range(50)]
    assert "steady" not in slow
    assert slow.count("drifting") <= 4
    nothing = np.array([])
    assert steady_cycles(nothing, nothing, nothing, 60.0).verdict == "cannot tell"
    gap = np.concatenate([np.arange(60.0, 119.0, 0.5), np.arange(180.0, 359.0, 0.5)])
    window = steady_cycles(gap, np.ones(len(gap)), np.ones(len(gap)), 60.0, 360.0)
    assert (window.verdict, window.reason) == ("cannot tell", "cycles of 60 s have stretches without a request")
    level = np.arange(60.0, 359.9, 0.5)
    assert steady_cycles(level, np.ones(len(level)), np.zeros(len(level)), 60.0, 360.0).verdict == "steady"
