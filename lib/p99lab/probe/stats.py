"""From records to figures: latency metrics with intervals, lateness, steady window, attribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from p99lab.probe.hits import HitRates
from p99lab.probe.intervals import Figure, FloatArray, effective_size, min_n, order_statistics, percentile, spread
from p99lab.probe.load import Run
from p99lab.probe.records import Outcome, Phase, RequestRecord
from p99lab.probe.steady import SteadyWindow, steady_cycles, steady_window
from p99lab.probe.workload import ClosedLoad, Load, OpenLoad

LATENESS_LIMIT_S = 0.005
LATENESS_SHARE = 0.01
MATERIAL_DRIFT = 0.01
FAILED_VOID, FAILED_NOTE = 0.5, 0.01  # of the measured requests: void above, a note from
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
METRICS = ("ttft", "itl", "tpot", "e2e", "queue_time", "ttft_from_send", "e2e_from_send")
SHARES = ("lateness", "queue", "prefill", "decode", "stalled", "scheduling", "client")


# --- metrics of requests --------------------------------------------------------------------------------------------


def ttft(record: RequestRecord) -> float:
    """Start of the clock to the first token, infinite where none came or the answer is not whole."""
    if record.first_token_s is None or record.outcome is not Outcome.OK:
        return math.inf
    return record.first_token_s - record.start_s


def e2e(record: RequestRecord) -> float:
    """Start of the clock to the end, infinite where the answer is not whole."""
    return record.end_s - record.start_s if record.outcome is Outcome.OK else math.inf


def tpot(record: RequestRecord) -> float | None:
    """(e2e − ttft) / (n − 1); None for answers of one token."""
    if record.outcome is not Outcome.OK:
        return math.inf
    return (e2e(record) - ttft(record)) / (record.num_output_tokens - 1) if record.num_output_tokens > 1 else None


def queue_time(record: RequestRecord) -> float | None:
    """Start of the clock to admission as the engine accounts it, the client's lateness included; None without one."""
    return None if record.queue_s is None else record.queue_s + record.send_s - record.start_s


def gaps(records: Iterable[RequestRecord]) -> FloatArray:
    """All gaps between two tokens (itl) of all records, in order of their ends, [gaps]."""
    series = [np.asarray(record.token_times_s) for record in records if len(record.token_times_s) > 1]
    if not series:
        return np.empty(0)
    ends = np.concatenate([times[1:] for times in series])
    return np.asarray(np.concatenate([np.diff(times) for times in series])[np.argsort(ends, kind="stable")])


def concurrency_at(times_s: FloatArray, records: Sequence[RequestRecord]) -> FloatArray:
    """Requests in flight at each time, all phases, [times]; one that is sent at that very time counts."""
    sent = np.sort([record.send_s for record in records])
    ended = np.sort([record.end_s for record in records])
    return np.asarray(
        np.searchsorted(sent, times_s, side="right") - np.searchsorted(ended, times_s, side="right"), np.float64
    )


def metric_values(records: Sequence[RequestRecord]) -> dict[str, FloatArray]:
    """Each metric's series in order of time, seconds; infinite for failures."""
    queued = [value for record in records if (value := queue_time(record)) is not None]
    per_token = [value for record in records if (value := tpot(record)) is not None]
    lateness = np.array([record.send_s - record.start_s for record in records])
    first, whole = np.array([ttft(record) for record in records]), np.array([e2e(record) for record in records])
    return {
        "ttft": first,
        "itl": gaps(records),
        "tpot": np.array(per_token),
        "e2e": whole,
        "queue_time": np.array(queued),
        "ttft_from_send": first - lateness,
        "e2e_from_send": whole - lateness,
    }


@dataclass(frozen=True, slots=True)
class Distribution:
    """One metric, seconds. `percentiles` by name (p50, p90, p99, p999); `std` is its jitter."""

    n: int
    effective_n: int
    num_failed: int
    mean_s: float | None
    max_s: float | None
    std: Figure
    percentiles: dict[str, Figure]
    reason: str | None = None

    @classmethod
    def of(cls, values: FloatArray, why_empty: str | None = None) -> Distribution:
        """From a series in order of time; infinite values are failures."""
        answered = values[np.isfinite(values)]
        effective = effective_size(values)
        return cls(
            n=len(values),
            effective_n=effective,
            num_failed=len(values) - len(answered),
            mean_s=float(answered.mean()) if len(answered) else None,
            max_s=float(answered.max()) if len(answered) else None,
            std=spread(values),
            percentiles={name: percentile(values, q, effective_size(values, q)) for name, q in QUANTILES.items()},
            reason=None if len(values) else why_empty or "no such measurement",
        )

    @property
    def deepest_tail(self) -> tuple[str, Figure]:
        """P99 where n allows it, else P90, else the maximum, which has no interval."""
        for name in ("P99", "P90"):
            figure = self.percentiles[name.lower()]
            if figure.value is not None:
                return name, figure
        return "max", Figure(self.max_s, None, None, self.n, self.effective_n)

    def as_dict(self) -> dict[str, Any]:
        figures = {name: figure.as_dict() for name, figure in self.percentiles.items()}
        plain = {"n": self.n, "effective_n": self.effective_n, "num_failed": self.num_failed, "reason": self.reason}
        ends = {"max": self.max_s, "mean": self.mean_s, "std": self.std.as_dict()}
        return {"unit": "s", **plain, **figures, **ends}


# --- checks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late the client itself sent (open loads). Void when its P99 exceeds either limit: 5 ms, or 1 % of the
    median TTFT, whichever is smaller.

    Where n is too small for a P99, the lower bound of its interval stands for it: a single late request among forty
    does not show that one in a hundred is late, three do.
    """

    distribution: Distribution
    p99_at_least_s: float | None
    limit_s: float | None

    @property
    def exceeded(self) -> bool:
        return self.p99_at_least_s is not None and self.limit_s is not None and self.p99_at_least_s > self.limit_s

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Lateness:
        late = np.array([record.send_s - record.intended_s for record in records if record.intended_s is not None])
        distribution = Distribution.of(late, "a closed load intends no arrivals")
        if not len(late):
            return cls(distribution, None, None)
        answered = [value for record in records if math.isfinite(value := ttft(record))]
        limit = min(LATENESS_LIMIT_S, LATENESS_SHARE * float(np.median(answered))) if answered else LATENESS_LIMIT_S
        n = len(late)
        rank = math.ceil(0.99 * n) if n >= min_n(0.99) else order_statistics(n, 0.99)[0]
        return cls(distribution, float(np.sort(late)[rank - 1]) if rank else None, limit)

    def as_dict(self) -> dict[str, Any]:
        rule = {"p99_at_least": self.p99_at_least_s, "limit": self.limit_s, "exceeded": self.exceeded}
        return {**self.distribution.as_dict(), **rule}


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests sent and not ended: over the time of the used requests, and those cancelled at the run's end."""

    mean: float | None
    most: int
    at_end: int

    @classmethod
    def of(cls, records: Sequence[RequestRecord], used: Sequence[RequestRecord]) -> InFlight:
        at_end = sum(record.outcome is Outcome.CANCELLED for record in records)
        if not used:
            return cls(None, 0, at_end)
        begin, end = min(r.send_s for r in used), max(r.end_s for r in used)
        overlaps = [max(0.0, min(r.end_s, end) - max(r.send_s, begin)) for r in records]
        sends = np.array([r.send_s for r in records if begin <= r.send_s <= end])
        most = int(concurrency_at(sends, records).max())
        return cls(sum(overlaps) / (end - begin) if end > begin else None, most, at_end)


# --- where the time went --------------------------------------------------------------------------------------------


def attribution(record: RequestRecord) -> dict[str, float] | None:
    """A request's e2e time in shares that sum to it, seconds; None where the target keeps no account.

    `lateness` before the client sent it · `queue`, `prefill`, `decode`, `stalled`, `scheduling` as the engine booked
    them · `client` the rest: transport, and the client's own work.
    """
    if record.queue_s is None or record.outcome is not Outcome.OK:
        return None
    engine = {name: float(getattr(record, f"{name}_s") or 0.0) for name in SHARES[1:-1]}
    rest = record.end_s - record.send_s - sum(engine.values())
    return {"lateness": record.send_s - record.start_s, **engine, "client": rest}


def attributions(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """The attribution of the slowest request, of the P99 one (from n ≥ 100: below, it is the slowest), and the mean."""
    known = sorted((r for r in records if attribution(r) is not None), key=e2e)
    if not known:
        return {}
    at_p99 = known[math.ceil(0.99 * len(known)) - 1]
    shares = [attribution(record) or {} for record in known]
    mean = {name: float(np.mean([share[name] for share in shares])) for name in SHARES}
    one = {
        name: {"index": r.index, "e2e_s": e2e(r), "shares_s": attribution(r)}
        for name, r in (("slowest", known[-1]), ("p99", at_p99))
    }
    return {**one, "mean": {"index": None, "e2e_s": float(np.mean([e2e(r) for r in known])), "shares_s": mean}}


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. Metrics cover the measured requests of the steady window (all of them where there is none).

    `prompt_drift`: prompt tokens as the target counted them, per token as we did; None where we could not count.
    `void`: reasons for which its figures must not be used. `notes`: what a reader should know.
    `doubts`: those of them by which the target answered something else than was asked.
    """

    metrics: dict[str, Distribution]
    counts: dict[str, int]
    lateness: Lateness
    hit_rates: HitRates
    steady_window: SteadyWindow
    attribution: dict[str, dict[str, Any]]
    in_flight: InFlight
    prompt_drift: float | None
    requests_per_s: float | None
    output_tokens_per_s: float | None
    void: tuple[str, ...]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, what a reader needs first at the beginning, metrics at the top level by name."""
        return {
            "void": list(self.void),
            "notes": list(self.notes),
            "counts": self.counts,
            "in_flight": asdict(self.in_flight),
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            **{name: metric.as_dict() for name, metric in self.metrics.items()},
            "steady_window": self.steady_window.as_dict(),
            "hit_rates": asdict(self.hit_rates),
            "prompt_drift": self.prompt_drift,
            "lateness": self.lateness.as_dict(),
            "attribution": self.attribution,
        }


def measured(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that count, in order of their starts; those that we cancelled do not."""
    counted = (r for r in records if r.phase is Phase.MEASURED and r.outcome is not Outcome.CANCELLED)
    return sorted(counted, key=lambda record: (record.start_s, record.index))


def find_steady_window(records: Sequence[RequestRecord], load: Load) -> SteadyWindow:
    """The steady part of a run's measured requests, by e2e latency and by concurrency at their sends."""
    counted = measured(records)
    sends = np.array([record.send_s for record in counted])
    starts, latency = np.array([r.start_s for r in counted]), np.array([e2e(r) for r in counted])
    series = (starts, latency, concurrency_at(sends, records))
    if isinstance(load, OpenLoad) and load.cold_every_s is not None:
        return steady_cycles(*series, load.cold_every_s, load.duration_s)
    return steady_window(*series)


def summarise(run: Run, load: Load) -> Summary:
    """All figures of a run."""
    counted = measured(run.records)
    window = find_steady_window(run.records, load)
    used = counted[window.first : window.last + 1]
    lateness = Lateness.of(used)
    hits = HitRates.of(used, run, load.cache)
    seconds = max((r.end_s for r in used), default=0.0) - min((r.start_s for r in used), default=0.0)
    answered = _answered_within(run.records, used)
    num_tokens = sum(record.num_output_tokens for record in answered)
    metrics = {name: Distribution.of(values, _why_empty(name)) for name, values in metric_values(used).items()}
    doubts = tuple(_doubts(used, hits))
    return Summary(
        metrics=metrics,
        counts=_counts(run.records, used),
        lateness=lateness,
        hit_rates=hits,
        steady_window=window,
        attribution=attributions(used),
        in_flight=InFlight.of(run.records, used),
        prompt_drift=prompt_drift(used),
        requests_per_s=len(answered) / seconds if seconds > 0 else None,
        output_tokens_per_s=num_tokens / seconds if seconds > 0 else None,
        void=tuple(_void(counted, load, lateness, hits)),
        notes=(*_failure_note(counted, load), *_notes(load, window, metrics), *doubts),
        doubts=doubts,
    )


def prompt_drift(records: Iterable[RequestRecord]) -> float | None:
    """Prompt tokens as the target counted them over those that we sent; None where either is not known."""
    both = [(r.num_prompt_tokens, r.num_prompt_tokens_sent) for r in records if r.outcome is Outcome.OK]
    pairs = [(counted, sent) for counted, sent in both if sent]
    return sum(counted for counted, _ in pairs) / sum(sent for _, sent in pairs) if pairs else None


def _why_empty(metric: str) -> str | None:
    return "the target does not report it" if metric == "queue_time" else None


def _answered_within(run: Sequence[RequestRecord], used: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Answers of any phase that ended while the used ones were under way."""
    if not used:
        return []
    begin, end = min(record.start_s for record in used), max(record.end_s for record in used)
    return [record for record in run if record.outcome is Outcome.OK and begin <= record.end_s <= end]


def _counts(records: Sequence[RequestRecord], used: Sequence[RequestRecord]) -> dict[str, int]:
    """Requests by phase (those we cancelled apart), those the figures use, and their outcomes (errors by kind)."""
    phases = Counter(str(record.phase) for record in records if record.outcome is not Outcome.CANCELLED)
    cancelled = sum(record.outcome is Outcome.CANCELLED for record in records)
    kinds = Counter(f"{r.outcome}: {r.error}" if r.error else str(r.outcome) for r in used)
    return {"sent": len(records), **dict(phases), "cancelled": cancelled, "used": len(used), **dict(kinds)}


def _void(counted: Sequence[RequestRecord], load: Load, lateness: Lateness, hits: HitRates) -> Iterable[str]:
    if not any(record.outcome is Outcome.OK for record in counted):
        yield "no measured request was answered" + (f": {_kinds(counted)}" if counted else "")
    elif _most_failed(counted, load):
        yield _failures(counted)
    if lateness.exceeded:
        yield f"the client was late: P99 at least {_ms(lateness.p99_at_least_s)}, allowed {_ms(lateness.limit_s)}"
    if hits.verdict == "contaminated" and hits.reason is not None:
        yield hits.reason


def _most_failed(counted: Sequence[RequestRecord], load: Load) -> bool:
    """More than half. A timeout under arrivals that do not wait is a latency above the limit: overload, no fault."""
    latencies = {Outcome.OK} if isinstance(load, ClosedLoad) else {Outcome.OK, Outcome.TIMEOUT}
    return sum(record.outcome not in latencies for record in counted) > FAILED_VOID * len(counted)


def _failure_note(counted: Sequence[RequestRecord], load: Load) -> Iterable[str]:
    """Nothing where the failures void the result: they are its reason then."""
    num_failed = sum(record.outcome is not Outcome.OK for record in counted)
    voided = num_failed == len(counted) or _most_failed(counted, load)
    if num_failed and not voided and num_failed >= FAILED_NOTE * len(counted):
        yield _failures(counted)


def _failures(counted: Sequence[RequestRecord]) -> str:
    num_failed = sum(record.outcome is not Outcome.OK for record in counted)
    return f"{num_failed / len(counted):.0%} of the measured requests failed: {_kinds(counted)}"


def _kinds(records: Iterable[RequestRecord], most: int = 3) -> str:
    """Failures by kind, the most frequent first."""
    kinds = Counter(r.error or str(r.outcome) for r in records if r.outcome is not Outcome.OK)
    said = [f"{kind} {count}" for kind, count in kinds.most_common(most)]
    return ", ".join([*said, *(["…"] if len(kinds) > most else [])])


def _notes(load: Load, window: SteadyWindow, metrics: dict[str, Distribution]) -> Iterable[str]:
    if isinstance(load, ClosedLoad):
        yield "closed load: timed from send; it measures capacity, not a tail under a given demand"
    if window.verdict != "steady":
        yield f"no steady window ({window.verdict}: {window.reason}): the figures cover all measured requests"
    yield from correlation_note(metrics["e2e"])


def _doubts(used: Sequence[RequestRecord], hits: HitRates) -> Iterable[str]:
    if hits.verdict == "unknown" and hits.reason is not None:
        yield f"cache state not checked: {hits.reason}"
    if (drift := prompt_drift(used)) is not None and abs(drift - 1.0) > MATERIAL_DRIFT:
        yield f"tokenizers differ: the target counted {drift:.3f} prompt tokens for each that was sent"
    answered = [record for record in used if record.outcome is Outcome.OK]
    if short := sum(record.num_output_tokens < record.max_tokens for record in answered):
        yield f"{short} of {len(answered)} answers are shorter than asked for"
    if bundled := sum(len(record.token_times_s) < record.num_output_tokens for record in answered):
        yield f"{bundled} of {len(answered)} answers came with several tokens in a chunk: itl is the gap between chunks"


def correlation_note(metric: Distribution) -> Iterable[str]:
    """What its deepest tail is worth; the bulk may be worth less."""
    name, tail = metric.deepest_tail
    if tail.effective_n < metric.n:
        yield f"correlated requests: for {name} {metric.n} are worth {tail.effective_n} independent ones"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.2f} ms"
