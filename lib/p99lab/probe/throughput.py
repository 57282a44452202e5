"""How many requests per second a target answered, with an interval, and how far that lags behind what was offered.

Both by batch means: the time is cut into 20 blocks of equal length, and Student's t (19 degrees of freedom) bounds the
mean of their rates (Law & Kelton, "Simulation Modeling and Analysis"). Blocks of a queue that holds its own correlate
negatively in the lag, which makes its interval wide rather than narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from p99lab.probe.intervals import Figure, FloatArray
from p99lab.probe.records import Outcome, RequestRecord

_BLOCKS = 20
_STUDENT = 2.093  # 97.5 %, 19 degrees of freedom


def answered_rate(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> Figure:
    """Whole answers per second between two times, of any phase."""
    return _batch_mean(_per_block(_answers(records), begin_s, end_s), end_s - begin_s)


def offered_rate(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> float | None:
    """Arrivals per second that were meant between two times; known exactly."""
    seconds = end_s - begin_s
    return float(_per_block(_arrivals(records), begin_s, end_s).sum()) / seconds if seconds > 0 else None


def lag(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> Figure:
    """Arrivals less answers, per second: 0 within the interval where the target keeps up with its load."""
    offered, answered = (_per_block(times, begin_s, end_s) for times in (_arrivals(records), _answers(records)))
    return _batch_mean(offered - answered, end_s - begin_s)


def _answers(records: Sequence[RequestRecord]) -> FloatArray:
    return np.array([record.end_s for record in records if record.outcome is Outcome.OK])


def _arrivals(records: Sequence[RequestRecord]) -> FloatArray:
    return np.array([record.start_s for record in records])


def _per_block(times_s: FloatArray, begin_s: float, end_s: float) -> FloatArray:
    """Events in each block, [blocks]; one at the very beginning belongs to what was before."""
    edges = np.linspace(begin_s, end_s, _BLOCKS + 1)
    return np.diff(np.searchsorted(np.sort(times_s), edges, side="right")).astype(np.float64)


def _batch_mean(counts: FloatArray, seconds: float) -> Figure:
    """Counts per block to a rate per second."""
    n = int(abs(counts).sum())
    if seconds <= 0:
        return Figure(None, None, None, n, 0, "no time to count in")
    rates = counts * _BLOCKS / seconds
    mean, half = float(rates.mean()), _STUDENT * float(rates.std(ddof=1)) / math.sqrt(_BLOCKS)
    return Figure(mean, mean - half, mean + half, n, _BLOCKS)
