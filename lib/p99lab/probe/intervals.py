"""Percentiles and spreads with 95 % confidence intervals, for independent and for correlated series.

A percentile's interval is a pair of order statistics: with B ~ Binomial(n, q), the interval (x_(l), x_(u)) covers the
q-quantile with probability P(l <= B < u), whatever the distribution (David & Nagaraja, Order Statistics, 7.1). Each
tail gets 2.5 %. The upper one exists only if P(B = n) = q^n <= 2.5 %, the lower one only if (1-q)^n <= 2.5 %; hence
`min_n`: 6 for P50, 36 for P90, 368 for P99, 3 688 for P99.9. Below it, where correlation takes the upper bound away,
the lower one stands alone: it needs nothing beyond the sample. It is not given where it would be the largest of all
(P99: an effective n of 1 or 2), for which of the correlated values stands for that one is unknown.

Of requests that run in lockstep each says little that its neighbours do not. Their number is divided by the integrated
autocorrelation time of the series' ranks, and the interval is taken at that effective n. (The percentile interval of
a moving-block bootstrap, the usual answer, cannot reach beyond the largest observation: at an effective n of 100 to 400
it held the true P99 in 66 to 90 % of simulated lockstep and AR(1) series, order statistics at the effective n in 95 to
99 %.)
Standard deviations, which are no order statistics, get a moving-block bootstrap (Künsch 1989), blocks from the same
autocorrelation time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

TAIL = 0.025
_WINDOW = 5  # lags summed: this many autocorrelation times (Sokal)
_RESAMPLES = 1000
_MAX_BLOCKS = 2000


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its 95 % interval; None where the sample cannot give it or a bound of it, and `reason` says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    effective_n: int
    reason: str | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "value": self.value,
            "ci95": [self.low, self.high],
            "n": self.n,
            "effective_n": self.effective_n,
            "reason": self.reason,
        }


@functools.cache
def min_n(q: float) -> int:
    """The least n at which both order statistics of the interval for the q-quantile exist."""
    return math.ceil(math.log(TAIL) / math.log(max(q, 1.0 - q)))


@functools.lru_cache(maxsize=1024)
def order_statistics(n: int, q: float) -> tuple[int, int]:
    """Ranks (l, u), counted from 1, of the interval for the q-quantile; l = 0 or u = n + 1 where none exists."""
    k = np.arange(n)
    log_ratio = np.log(n - k) - np.log(k + 1.0) + math.log(q) - math.log1p(-q)
    log_pmf = n * math.log1p(-q) + np.concatenate([[0.0], np.cumsum(log_ratio)])
    pmf = np.exp(log_pmf)
    below = np.cumsum(pmf)  # P(B <= k)
    above = np.cumsum(pmf[::-1])[::-1]  # P(B >= k)
    low = int(np.searchsorted(below, TAIL, side="right"))
    fits = np.flatnonzero(above <= TAIL)
    return low, int(fits[0]) if len(fits) else n + 1


def percentile(values: FloatArray, q: float, effective_n: int | None = None) -> Figure:
    """The q-quantile of a sample: its ceil(n·q)-th value, with the interval described above.

    Failed requests are given as infinity: they are slower than any that were answered.

    Args:
        values: [n], any order.
        effective_n: independent observations they are worth; n when None.
    """
    n = len(values)
    effective = n if effective_n is None else effective_n
    if n < min_n(q):
        return Figure(None, None, None, n, effective, f"n too small: {n} of the {min_n(q)} that {label(q)} needs")
    ordered = np.sort(values)
    rank = max(1, math.ceil(n * q))
    low_rank, high_rank = order_statistics(effective, q)
    value, low, high = _finite(ordered[rank - 1]), None, None
    if 1 <= low_rank < effective:
        low = _finite(ordered[min(rank, _stretch(low_rank, effective, n)) - 1])
    if high_rank <= effective:
        high = _finite(ordered[max(rank, _stretch(high_rank, effective, n)) - 1])
    return Figure(value, low, high, n, effective, _reason(value, low, high, n, effective, q))


def autocorrelation_time(values: FloatArray) -> float:
    """How many successive values are worth one: 1 + 2 times the sum of the autocorrelations of their ranks.

    Ranks, because latencies are heavy-tailed. The sum ends at five times its own value (Sokal 1997), or before the
    first two successive correlations whose sum is negative (Geyer 1992), where all that follows is noise; it is
    corrected for the mean's having been estimated.
    """
    n = len(values)
    ranks = _ranks(values) - (n + 1) / 2.0
    if n < 8 or not ranks.any():
        return 1.0
    spectrum = np.fft.rfft(ranks, 2 * n)
    covariance = np.fft.irfft(spectrum * spectrum.conj(), 2 * n)[:n]
    correlation = covariance / covariance[0]
    time = 2.0 * np.cumsum(correlation) - 1.0
    noise_next = np.append(correlation[1:-1] + correlation[2:] < 0.0, [True, True])
    enough = np.flatnonzero((np.arange(n) >= _WINDOW * time) | noise_next)
    last = int(enough[0]) if len(enough) else n - 1
    return float(time[last] / max(0.5, 1.0 - (2 * last + 1) / n))


def effective_size(values: FloatArray) -> int:
    """Independent observations that a series in order of time is worth; n unless its correlation is significant.

    Significant: the autocorrelation time exceeds 1 by twice the standard error it has on independent values,
    sqrt(2 (2·5 + 1) / n) (Madras & Sokal 1988).
    """
    n = len(values)
    time = autocorrelation_time(values)
    if n == 0 or time <= 1.0 + 2.0 * math.sqrt(2.0 * (2 * _WINDOW + 1) / n):
        return n
    return max(1, int(n / time))


def spread(values: FloatArray, seed: int = 0) -> Figure:
    """The standard deviation of a series in order of time, with a moving-block bootstrap interval (seeded)."""
    kept = values[np.isfinite(values)]
    n, effective = len(kept), effective_size(kept)
    if n < 8:
        return Figure(None, None, None, n, effective, f"n too small: {n} of the 8 that a spread needs")
    block = max(-(-n // effective), -(-n // _MAX_BLOCKS)) * (1 if effective == n else 2)
    if 4 * block > n:
        value, reason = float(kept.std(ddof=1)), f"no bounds: {n} correlated values are worth {effective}"
        return Figure(value, None, None, n, effective, reason)
    low, high = np.quantile(_resampled_spread(kept - kept.mean(), block, seed), [TAIL, 1 - TAIL])
    return Figure(float(kept.std(ddof=1)), float(low), float(high), n, effective)


def label(q: float) -> str:
    """P50, P99, P99.9."""
    return f"P{100 * q:.6g}"


def _resampled_spread(centred: FloatArray, block: int, seed: int) -> FloatArray:
    """Standard deviations of resamples made of whole blocks, by the blocks' sums."""
    starts = np.arange(len(centred) - block + 1)
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    squares = np.concatenate([[0.0], np.cumsum(centred**2)])
    first, second = sums[starts + block] - sums[starts], squares[starts + block] - squares[starts]
    num_blocks = -(-len(centred) // block)
    chosen = np.random.default_rng(seed).integers(len(starts), size=(_RESAMPLES, num_blocks))
    n = num_blocks * block
    mean = first[chosen].sum(axis=1) / n
    variance = np.maximum(0.0, second[chosen].sum(axis=1) / n - mean**2)
    return np.asarray(np.sqrt(variance * n / (n - 1)))


def _ranks(values: FloatArray) -> FloatArray:
    """Ranks with ties averaged, [n]."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2.0)[inverse], np.float64)


def _stretch(rank: int, effective: int, n: int) -> int:
    """The rank among n values of a rank among `effective` ones."""
    return max(1, math.ceil(rank * n / effective))


def _finite(value: np.float64) -> float | None:
    return float(value) if np.isfinite(value) else None


def _reason(value: float | None, low: float | None, high: float | None, n: int, effective: int, q: float) -> str | None:
    if value is None:
        return f"failed requests reach {label(q)}"
    if high is None and effective < min_n(q):
        lacking = "no bounds" if low is None else "no upper bound"
        return f"{lacking}: {n} correlated values are worth {effective}, {label(q)} needs {min_n(q)}"
    return "failed requests reach the upper bound" if high is None else None
