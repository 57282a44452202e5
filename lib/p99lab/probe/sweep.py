"""Latency against the offered rate: capacity, saturation, and goodput under an SLO.

First a closed load measures the capacity at its concurrency. Then each rate gets an open load of its own, in ascending
order: the backlog of an overloaded rate must not fall on a lighter one. Before each, priming (or a lone request where
the cache is not to be primed) is waited for, so that the target has drained. Each load has questions of its own, else
the target would find the last one's in its cache; arrivals and questions are drawn from the seed.

A rate is saturated when fewer requests are answered than arrive, outside the lag's interval, or when the number in
flight grows over the run by the steady window's test. Its latencies are those of this run's length and no other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from p99lab.errors import BadParameterError
from p99lab.probe.command import OnProgress, ProbeResult, Session, opened
from p99lab.probe.intervals import Figure, min_n
from p99lab.probe.options import ProbeOptions
from p99lab.probe.slo import Goodput, Slo, Verdict, goodput
from p99lab.probe.stats import QUANTILES, e2e
from p99lab.probe.throughput import answered_rate, lag, offered_rate
from p99lab.strict import StrictModel

AUTO = (0.3, 0.5, 0.7, 0.9, 1.1)  # of capacity: the last one shows that it is the limit
DEFAULT_REQUESTS = 800  # P99 needs 368 independent ones, and a queue makes neighbours alike
CAPACITY_S = 60.0
MAX_RATES = 100
MAX_REPETITIONS = 1_000_000
OnPoint = Callable[[str, ProbeResult], None]


class Sweep(StrictModel):
    """`rates` in requests per second, or shares of the capacity where `of_capacity`.

    `probe` says everything else: its load and rate are not used, its concurrency is the closed load's. Where it gives
    neither a duration nor a number of requests, each load measures 800.
    """

    probe: ProbeOptions
    rates: tuple[float, ...] = Field(min_length=1, max_length=MAX_RATES)
    of_capacity: bool = False
    slo: Slo | None = None

    @field_validator("rates")
    @classmethod
    def _ascend(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if min(rates) <= 0:
            raise ValueError("a rate must be above 0")
        return tuple(sorted(set(rates)))

    def capacity_options(self) -> ProbeOptions:
        """The closed load: as many requests as at each rate, but no longer than a minute unless a duration is given."""
        duration_s = CAPACITY_S if self.probe.duration_s is None else self.probe.duration_s
        return self._load(0, load="closed", duration_s=duration_s)

    def point_options(self, place: int, rate: float) -> ProbeOptions:
        """The open load of one rate."""
        return self._load(1 + place, load="open", rate=rate)

    def _load(self, place: int, **changes: Any) -> ProbeOptions:
        asked = self.probe
        unlimited = asked.duration_s is None and asked.requests is None
        requests = DEFAULT_REQUESTS if unlimited else asked.requests
        repetition = 1 + asked.repetition * (MAX_RATES + 1) + place  # questions that no other load has
        values = asked.model_dump() | {"rate": None, "requests": requests, "repetition": repetition}
        return ProbeOptions.parse(values | changes)

    def duration_s(self, rate: float) -> float:
        """How long the load of a rate sends, about."""
        options = self.point_options(0, rate)
        warmup = max(1, round((options.requests or 0) * options.warmup_share))
        counted = (options.requests + warmup) / rate if options.requests is not None else float("inf")
        return min(counted, options.duration_s or float("inf"))

    def outlook(self, rates: Iterable[float]) -> list[str]:
        """How long this will take, and which rates will have too few requests for the SLO's quantile."""
        seconds = [self.duration_s(rate) for rate in rates]
        timeout = self.probe.timeout_s
        total, most = sum(seconds), sum(seconds) + timeout * len(seconds)
        quantile = self.slo.quantile if self.slo else "p99"
        needed = min_n(QUANTILES[quantile])
        few = [
            f"{rate:.3g}"
            for rate, length in zip(rates, seconds, strict=True)
            if rate * length * (1.0 - self.probe.warmup_share) < needed
        ]
        said = f"sweep: {len(seconds)} rates, about {_minutes(total)}, at most {_minutes(most)} (a request may take "
        lines = [f"{said}{timeout:g} s)"]
        if few:
            lines.append(f"too short for {quantile} ({needed} requests) at {', '.join(few)} requests/s")
        return lines


@dataclass(frozen=True, slots=True)
class Throughput:
    """Answered and offered requests per second over the time that counts, and the lag between them."""

    answered: Figure
    offered: float | None
    lag: Figure

    @classmethod
    def of(cls, result: ProbeResult) -> Throughput:
        begin, end = _time_that_counts(result)
        records = result.run.records
        return cls(answered_rate(records, begin, end), offered_rate(records, begin, end), lag(records, begin, end))


@dataclass(frozen=True)
class SweepPoint:
    """One rate. `figure`: the SLO's quantile. `verdict`: what it says of the SLO, None without one."""

    rate: float
    result: ProbeResult
    slo: Slo | None
    figure: Figure

    @property
    def answered(self) -> Figure:
        return self.throughput.answered

    @cached_property
    def throughput(self) -> Throughput:
        return Throughput.of(self.result)

    @property
    def median(self) -> float | None:
        metric = self.slo.metric if self.slo else "e2e"
        return self.result.summary.metrics[metric].percentiles["p50"].value

    @cached_property
    def saturated(self) -> str | None:
        """Why this rate is more than the target can answer; None where nothing shows it."""
        behind, window = self.throughput.lag, self.result.summary.steady_window
        if behind.low is not None and behind.low > 0:
            return f"{self.answered.value:.3g} of {self.throughput.offered:.3g} requests/s answered"
        if window.verdict == "drifting" and window.concurrency is not None and _grows(window.concurrency):
            return f"requests in flight grew by {window.concurrency.change:.0%}"
        return None

    @property
    def verdict(self) -> Verdict | None:
        if self.result.summary.void:
            return "void"
        if self.saturated:
            return "saturated"
        return None if self.slo is None else self.slo.judge(self.result.summary.metrics)

    def as_dict(self) -> dict[str, Any]:
        summary = self.result.summary
        return {
            "rate": self.rate,
            "verdict": self.verdict,
            "saturated": self.saturated,
            "void": list(summary.void),
            "offered_per_s": self.throughput.offered,
            "answered_per_s": self.answered.as_dict(),
            "window": summary.steady_window.verdict,
            "metrics": {name: metric.as_dict() for name, metric in summary.metrics.items() if metric.n},
            "counts": summary.counts,
            "notes": list(summary.notes),
        }


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a closed load of `concurrency` clients was answered per second."""

    concurrency: int
    answered: Figure
    result: ProbeResult

    @classmethod
    def of(cls, result: ProbeResult) -> Capacity:
        return cls(result.options.concurrency, Throughput.of(result).answered, result)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The curve. Saturation lies between `sustained`, the highest rate that is not saturated and lies below every
    saturated one, and `saturated`, the lowest that is; each None where no such rate was measured."""

    sweep: Sweep
    capacity: Capacity
    points: tuple[SweepPoint, ...]

    @property
    def slo(self) -> Slo | None:
        return self.sweep.slo

    @property
    def metric(self) -> str:
        return self.slo.metric if self.slo else "e2e"

    @property
    def quantile(self) -> str:
        return self.slo.quantile if self.slo else "p99"

    @property
    def saturated(self) -> float | None:
        return min((point.rate for point in self._sound if point.saturated), default=None)

    @property
    def sustained(self) -> float | None:
        limit = float("inf") if self.saturated is None else self.saturated
        return max((point.rate for point in self._sound if point.rate < limit), default=None)

    @property
    def goodput(self) -> Goodput | None:
        """None without an SLO."""
        if self.slo is None:
            return None
        return goodput((point.rate, point.verdict) for point in self.points if point.verdict is not None)

    @property
    def _sound(self) -> list[SweepPoint]:
        return [point for point in self.points if not point.result.summary.void]

    def as_dict(self) -> dict[str, Any]:
        """The JSON of a sweep, its conclusions first."""
        good, capacity = self.goodput, self.capacity
        return {
            "goodput_per_s": None if good is None else asdict(good),
            "slo": None if self.slo is None else self.slo.model_dump(),
            "saturation_per_s": {"sustained": self.sustained, "saturated": self.saturated},
            "capacity_per_s": {"concurrency": capacity.concurrency, **capacity.answered.as_dict()},
            "target": {"name": capacity.result.target, "transport": capacity.result.transport},
            "points": [point.as_dict() for point in self.points],
            "workload_digest": capacity.result.workload_digest,
            "began_unix_s": capacity.result.run.began_unix_s,
            "options": self.sweep.model_dump(mode="json"),
        }


def parse_rates(text: str) -> tuple[tuple[float, ...], bool]:
    """`0.5,1,2`, or `25%,50%` or `auto` as shares of the capacity: (numbers, whether they are shares).

    Raises:
        BadParameterError: none of these.
    """
    if text == "auto":
        return AUTO, True
    parts = [part.strip() for part in text.split(",")]
    shares = [part.endswith("%") for part in parts]
    try:
        numbers = [float(part.removesuffix("%")) for part in parts]
    except ValueError:
        numbers = []
    if not numbers or len(set(shares)) > 1:
        raise BadParameterError(f"--sweep '{text}' is neither rates like 0.5,1,2 nor shares like 25%,50% nor auto")
    return tuple(number / 100 if shares[0] else number for number in numbers), shares[0]


def sweep(asked: Sweep, tell: Callable[[str], None], on_point: OnPoint, on_progress: OnProgress | None) -> SweepResult:
    """Run a sweep to its end, in the caller's thread. See `over`.

    Raises:
        BadParameterError: options that do not fit together or the target; a capacity of nothing.
        TargetError: the target cannot be reached.
        ModelError: the engine's model cannot be used.
    """

    async def whole() -> SweepResult:
        _ = asked.probe.workload, asked.capacity_options().load_spec, asked.point_options(0, 1.0).load_spec
        async with opened(asked.capacity_options()) as session:
            return await over(session, asked, tell, on_point, on_progress)

    return asyncio.run(whole())


async def over(
    session: Session,
    asked: Sweep,
    tell: Callable[[str], None] = lambda line: None,
    on_point: OnPoint = lambda name, result: None,
    on_progress: OnProgress | None = None,
) -> SweepResult:
    """A sweep over an open session.

    Args:
        tell: gets what will happen and how long it takes, a line at a time, before it begins.
        on_point: gets each load's name (`capacity`, `rate-2`) and result when it ends.
    """
    closed = asked.capacity_options()
    tell(f"capacity: {closed.concurrency} clients, at most {closed.duration_s:g} + {closed.timeout_s:g} s")
    if not asked.of_capacity:
        _tell_all(tell, asked.outlook(asked.rates))
    capacity = Capacity.of(await session.measure(closed, on_progress))
    on_point("capacity", capacity.result)
    rates = _rates(asked, capacity)
    if asked.of_capacity:
        _tell_all(tell, asked.outlook(rates))
    points = []
    for place, rate in enumerate(rates):
        options = asked.point_options(place, rate)
        await _drain(session, options)
        result = await session.measure(options, on_progress)
        on_point(f"rate-{rate:.12g}", result)
        points.append(_point(rate, result, asked.slo))
    return SweepResult(asked, capacity, tuple(points))


def _rates(asked: Sweep, capacity: Capacity) -> list[float]:
    """In requests per second, to three digits where they are shares of the capacity."""
    if not asked.of_capacity:
        return list(asked.rates)
    if not capacity.answered.value:
        raise BadParameterError("the closed load was not answered: there is no capacity to take shares of")
    return sorted({float(f"{share * capacity.answered.value:.3g}") for share in asked.rates})


def _point(rate: float, result: ProbeResult, slo: Slo | None) -> SweepPoint:
    metric, quantile = (slo.metric, slo.quantile) if slo else ("e2e", "p99")
    return SweepPoint(rate, result, slo, result.summary.metrics[metric].percentiles[quantile])


async def _drain(session: Session, options: ProbeOptions) -> None:
    """Wait for one request that nothing else keeps company; priming does the same."""
    if not options.primes:
        repetition = options.repetition + MAX_REPETITIONS
        lone = {"load": "closed", "rate": None, "concurrency": 1, "requests": 1, "duration_s": None, "warmup_share": 0}
        await session.measure(ProbeOptions.parse(options.model_dump() | lone | {"repetition": repetition}))


def _time_that_counts(result: ProbeResult) -> tuple[float, float]:
    """From the first to the last start of the used requests, the first median latency left out where the window was not
    found steady: until then a load of long requests is answered less often than it arrives, however light it is."""
    used, window = result.used, result.summary.steady_window
    if not used:
        return 0.0, 0.0
    begin, end = used[0].start_s, used[-1].start_s
    if window.verdict == "steady":
        return begin, end
    filled = min(record.start_s for record in result.run.records) + float(np.median([e2e(record) for record in used]))
    return max(begin, min(filled, (begin + end) / 2)), end


def _grows(trend: Any) -> bool:
    return bool(trend.change > 0 and trend.drifts())


def _tell_all(tell: Callable[[str], None], lines: Iterable[str]) -> None:
    for line in lines:
        tell(line)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
