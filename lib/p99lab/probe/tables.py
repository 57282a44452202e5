"""Results as text for people: rows of a table and the lines under it. Nothing here prints."""

from __future__ import annotations

from collections.abc import Sequence

from p99lab.probe.command import ProbeResult
from p99lab.probe.intervals import Figure, min_n
from p99lab.probe.merge import Merged
from p99lab.probe.output import figures
from p99lab.probe.stats import QUANTILES, Distribution
from p99lab.probe.sweep import SweepPoint, SweepResult
from p99lab.probe.workload import ClosedLoad

HEADER = ("ms", "n", *QUANTILES, "max", "std")


def rows(metrics: dict[str, Distribution], also_from_send: bool = True) -> list[list[str]]:
    """Per metric, milliseconds: its name, n, then a cell per figure with its interval; metrics without values not.

    With failures n is `9 of 40`: `max` and `std` are of the answered ones.
    """
    return [
        [name.replace("_from_send", ", sent"), _answered(metric), *(cell(*one) for one in figures(metric).items())]
        for name, metric in metrics.items()
        if metric.n and (also_from_send or not name.endswith("_from_send"))
    ]


def probe_rows(result: ProbeResult) -> list[list[str]]:
    """Figures from send are left to the other formats where they are the same (closed loads)."""
    return rows(result.summary.metrics, also_from_send=not isinstance(result.options.load_spec, ClosedLoad))


def remarks(result: ProbeResult) -> list[str]:
    """What belongs under the table: label, counts, cache, window, reasons for doubt; what voids it stands above."""
    summary = result.summary
    window, hits, flying = summary.steady_window, summary.hit_rates, summary.in_flight
    share = "not reported" if hits.cached_share is None else f"{hits.cached_share:.1%} of prompt tokens"
    mean = "–" if flying.mean is None else f"{flying.mean:.1f}"
    return [
        f"target: {result.target}, {result.transport}, clients {result.clients}{_warning(result)}",
        f"requests: {_counts(summary.counts)}",
        f"in flight: {mean} on average, {flying.most} at most, {flying.at_end} at the end (cancelled)",
        f"throughput: {_rate(summary.requests_per_s)} requests/s, {_rate(summary.output_tokens_per_s)} tokens/s",
        f"prompts: {_shortest_and_longest(result)} tokens as the target counts them{_drift(summary.prompt_drift)}",
        f"cache: declared {hits.declared}, {hits.verdict}, hits {share}",
        f"window: {window.verdict}, {window.start_s:.1f}–{window.end_s:.1f} s, {window.num_requests} requests",
        *(f"note: {note}" for note in summary.notes),
    ]


def merged_remarks(result: Merged) -> list[str]:
    """What belongs under the table of a merge; what voids it stands above."""
    target = result.target
    return [
        f"target: {target['name']}, {target['transport']}, clients {target['clients']}",
        f"requests: {_counts(result.counts)}",
        f"merged: {len(result.parts)} runs, intervals by their {'requests' if result.exact else 'histograms'}",
        *(f"note: {note}" for note in result.notes),
    ]


def sweep_header(result: SweepResult) -> list[str]:
    tail = f"{result.quantile} {result.metric} (ms)"
    return ["rate/s", "offered/s", "answered/s", "n", f"p50 {result.metric} (ms)", tail, "window", "verdict"]


def sweep_rows(result: SweepResult) -> list[list[str]]:
    """A line per rate, with the intervals under the figures."""
    return [_sweep_row(result, point) for point in result.points]


def sweep_remarks(result: SweepResult) -> list[str]:
    """What belongs under the curve's table: goodput, saturation, capacity, reasons for doubt."""
    capacity, first = result.capacity, result.capacity.result
    measured = "–" if capacity.answered.value is None else f"{capacity.answered.value:.3g}{_between(capacity.answered)}"
    return [
        f"target: {first.target}, {first.transport}, clients {first.clients}{_warning(first)}",
        *([f"SLO: {result.slo}", f"goodput: {_goodput(result)}"] if result.slo else []),
        f"saturation: {_saturation(result)}",
        f"capacity: {measured} requests/s, answered to {capacity.concurrency} clients without think time",
        *(f"{point.rate:.3g}/s saturated: {point.saturated}" for point in result.points if point.saturated),
        *(f"VOID: capacity: {reason}" for reason in first.summary.void),
        *(f"VOID: {point.rate:.3g}/s: {reason}" for point in result.points for reason in point.result.summary.void),
    ]


def void_lines(reasons: Sequence[str]) -> list[str]:
    """Why a result must not be used, to stand above it."""
    return [f"VOID: these figures must not be used: {reason}" for reason in reasons]


def cell(name: str, figure: Figure) -> str:
    """A figure over its interval, or why there is none: `n < 368`, `failed` (requests that failed reach it)."""
    if figure.value is None:
        needed = min_n(QUANTILES[name]) if name in QUANTILES else 1
        return f"n < {needed}" if figure.n < needed else "–" if name == "std" else "failed"
    bounds = interval(figure)
    return f"{ms(figure.value)}\n{bounds}" if bounds else ms(figure.value)


def interval(figure: Figure) -> str:
    """`5.1–6.2`, or `≥ 5.1` and `≤ 6.2` where only that bound is known; empty where none is. Milliseconds."""
    if figure.low is None:
        return "" if figure.high is None else f"≤ {ms(figure.high)}"
    return f"≥ {ms(figure.low)}" if figure.high is None else f"{ms(figure.low)}–{ms(figure.high)}"


def ms(seconds: float) -> str:
    """Milliseconds to three digits, whole from a second on."""
    return f"{1000 * seconds:.3g}" if seconds < 0.9995 else f"{1000 * seconds:.0f}"


def _sweep_row(result: SweepResult, point: SweepPoint) -> list[str]:
    metric = point.result.summary.metrics[result.metric]
    answered = (
        "–" if point.answered.value is None else f"{point.answered.value:.3g}\n{_between(point.answered).strip()}"
    )
    figures_of = [cell(name, metric.percentiles[name]) for name in ("p50", result.quantile)]
    window = point.result.summary.steady_window.verdict
    offered = "–" if point.throughput.offered is None else f"{point.throughput.offered:.3g}"
    return [f"{point.rate:.3g}", offered, answered, _answered(metric), *figures_of, window, point.verdict or "–"]


def _goodput(result: SweepResult) -> str:
    good, num_void = result.goodput, sum(point.verdict == "void" for point in result.points)
    if good is None or good.possible is None:
        return "no rate is shown to meet the SLO" + (f", {num_void} of {len(result.points)} are void" * bool(num_void))
    if good.shown == good.possible:
        return f"{good.shown:.3g}/s meets the SLO, and no lower rate misses it"
    sure = "no rate is shown to meet it" if good.shown is None else f"at least {good.shown:.3g}/s"
    return (
        f"{sure}; up to {good.possible:.3g}/s cannot be told: intervals straddle the SLO, more --requests narrow them"
    )


def _saturation(result: SweepResult) -> str:
    sustained, saturated = result.sustained, result.saturated
    if saturated is None:
        return "not reached" if sustained is None else f"not reached: above {sustained:.3g} requests/s"
    return (
        f"below {saturated:.3g} requests/s"
        if sustained is None
        else f"between {sustained:.3g} and {saturated:.3g} requests/s"
    )


def _between(figure: Figure) -> str:
    return "" if figure.low is None or figure.high is None else f" [{max(0.0, figure.low):.3g}, {figure.high:.3g}]"


def _warning(result: ProbeResult) -> str:
    return " (for exploring: not to be compared with http)" if result.transport == "in-process" else ""


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _answered(metric: Distribution) -> str:
    return f"{metric.n - metric.num_failed} of {metric.n}" if metric.num_failed else str(metric.n)


def _rate(per_s: float | None) -> str:
    return "–" if per_s is None else f"{per_s:.3g}"


def _drift(drift: float | None) -> str:
    return "" if drift is None else f", {drift:.3f} of what was sent"


def _shortest_and_longest(result: ProbeResult) -> str:
    return "–".join(str(bound) for bound in dict.fromkeys(result.prompt_tokens.values()))
