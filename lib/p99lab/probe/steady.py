"""Where a run is steady: a stated test for drift of latency and of concurrency.

The series, in order of time, is cut into 8 to 20 blocks of equal count, each several autocorrelation times long where
the series allows, so that block medians are nearly independent; their trend is tested by Mann–Kendall (two-sided, 1 %),
and its size is the Theil–Sen slope over the whole series as a share of the median. A series drifts if its trend is
both significant and larger than 10 %: a long run makes any trend significant, a short one any slope large. The window
starts at the first block from which neither latency nor concurrency drifts, at most half of the run being dropped.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from p99lab.probe.intervals import FloatArray, autocorrelation_time

SIGNIFICANCE = 0.01
MATERIAL_CHANGE = 0.10
MIN_REQUESTS = 40
_MIN_BLOCKS, _MAX_BLOCKS, _LEAST_TESTED = 8, 20, 6


@dataclass(frozen=True, slots=True)
class Trend:
    """`change`: from the first to the last block, as a share of the median. `p_value`: of no trend at all."""

    change: float
    p_value: float

    @property
    def drifts(self) -> bool:
        return self.p_value < SIGNIFICANCE and abs(self.change) > MATERIAL_CHANGE


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
    edges = block_edges(latency_s)
    for dropped in range(min(len(edges) // 2, len(edges) - _LEAST_TESTED)):
        trends = [trend(series, edges[dropped:]) for series in (latency_s, concurrency)]
        if not any(found.drifts for found in trends):
            first = edges[dropped]
            return SteadyWindow("steady", None, first, n - 1, float(start_s[first]), whole[3], *trends)
    trends = [trend(series, edges) for series in (latency_s, concurrency)]
    names = [name for name, found in zip(("latency", "concurrency"), trends, strict=True) if found.drifts]
    return SteadyWindow("drifting", f"{' and '.join(names) or 'latency'} never settles", *whole, *trends)


def block_edges(values: FloatArray) -> list[int]:
    """Where blocks begin and the last one ends (blocks + 1 places); longer blocks for a correlated series.

    The correlation is that of what remains after a straight line is taken out: a drift is not to hide behind itself.
    """
    n = len(values)
    capped = np.minimum(values, np.max(values, where=np.isfinite(values), initial=0.0))
    order = np.arange(n)
    rest = capped - np.polyval(np.polyfit(order, capped, 1), order)
    num_blocks = min(_MAX_BLOCKS, max(_MIN_BLOCKS, int(n / (4.0 * autocorrelation_time(rest)))), n // 5)
    return [round(n * block / num_blocks) for block in range(num_blocks + 1)]


def trend(values: FloatArray, edges: list[int]) -> Trend:
    """The trend of the block medians of a series: Theil–Sen change and Mann–Kendall p-value (corrected for ties)."""
    medians = np.array([np.median(values[a:b]) for a, b in itertools.pairwise(edges)])
    later, earlier = np.tril_indices(len(medians), -1)
    centre = float(np.median(medians))
    with np.errstate(invalid="ignore"):
        rises = np.nan_to_num(medians[later] - medians[earlier])  # two blocks of failures are equal
    slope = float(np.median(rises / (later - earlier)))
    change = slope * (len(medians) - 1) / centre if centre > 0 and math.isfinite(centre) else 0.0
    return Trend(change, _mann_kendall(float(np.sign(rises).sum()), medians))


def _mann_kendall(score: float, values: FloatArray) -> float:
    n = len(values)
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18.0
    if score == 0 or variance <= 0:
        return 1.0
    return math.erfc((abs(score) - 1.0) / math.sqrt(variance) / math.sqrt(2.0))
