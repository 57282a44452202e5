"""Where a run is steady: a stated test for drift of latency and of concurrency.

The series, in order of time, is cut into 8 to 20 blocks of equal count, each several autocorrelation times long where
the series allows, so that block medians are nearly independent. They are tested for a trend by Mann–Kendall (two-sided,
1 %); the trend's size is the difference between the medians of the last and the first third, as a share of the whole's.
A series drifts if its trend is both significant and larger than 10 %: a long run makes any trend significant, a short
one any difference large. The first half is tested by itself too, because a slow start hides in a long calm after it.

The steady window begins with the first block from which neither latency nor concurrency drifts; less than half of the
run may be dropped. Once something was dropped, the rest must not change by more than 10 % whatever the significance: a
drift is not to pass because what is left of it is short.

No drift found is no proof of none: the window is called steady only if, its straight line taken out, it is worth 16
independent stretches, two for each of the least blocks. One long swing looks the same as a calm and a drift.

A load that repeats itself (a cold document every minute) is never calm within a cycle. It is steady if its cycles are
alike: no two of at least three whole ones have means, of latency or of concurrency, that differ by more than 10 %, and
chance hides no such difference. How well a mean is known follows from how the twelve phases of its cycle lie beside the
course that all cycles have in common. It drifts if its cycles rise or fall, one after the other, by more than 10 % (by
chance five do in 2 % of cases; of three it is never said). Else nothing can be told.

Stated rates (`lab.proof.steadiness` measures them), series of 400 requests unless said otherwise. Stationary ones are
called steady in at least 98 % of cases where independent, in 94 % where AR(1) of 0.7 or in lockstep by 8. A level that
doubles over the run is called drifting in at least 90 % of independent series, in 75 % of AR(1) ones and of 1 600
requests in lockstep; one that rises by half in 60 % of independent ones: of the others the later part is taken, which
changes less. What is worth little shows little: 400 requests in lockstep by 8 are worth 50, and a doubling of these is
seen in one case of five.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from p99lab.probe.intervals import FloatArray, autocorrelation_time, effective_size

SIGNIFICANCE = 0.01
MATERIAL_CHANGE = 0.10
MIN_REQUESTS = 40
MIN_STRETCHES = 16
MIN_CYCLES = 3
CYCLES_SIGNIFICANCE = 0.05  # five cycles have 0.03 at least
_LATE_START = 0.05  # of a cycle, that may be missing of the first
_PHASES = 12  # of a cycle
_STANDARD_ERRORS = 3.0  # of the largest of some differences
_MIN_BLOCKS, _MAX_BLOCKS, _LEAST_TESTED = 8, 20, 6


@dataclass(frozen=True, slots=True)
class Trend:
    """`change`: from the first to the last third of the blocks, as a share of the median. `p_value`: of no trend."""

    change: float
    p_value: float

    def drifts(self, significance: float = SIGNIFICANCE) -> bool:
        return self.p_value <= significance and abs(self.change) > MATERIAL_CHANGE


@dataclass(frozen=True, slots=True)
class SteadyWindow:
    """`first` … `last` index the series given; they span it whole unless the verdict is `steady`."""

    verdict: Literal["steady", "drifting", "cannot tell"]
    reason: str | None
    first: int
    last: int
    start_s: float
    end_s: float
    latency: Trend | None = None
    concurrency: Trend | None = None

    @property
    def num_requests(self) -> int:
        return self.last - self.first + 1

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "num_requests": self.num_requests}


def steady_window(start_s: FloatArray, latency_s: FloatArray, concurrency: FloatArray) -> SteadyWindow:
    """Find the steady part of a series of requests.

    Args:
        start_s, latency_s, concurrency: [n], in order of time; latency infinite for a failed request; concurrency
            is what was in flight when the request was sent.
    """
    n = len(start_s)
    whole = (0, n - 1, float(start_s[0]) if n else 0.0, float(start_s[-1]) if n else 0.0)
    if n < MIN_REQUESTS:
        return SteadyWindow("cannot tell", f"{n} of the {MIN_REQUESTS} requests it takes", *whole)
    series = {"latency": _with_failures_slowest(latency_s), "concurrency": concurrency}
    edges = block_edges(series["latency"])
    for dropped in range(min((len(edges) - 1) // 2, len(edges) - _LEAST_TESTED)):
        first = edges[dropped]
        if not _drifting({name: values[first:] for name, values in series.items()}, dropped > 0):
            stretches = min(_stretches(values[first:]) for values in series.values())
            if stretches < MIN_STRETCHES:
                reason = f"{n - first} requests are worth {stretches} of the {MIN_STRETCHES} independent ones it takes"
                return SteadyWindow("cannot tell", reason, *whole)
            trends = [trend(values, edges[dropped:]) for values in series.values()]
            return SteadyWindow("steady", None, first, n - 1, float(start_s[first]), whole[3], *trends)
    names = " and ".join(_drifting(series, False)) or "latency"
    return SteadyWindow(
        "drifting", f"{names} never settles", *whole, *(trend(values, edges) for values in series.values())
    )


def steady_cycles(
    start_s: FloatArray, latency_s: FloatArray, concurrency: FloatArray, every_s: float, end_s: float | None = None
) -> SteadyWindow:
    """The whole cycles of a series of requests, where they are alike.

    Args:
        start_s, latency_s, concurrency: see `steady_window`; starts count from the run's own.
        every_s: a cycle's length; the first begins so long after the run.
        end_s: when the load ended; None: with the last request.
    """
    n = len(start_s)
    whole = (0, n - 1, float(start_s[0]) if n else 0.0, float(start_s[-1]) if n else 0.0)
    if n < MIN_REQUESTS:
        return SteadyWindow("cannot tell", f"{n} of the {MIN_REQUESTS} requests it takes", *whole)
    begin = max(1, math.ceil(whole[2] / every_s - _LATE_START))
    num_cycles = max(0, math.floor((whole[3] if end_s is None else end_s) / every_s) - begin)
    if num_cycles < MIN_CYCLES:
        reason = f"{num_cycles} of the {MIN_CYCLES} whole cycles of {every_s:g} s that it takes"
        return SteadyWindow("cannot tell", reason, *whole)
    series = {"latency": _with_failures_slowest(latency_s), "concurrency": concurrency}
    phase = np.floor((start_s / every_s - begin) * _PHASES).astype(int)
    inside = (phase >= 0) & (phase < num_cycles * _PHASES)
    if not np.bincount(phase[inside], minlength=num_cycles * _PHASES).all():
        return SteadyWindow("cannot tell", f"cycles of {every_s:g} s have stretches without a request", *whole)
    found = {name: Cycles.of(values[inside], phase[inside], num_cycles) for name, values in series.items()}
    trends = {name: _trend_of(cycles.means) for name, cycles in found.items()}
    if drifting := [name for name, found_trend in trends.items() if found_trend.drifts(CYCLES_SIGNIFICANCE)]:
        reason = f"cycles never settle in {' and '.join(drifting)}"
        return SteadyWindow("drifting", reason, *whole, *trends.values())
    if unlike := [f"{name} by {cycles.apart:.0%}" for name, cycles in found.items() if cycles.apart > MATERIAL_CHANGE]:
        reason = f"cycles of {every_s:g} s may differ in {' and in '.join(unlike)}"
        return SteadyWindow("cannot tell", reason, *whole, *trends.values())
    first, last = (int(place) for place in np.flatnonzero(inside)[[0, -1]])
    return SteadyWindow("steady", None, first, last, float(start_s[first]), float(start_s[last]), *trends.values())


@dataclass(frozen=True, slots=True)
class Cycles:
    """The means of a series' cycles, and the standard error of each, as shares of their median."""

    means: FloatArray
    errors: FloatArray

    @classmethod
    def of(cls, values: FloatArray, phase: FloatArray, num_cycles: int) -> Cycles:
        """
        Args:
            values: [n].
            phase: [n] int, which phase of all cycles' each lies in; each phase has some.
        """
        size = num_cycles * _PHASES
        means = (np.bincount(phase, values, size) / np.bincount(phase, minlength=size)).reshape(num_cycles, _PHASES)
        rests = means - means.mean(axis=0)  # from the course that all have in common
        errors = rests.std(axis=1, ddof=1) / math.sqrt(_PHASES)
        of_cycles = means.mean(axis=1)
        centre = float(np.median(of_cycles)) or 1.0
        return cls(of_cycles / centre, errors / centre)

    @property
    def apart(self) -> float:
        """How far the two that differ most may be apart: their difference, or what chance can make of one if that is
        more."""
        lowest, highest = int(np.argmin(self.means)), int(np.argmax(self.means))
        chance = _STANDARD_ERRORS * math.hypot(self.errors[lowest], self.errors[highest])
        return float(max(np.ptp(self.means), chance))


def block_edges(values: FloatArray) -> list[int]:
    """Where blocks begin and the last one ends (blocks + 1 places); longer blocks for a correlated series.

    The correlation is the median of the quarters' own, each without its straight line: a drift is not to hide itself.
    """
    n = len(values)
    time = float(np.median([autocorrelation_time(_detrended(part)) for part in np.array_split(values, 4)]))
    num_blocks = min(_MAX_BLOCKS, max(_MIN_BLOCKS, int(n / (4.0 * time))), max(2, n // 5))
    return [round(n * block / num_blocks) for block in range(num_blocks + 1)]


def _stretches(values: FloatArray) -> int:
    """Independent values that a series is worth beside its straight line; as it is where that says more, because a line
    taken out of a few whole numbers (a concurrency) leaves them in an order of its own."""
    return max(effective_size(values), effective_size(_detrended(values)))


def _detrended(values: FloatArray) -> FloatArray:
    """Without its straight line; a constant stays one, free of the line's rounding errors."""
    if len(values) < 3 or values.min() == values.max():
        return values
    order = np.arange(len(values))
    return np.asarray(values - np.polyval(np.polyfit(order, values, 1), order))


def trend(values: FloatArray, edges: list[int]) -> Trend:
    """The trend of the block medians of a series (Mann–Kendall with ties, Kendall 1975)."""
    medians = np.array([np.median(values[begin:end]) for begin, end in itertools.pairwise(edges)])
    return _trend_of(medians)


def _trend_of(values: FloatArray) -> Trend:
    later, earlier = np.tril_indices(len(values), -1)
    score = float(np.sign(values[later] - values[earlier]).sum())
    return Trend(_change(values), _mann_kendall(score, values))


def _change(values: FloatArray) -> float:
    """From the first to the last third, as a share of the median."""
    third, centre = max(1, len(values) // 3), float(np.median(values))
    return float(np.median(values[-third:]) - np.median(values[:third])) / centre if centre > 0 else 0.0


def _drifting(series: dict[str, FloatArray], rest: bool) -> list[str]:
    """The names of those that drift, over their whole length or over their first half."""
    return [
        name for name, values in series.items() if _drifts(values, rest) or _drifts(values[: len(values) // 2], rest)
    ]


def _drifts(values: FloatArray, rest: bool) -> bool:
    return trend(values, block_edges(values)).drifts(1.0 if rest else SIGNIFICANCE)


def _with_failures_slowest(latency_s: FloatArray) -> FloatArray:
    """Failures as finite values above all others, so that medians and slopes exist."""
    slowest = np.max(latency_s, where=np.isfinite(latency_s), initial=0.0)
    return np.asarray(np.minimum(latency_s, 2.0 * slowest))


def _mann_kendall(score: float, values: FloatArray) -> float:
    n = len(values)
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18.0
    if score == 0 or variance <= 0:
        return 1.0
    return math.erfc((abs(score) - 1.0) / math.sqrt(variance) / math.sqrt(2.0))
