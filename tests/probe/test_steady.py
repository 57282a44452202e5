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


def cycles(num: int, growth: float = 0.0, every_s: float = 60.0, first_s: float = 36.0) -> SteadyWindow:
    """Twenty requests a second; 0.8 s for 38 s after each cold document, else 0.45 s. `growth`: from cycle to cycle."""
    start_s = np.arange(first_s, every_s * (num + 1) - 0.2, 0.05)
    busy = (start_s % every_s < 38.0) & (start_s >= every_s)
    latency = np.where(busy, 0.8, 0.45) * (1 + growth * (start_s // every_s))
    latency *= np.random.default_rng(3).normal(1.0, 0.03, len(start_s))
    return steady_cycles(start_s, latency, 20 * latency, every_s)


def test_a_load_that_repeats_itself_is_steady_over_its_whole_cycles() -> None:
    window = cycles(5)
    assert window.verdict == "steady"
    assert (window.start_s, window.end_s) == pytest.approx((60.0, 359.8), abs=0.1)
    assert window.num_requests == pytest.approx(6000, abs=10)
    late = cycles(5, first_s=70.0)  # the first cycle is not whole
    assert (late.verdict, round(late.start_s)) == ("steady", 120)


def test_cycles_that_grow_drift_and_few_cannot_tell() -> None:
    window = cycles(5, growth=0.04)
    assert (window.verdict, window.reason) == ("drifting", "latency and concurrency never settles: cycles differ")
    assert cycles(5, growth=0.01).verdict == "steady"
    window = cycles(2)
    assert (window.verdict, window.reason) == ("cannot tell", "2 of the 3 whole cycles of 60 s that it takes")
    nothing = np.array([])
    assert steady_cycles(nothing, nothing, nothing, 60.0).verdict == "cannot tell"
