"""A service level objective on a latency quantile, and goodput: the highest rate at which it is met."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from p99lab.probe.intervals import Figure, label, min_n
from p99lab.probe.stats import QUANTILES, Distribution
from p99lab.strict import StrictModel

Verdict = Literal["meets", "misses", "cannot tell", "saturated", "void"]


class Slo(StrictModel):
    """`metric`'s `quantile` is to be at most `limit_s` seconds."""

    limit_s: float = Field(gt=0)
    metric: Literal["e2e", "ttft"] = "e2e"
    quantile: Literal["p50", "p90", "p99", "p999"] = "p99"

    def __str__(self) -> str:
        return f"{label(QUANTILES[self.quantile])} of {self.metric} ≤ {1000 * self.limit_s:g} ms"

    def judge(self, metrics: dict[str, Distribution]) -> Verdict:
        return against(metrics[self.metric].percentiles[self.quantile], QUANTILES[self.quantile], self.limit_s)


def against(figure: Figure, q: float, limit_s: float) -> Literal["meets", "misses", "cannot tell"]:
    """Meets and misses only if the whole interval lies on that side; failed requests that reach the quantile miss."""
    if figure.value is None:
        return "misses" if figure.n >= min_n(q) else "cannot tell"
    if figure.high is not None and figure.high <= limit_s:
        return "meets"
    return "misses" if figure.low is not None and figure.low > limit_s else "cannot tell"


@dataclass(frozen=True, slots=True)
class Goodput:
    """Rates in requests per second, of those below the first that misses the SLO or is saturated.

    `shown`: the highest that meets it. `possible`: the highest of all, those that cannot be told included. The two are
    equal where the sample was large enough; None where there is no such rate. `missed`: that first one.
    """

    shown: float | None
    possible: float | None
    missed: float | None = None


def goodput(points: Iterable[tuple[float, Verdict]]) -> Goodput:
    """Goodput from (rate, verdict) in any order. A void point is as good as not measured."""
    shown, possible = None, None
    for rate, verdict in sorted(points, key=lambda point: point[0]):
        if verdict == "void":
            continue
        if verdict in ("misses", "saturated"):
            return Goodput(shown, possible, rate)
        shown, possible = rate if verdict == "meets" else shown, rate
    return Goodput(shown, possible)
