"""The probe's drawings: a run over time, its tail, and latency against the offered rate.

Each function returns a Figure of its own, in the style of `probe.drawing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from p99lab.probe.drawing import (
    GREY,
    MARKERS,
    PALETTE,
    STEADY,
    colour,
    legend_above,
    line,
    panels,
    scale_latency,
    single,
)
from p99lab.probe.intervals import Figure as Interval
from p99lab.probe.intervals import label
from p99lab.probe.records import Outcome, Phase, RequestRecord
from p99lab.probe.stats import QUANTILES, concurrency_at, e2e, metric_values, ttft

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from p99lab.probe.command import ProbeResult
    from p99lab.probe.sweep import SweepPoint, SweepResult

FACES = {"meets": ("o", PALETTE[0], PALETTE[0]), "cannot tell": ("o", "white", PALETTE[0])}
FACES |= {"misses": ("X", PALETTE[3], PALETTE[3]), "saturated": ("s", PALETTE[6], PALETTE[6])}
FACES |= {"void": ("v", "0.75", "0.5"), "measured": ("o", PALETTE[0], PALETTE[0])}


# --- drawings -------------------------------------------------------------------------------------------------------


def ecdf(result: ProbeResult) -> Figure:
    """The distribution of TTFT and E2E over the used requests, as the share that took longer, on a logarithmic scale:
    from P90 to P99 is as wide as from P99 to P99.9.

    The deepest quantile that n allows has its interval as a bracket, with an arrow where there is no upper bound.
    Requests that failed took longer than any: their line ends above the axis.
    """
    metrics = {name: result.summary.metrics[name] for name in ("ttft", "e2e")}
    series = {name: np.sort(values) for name, values in metric_values(result.used).items() if name in metrics}
    unit, scale = _unit(np.concatenate(list(series.values())))
    deepest = [at for at in reversed(QUANTILES) if metrics["e2e"].percentiles[at].value is not None][:1]
    with single(height=3.7) as (figure, axes):
        for number, (name, values) in enumerate(series.items()):
            longer = 1.0 - np.arange(len(values)) / max(1, len(values))  # between a value and the one before it
            failed = f", {metrics[name].num_failed} failed" if metrics[name].num_failed else ""
            said = f"{name.upper()} (n = {len(values)}{failed})"
            axes.step(scale * values, longer, where="pre", label=said, **line(number))
            for at in deepest:
                _bracket(axes, metrics[name].percentiles[at], scale, 1.0 - QUANTILES[at], number)
        for at in deepest:
            axes.plot([], [], "|-", color=GREY, lw=2.5, ms=9, label=f"95 % CI of {label(QUANTILES[at])}")
        _share_axis(axes, len(result.used))
        scale_latency(axes, scale * np.concatenate(list(series.values())), f"latency ({unit})")
        _title(axes, result)
        legend_above(figure, axes, columns=2)
    return figure


def timeline(result: ProbeResult) -> Figure:
    """A run over time: when each request started and how long it took, and below how many were in flight.

    Grey: requests that are not measured. Crosses at the top: failed ones. The steady window is shaded.
    """
    answered = [record for record in result.run.records if record.outcome is Outcome.OK]
    counted = [record for record in answered if record.phase is Phase.MEASURED]
    others = [record for record in answered if record.phase is not Phase.MEASURED]
    unit, scale = _unit([e2e(record) for record in answered])
    with panels(2, height=4.6, heights=(2, 1), sharex=True) as (figure, (upper, lower)):
        for number, (name, of) in enumerate((("E2E", e2e), ("TTFT", ttft))):
            shape: dict[str, Any] = {"marker": MARKERS[number], "s": 11, "alpha": 0.75, "lw": 0}
            upper.scatter(*_starts_and(of, scale, others), color="0.75", **shape)
            upper.scatter(*_starts_and(of, scale, counted), color=colour(number), label=name, **shape)
        if others:
            upper.scatter([], [], color="0.75", s=11, label="not measured")
        _failures(upper, result.run.records)
        upper.set(ylabel=f"latency ({unit})", ylim=(0, None))
        _in_flight(lower, result.run.records)
        said = f"start of the request, since the run began (s)\n{_shade(result, (upper, lower))}"
        lower.set(xlabel=said, xlim=(0, None))
        _title(upper, result)
        legend_above(figure, upper, columns=4)
    return figure


def rate_curve(result: SweepResult) -> Figure:
    """Latency against the offered rate: the SLO's quantile with its interval, the median, the SLO, and saturation.

    A rate with too few requests for the quantile still has its median.
    """
    points = [point for point in result.points if point.figure.value is not None]
    sound = [point for point in points if point.verdict != "void"]
    limit = [] if result.slo is None else [result.slo.limit_s]
    every = [value or math.nan for p in result.points for value in (p.median, p.figure.value, p.figure.high)] + limit
    unit, scale = _unit(every)
    room = [2.0 * (p.figure.value or math.nan) for p in points if p.figure.high is None]  # for the arrows
    with single(height=3.9) as (figure, axes):
        medians = [scale * (point.median or math.nan) for point in result.points]
        axes.plot([p.rate for p in result.points], medians, ls="--", color=colour(4), marker=".", label="P50")
        axes.plot([p.rate for p in sound], [_scaled(p.figure.value, scale) for p in sound], color=colour(0), lw=1.4)
        _points(axes, points, scale, label(QUANTILES[result.quantile]))
        for limit_s in limit:
            said = f"SLO {scale * limit_s:g} {unit}"
            axes.axhline(scale * limit_s, color=colour(3), ls=(0, (5, 2)), lw=1.3, label=said)
        _saturation(axes, result)
        axes.set(xlabel="offered rate (requests/s)", xlim=(0, 1.08 * max(point.rate for point in result.points)))
        scale_latency(axes, scale * np.array(every + room), f"{result.metric.upper()} ({unit})", axis="y")
        if not points:
            said = f"no rate has enough requests for {label(QUANTILES[result.quantile])}"
            axes.annotate(said, (0.5, 0.97), xycoords="axes fraction", ha="center", va="top")
        legend_above(figure, axes)
    return figure


# --- their parts ----------------------------------------------------------------------------------------------------


def _unit(values_s: ArrayLike) -> tuple[str, float]:
    """Milliseconds as long as they have at most four digits, else seconds: (name, how many of it a second has)."""
    finite = np.asarray(values_s, float)
    return ("s", 1.0) if np.max(finite, where=np.isfinite(finite), initial=0.0) >= 10.0 else ("ms", 1000.0)


def _title(axes: Axes, result: ProbeResult) -> None:
    """Only a result that must not be used has one."""
    if result.summary.void:
        axes.set_title("(void)", color=PALETTE[3])


def _starts_and(of: Callable[[RequestRecord], float], scale: float, records: Sequence[RequestRecord]) -> Any:
    return [record.start_s for record in records], [scale * of(record) for record in records]


def _shade(result: ProbeResult, panels: Sequence[Axes]) -> str:
    """Shade the steady window; in words what is shaded, or why nothing is."""
    window = result.summary.steady_window
    if window.verdict != "steady":
        return f"no steady window: {window.verdict}"
    for axes in panels:
        axes.axvspan(window.start_s, window.end_s, color=STEADY, alpha=0.12, lw=0)
    return "shaded: steady window"


def _failures(axes: Axes, records: Sequence[RequestRecord]) -> None:
    failed = [r.start_s for r in records if r.outcome not in (Outcome.OK, Outcome.CANCELLED)]
    if failed:
        style: dict[str, Any] = {"marker": "x", "color": PALETTE[3], "s": 26, "lw": 1.4, "clip_on": False, "zorder": 5}
        axes.scatter(failed, [1.0] * len(failed), transform=axes.get_xaxis_transform(), label="failed", **style)


def _in_flight(axes: Axes, records: Sequence[RequestRecord]) -> None:
    changes = np.unique([time for record in records for time in (record.send_s, record.end_s)])
    axes.step(changes, concurrency_at(changes, records), where="post", color=PALETTE[6], lw=1.1)
    axes.set(ylabel="in flight", ylim=(0, None))
    axes.locator_params(axis="y", integer=True)


def _bracket(axes: Axes, figure: Interval, scale: float, share: float, number: int) -> None:
    """An interval at the quantile's height, a hair apart for each line; an arrow where it has no upper end."""
    if figure.value is None or figure.low is None:
        return
    height, shade = share * (1.0 + 0.10 * (2 * number - 1)), colour(number)
    end = figure.value if figure.high is None else figure.high
    axes.plot([scale * figure.low, scale * end], [height, height], "|-", color=shade, lw=2.5, ms=9, zorder=4)
    if figure.high is None:
        axes.plot([scale * end], [height], ">", color=shade, ms=7, zorder=4)


def _share_axis(axes: Axes, n: int) -> None:
    """Shares of 100, 50, 10, 1 … %, as far down as n requests reach."""
    lowest = 0.5 / max(n, 20)
    names = {1.0: "", 0.5: " (P50)", 0.1: " (P90)", 0.01: " (P99)", 0.001: " (P99.9)", 0.0001: " (P99.99)"}
    shown = [share for share in names if share >= lowest]
    axes.set(yscale="log", ylim=(lowest, 1.15), ylabel="share of requests that took longer")
    axes.set_yticks(shown, [f"{100 * share:g} %{names[share]}" for share in shown])
    axes.set_yticks([], minor=True)


def _points(axes: Axes, points: Sequence[SweepPoint], scale: float, name: str) -> None:
    """The tail at each rate with its interval, an arrow where it has no upper end; the marker says what came of it."""
    for verdict, (marker, face, edge) in FACES.items():
        chosen = [point for point in points if (point.verdict or "measured") == verdict]
        if not chosen:
            continue
        rates, figures = [point.rate for point in chosen], [point.figure for point in chosen]
        tail, low, high = (np.array([_scaled(bound, scale) for bound in bounds]) for bounds in _bounds(figures))
        spread = np.nan_to_num([tail - low, high - tail])
        said = name if verdict == "measured" else f"{name}: {verdict}"
        style: dict[str, Any] = {"fmt": marker, "mfc": face, "mec": edge, "ecolor": edge, "ms": 8, "capsize": 4}
        axes.errorbar(rates, tail, yerr=spread, label=said, zorder=3, **style)
        for rate, value, bound in zip(rates, tail, high, strict=True):
            if math.isnan(bound):
                arrow = {"arrowstyle": "<-", "color": edge, "lw": 1.4}
                where: dict[str, Any] = {"xytext": (0, 24), "textcoords": "offset points", "arrowprops": arrow}
                axes.annotate("", (rate, value), **where)


def _bounds(figures: Sequence[Interval]) -> Iterator[list[float | None]]:
    yield from ([getattr(figure, name) for figure in figures] for name in ("value", "low", "high"))


def _saturation(axes: Axes, result: SweepResult) -> None:
    """The capacity that the closed run measured, with its interval, and the goodput."""
    capacity = result.capacity.answered
    if capacity.value is not None and capacity.low is not None and capacity.high is not None:
        void = " (void)" if result.capacity.result.summary.void else ""
        axes.axvline(capacity.value, color=GREY, lw=1.2, ls=":", label=f"capacity {capacity.value:.3g}/s{void}")
        axes.axvspan(capacity.low, capacity.high, color="0.85", lw=0, zorder=0, label="its 95 % CI")
    if result.goodput is not None and result.goodput.shown is not None:
        shown = result.goodput.shown
        axes.axvline(shown, color=STEADY, lw=1.3, ls="-.", zorder=1, label=f"goodput {shown:.3g}/s")


def _scaled(seconds: float | None, scale: float) -> float:
    return math.nan if seconds is None else scale * seconds
