from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.probe.intervals import (
    autocorrelation_time,
    effective_size,
    min_n,
    order_statistics,
    percentile,
    spread,
)
from p99lab.probe.steady import steady_window

pytestmark = pytest.mark.light

RUNS = 2000


def lockstep(rng: np.random.Generator, num_batches: int, size: int) -> np.ndarray:
    """Requests that finish together: nearly the same latency for each of a batch, begun anywhere in one."""
    skip = int(rng.integers(size))
    latency = np.repeat(rng.lognormal(0, 0.5, num_batches + 1), size) * (
        1 + 1e-6 * rng.random((num_batches + 1) * size)
    )
    return latency[skip : skip + num_batches * size]


def autoregressive(rng: np.random.Generator, runs: int, n: int, phi: float) -> np.ndarray:
    """Lognormal series, [runs, n], whose logarithms are AR(1)."""
    noise = rng.normal(size=(runs, n)) * math.sqrt(1 - phi**2)
    series = np.empty((runs, n))
    series[:, 0] = rng.normal(size=runs)
    for at in range(1, n):
        series[:, at] = phi * series[:, at - 1] + noise[:, at]
    return np.exp(0.3 * series)


def binomial_at_most(k: int, n: int, q: float) -> float:
    return math.fsum(math.comb(n, i) * q**i * (1 - q) ** (n - i) for i in range(k + 1))


def test_the_least_n_is_where_the_upper_order_statistic_exists() -> None:
    assert [min_n(q) for q in (0.5, 0.9, 0.99, 0.999)] == [6, 36, 368, 3688]
    for q in (0.5, 0.9, 0.99, 0.999):
        n = min_n(q)
        assert order_statistics(n, q)[1] <= n
        assert order_statistics(n - 1, q)[1] > n - 1


@given(n=st.integers(1, 400), q=st.sampled_from([0.5, 0.9, 0.99]))
def test_each_tail_holds_at_most_and_nearly_two_and_a_half_percent(n: int, q: float) -> None:
    low, high = order_statistics(n, q)
    below = binomial_at_most(low - 1, n, q) if low else 0.0
    above = 1 - binomial_at_most(high - 1, n, q) if high <= n else 0.0
    assert below <= 0.025 + 1e-9
    assert above <= 0.025 + 1e-9
    assert binomial_at_most(low, n, q) > 0.025 - 1e-9
    assert high == 0 or 1 - binomial_at_most(high - 2, n, q) > 0.025 - 1e-9


def test_large_samples_do_not_underflow() -> None:
    low, high = order_statistics(1_000_000, 0.99)
    assert (low, high) == (pytest.approx(990_000 - 196, abs=3), pytest.approx(990_000 + 196, abs=3))


@pytest.mark.parametrize(("q", "n"), [(0.5, 500), (0.9, 500), (0.99, 1000)])
@pytest.mark.parametrize("kind", ["light", "heavy", "bimodal"])
def test_the_interval_covers_the_truth(kind: str, q: float, n: int) -> None:
    rng = np.random.default_rng(11)
    uniform = np.sort(rng.random((RUNS, n)), axis=1)  # coverage is that of ranks: any monotone map of a uniform
    quantile = {
        "light": lambda u: u,
        "heavy": lambda u: (1 - u) ** -0.8,
        "bimodal": lambda u: np.where(u < 0.97, u, 20 + u),
    }[kind]
    low, high = order_statistics(n, q)
    values, truth = quantile(uniform), quantile(np.float64(q))
    covered = np.mean((values[:, low - 1] <= truth) & (truth <= values[:, high - 1]))
    assert 0.93 <= covered <= 0.975


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_the_interval_covers_the_truth_of_requests_in_lockstep(q: float) -> None:
    rng = np.random.default_rng(12)
    truth = math.exp(0.5 * {0.5: 0.0, 0.99: 2.3263479}[q])
    covered = effective = 0.0
    for _ in range(400):
        series = lockstep(rng, 500, 8)
        figure = percentile(series, q, effective_size(series))
        effective += figure.effective_n / 400
        covered += (figure.low <= truth) and (figure.high is None or truth <= figure.high)
    assert 0.93 <= covered / 400 <= 0.99
    assert effective == pytest.approx(500, rel=0.1)


def test_the_interval_covers_the_median_of_an_autoregressive_series() -> None:
    series = autoregressive(np.random.default_rng(13), 400, 800, 0.7)
    figures = [percentile(one, 0.5, effective_size(one)) for one in series]
    assert 0.93 <= np.mean([f.low <= 1.0 <= f.high for f in figures]) <= 0.99


def test_independent_series_keep_their_n() -> None:
    series = np.random.default_rng(14).lognormal(0, 1, (500, 400))
    assert np.mean([effective_size(one) == 400 for one in series]) > 0.93
    assert np.mean([autocorrelation_time(one) for one in series]) == pytest.approx(1.05, abs=0.05)


def test_a_constant_series_is_worth_its_n() -> None:
    assert effective_size(np.ones(50)) == 50
    assert effective_size(np.empty(0)) == 0


def test_below_the_least_n_there_is_no_p99() -> None:
    figure = percentile(np.arange(367.0), 0.99)
    assert (figure.value, figure.low, figure.high) == (None, None, None)
    assert figure.reason == "n too small: 367 of the 368 that P99 needs"
    assert percentile(np.arange(368.0), 0.99).high == 367.0


def test_correlated_series_below_the_least_effective_n_have_no_upper_bound() -> None:
    figure = percentile(np.arange(400.0), 0.99, effective_n=50)
    assert figure.value == 395.0
    assert figure.high is None
    assert figure.reason is not None
    assert "worth 50" in figure.reason


@given(
    n=st.integers(1, 5000),
    share=st.floats(0, 1),
    q=st.sampled_from([0.5, 0.9, 0.99, 0.999]),
    num_failed=st.integers(0, 60),
)
def test_bounds_are_on_their_sides_of_the_value(n: int, share: float, q: float, num_failed: int) -> None:
    values = np.arange(float(n))
    values[n - min(n, num_failed) :] = np.inf
    figure = percentile(values, q, effective_n=max(1, round(share * n)))
    if figure.value is not None:
        assert figure.low is None or figure.low <= figure.value
        assert figure.high is None or figure.value <= figure.high
        assert figure.high is None or figure.effective_n >= min_n(q)


@pytest.mark.parametrize("effective_n", [1, 2])
def test_one_or_two_independent_values_bound_no_p99(effective_n: int) -> None:
    figure = percentile(np.arange(400.0), 0.99, effective_n)
    assert (figure.value, figure.low, figure.high) == (395.0, None, None)
    assert figure.reason == f"no bounds: 400 correlated values are worth {effective_n}, P99 needs 368"


def test_a_lower_bound_alone_holds_as_often_as_it_says() -> None:
    rng, truth = np.random.default_rng(24), math.exp(0.5 * 2.3263479)
    for num_batches in (25, 60, 150):
        series = [lockstep(rng, num_batches, 16) for _ in range(400)]
        figures = [percentile(one, 0.99, effective_size(one)) for one in series]
        assert all(figure.high is None for figure in figures)
        assert np.mean([f.low is None or f.low <= truth for f in figures]) >= 0.96


def test_failures_are_slower_than_any_answer() -> None:
    values = np.concatenate([np.arange(990.0), np.full(10, np.inf)])
    assert percentile(values, 0.99).value == 989.0
    assert percentile(values, 0.99).high is None
    worse = percentile(np.concatenate([np.arange(980.0), np.full(20, np.inf)]), 0.99)
    assert worse.value is None
    assert worse.reason == "failed requests reach P99"
    assert percentile(values, 0.5).reason is None


def test_the_spread_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(15)
    figures = [spread(rng.normal(5, 2, 300)) for _ in range(200)]
    assert np.mean([f.low <= 2.0 <= f.high for f in figures]) >= 0.9


def test_the_spread_interval_is_wider_for_requests_in_lockstep() -> None:
    rng = np.random.default_rng(23)
    alone = [spread(rng.lognormal(0, 0.5, 400)) for _ in range(50)]
    together = [spread(lockstep(rng, 50, 8)) for _ in range(50)]
    assert np.mean([f.high - f.low for f in together]) > 1.6 * np.mean([f.high - f.low for f in alone])


def test_a_spread_of_very_few_independent_values_has_no_bounds() -> None:
    figure = spread(np.linspace(0, 1, 100))
    assert figure.value == pytest.approx(0.293, abs=0.001)
    assert (figure.low, figure.high) == (None, None)
    assert figure.reason is not None


def test_the_spread_is_the_same_each_time() -> None:
    values = np.random.default_rng(16).random(100)
    assert spread(values) == spread(values)
    assert spread(values[:3]).reason is not None


# --- the steady window ----------------------------------------------------------------------------------------------


def verdicts(series: np.ndarray, concurrency: np.ndarray | None = None) -> list[str]:
    start_s = np.arange(series.shape[1], dtype=float)
    level = np.full(series.shape[1], 8.0) if concurrency is None else concurrency
    return [steady_window(start_s, one, level).verdict for one in series]


def whole_kept(series: np.ndarray) -> float:
    start_s, level = np.arange(series.shape[1], dtype=float), np.full(series.shape[1], 8.0)
    windows = [steady_window(start_s, one, level) for one in series]
    return float(np.mean([w.verdict == "steady" and w.first == 0 for w in windows]))


def test_stationary_series_are_steady_from_their_start() -> None:
    rng = np.random.default_rng(17)
    assert whole_kept(rng.lognormal(0, 0.3, (100, 400))) >= 0.98
    assert whole_kept(autoregressive(rng, 100, 400, 0.7)) >= 0.94
    assert whole_kept(np.array([lockstep(rng, 60, 8) for _ in range(100)])) >= 0.9


def test_few_independent_stretches_cannot_tell() -> None:
    rng = np.random.default_rng(25)
    assert verdicts(autoregressive(rng, 100, 200, 0.99)).count("steady") <= 5  # worth about 1 of 200
    assert verdicts(np.exp(0.05 * np.cumsum(rng.normal(size=(100, 200)), axis=1))).count("steady") <= 5
    assert "steady" not in verdicts(np.array([lockstep(rng, 5, 40) for _ in range(100)]))
    swing = 1 + 0.3 * np.sin(np.linspace(0, 2 * np.pi, 200))
    assert set(verdicts(swing + rng.normal(0, 0.01, (100, 200)))) == {"cannot tell"}
    window = steady_window(np.arange(200.0), swing, np.full(200, 8.0))
    assert "of the 16 independent ones" in (window.reason or "")


def test_enough_independent_stretches_can_tell() -> None:
    rng = np.random.default_rng(26)
    assert verdicts(autoregressive(rng, 100, 400, 0.9)).count("steady") >= 85  # worth about 21
    assert verdicts(np.array([lockstep(rng, 30, 8) for _ in range(100)])).count("steady") >= 90
    assert verdicts(rng.lognormal(0, 0.3, (100, 40))).count("steady") >= 90


def test_a_drift_is_rejected() -> None:
    rng = np.random.default_rng(18)
    drift = np.linspace(1.0, 2.0, 400)
    independent, correlated = rng.lognormal(0, 0.3, (100, 400)), autoregressive(rng, 100, 400, 0.7)
    assert verdicts(independent * drift).count("drifting") >= 93
    assert verdicts(correlated * drift).count("drifting") >= 80


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
