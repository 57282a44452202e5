from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.probe.intervals import (
    autocorrelation_time,
    effective_size,
    interpolated_ranks,
    min_n,
    order_statistics,
    percentile,
    spread,
)

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


@given(n=st.integers(1, 3000), q=st.sampled_from([0.5, 0.9, 0.99]))
def test_interpolated_ranks_lie_within_the_whole_ones(n: int, q: float) -> None:
    n = max(n, min_n(q))
    low, high = interpolated_ranks(n, q)
    whole_low, whole_high = order_statistics(n, q)
    assert whole_low <= low < whole_low + 1
    assert whole_high - 1 <= high <= whole_high


def covered(series: Iterable[np.ndarray], q: float, truth: float) -> float:
    figures = [percentile(one, q, effective_size(one, q)) for one in series]
    return float(np.mean([(f.low is None or f.low <= truth) and (f.high is None or truth <= f.high) for f in figures]))


@pytest.mark.parametrize(("q", "n"), [(0.5, 500), (0.9, 500), (0.99, 368), (0.99, 1000), (0.99, 4000)])
@pytest.mark.parametrize("kind", ["light", "heavy", "bimodal"])
def test_the_interval_covers_the_truth(kind: str, q: float, n: int) -> None:
    quantile = {
        "light": lambda u: -np.log1p(-u),
        "heavy": lambda u: (1 - u) ** -0.8,
        "bimodal": lambda u: np.where(u < 0.97, u, 20 + u),
    }[kind]
    values = np.sort(quantile(np.random.default_rng(11).random((RUNS, n))), axis=1)
    (low, low_share), (high, high_share) = (divmod(rank, 1.0) for rank in interpolated_ranks(n, q))
    bounds = [
        values[:, int(rank) - 1] * (1 - share) + values[:, min(n, int(rank) + 1) - 1] * share
        for rank, share in ((low, low_share), (high, high_share))
    ]
    assert percentile(values[0], q).low == pytest.approx(bounds[0][0])
    assert percentile(values[0], q).high == pytest.approx(bounds[1][0])
    truth = quantile(np.float64(q))
    assert 0.93 <= np.mean((bounds[0] <= truth) & (truth <= bounds[1])) <= 0.97


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_the_interval_covers_the_truth_of_requests_in_lockstep(q: float) -> None:
    rng = np.random.default_rng(12)
    truth = math.exp(0.5 * {0.5: 0.0, 0.99: 2.3263479}[q])
    series = [lockstep(rng, 500, 8) for _ in range(400)]
    assert 0.92 <= covered(series, q, truth) <= 0.98  # 95 %, and three standard errors
    assert np.mean([effective_size(one, q) for one in series]) == pytest.approx(500, rel=0.1)
    naive = [percentile(one, q) for one in series]
    assert np.mean([f.low <= truth <= f.high for f in naive]) < 0.7  # what their number alone would claim


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_the_interval_covers_the_truth_of_an_autoregressive_series(q: float) -> None:
    truth = math.exp(0.3 * {0.5: 0.0, 0.99: 2.3263479}[q])
    series = autoregressive(np.random.default_rng(13), 400, 2000, 0.7)
    assert 0.92 <= covered(series, q, truth) <= 0.99


def stalled(rng: np.random.Generator, n: int) -> np.ndarray:
    """Five arrivals a second, 0.1 s each, at a server that stands still for 2 s every 100 s on the average."""
    arrivals = np.cumsum(rng.exponential(0.2, n))
    begins = np.cumsum(rng.exponential(98.0, n // 100 + 60) + 2.0) - 2.0
    wait = begins[np.searchsorted(begins, arrivals) - 1] + 2.0 - arrivals
    return rng.lognormal(math.log(0.1), 0.3, n) + np.where((wait > 0) & (wait <= 2.0), wait, 0.0)


def test_stalls_that_are_shared_count_once_where_they_make_the_tail() -> None:
    rng = np.random.default_rng(27)
    truth = float(np.quantile(np.concatenate([stalled(rng, 40_000) for _ in range(50)]), 0.99))
    series = [stalled(rng, 4000) for _ in range(300)]
    assert 0.92 <= covered(series, 0.99, truth) <= 0.99
    by_ranks = [percentile(one, 0.99, effective_size(one)) for one in series]
    assert np.mean([f.low <= truth <= f.high for f in by_ranks]) < 0.85


@pytest.mark.parametrize("value", [0.0, math.inf])
def test_a_level_that_all_reach_leaves_their_n(value: float) -> None:
    assert effective_size(np.full(200, value), 0.99) == 200


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
    assert 366.0 < percentile(np.arange(368.0), 0.99).high <= 367.0


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
        figures = [percentile(one, 0.99, effective_size(one, 0.99)) for one in series]
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
