"""The lab's figures, in one style: Okabe–Ito colours, with line styles, markers and hatches that survive grey print.

Each function takes plain arrays or a DataFrame and returns a Figure of its own; pyplot's global state is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import seaborn as sns  # type: ignore[import-untyped]
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Okabe & Ito, "Color Universal Design" (2008), without yellow, which white paper swallows.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")
WIDTH = 6.6  # inches: readable on a page, and still when a phone shrinks it


def ecdf(
    samples: Mapping[str, ArrayLike],
    unit: str = "s",
    quantity: str = "latency",
    quantile: float = 0.99,
    intervals: Mapping[str, tuple[float, float]] | None = None,
) -> Figure:
    """The share of requests at or below a latency, one line per arm.

    `samples`: values in `unit` by arm. `intervals`: the confidence interval of `quantile` by arm, drawn as a bracket
    under the quantile's line, each at its own height so that overlapping ones can be told apart.
    """
    with _axes(height=3.6) as (figure, axes):
        for number, (arm, values) in enumerate(samples.items()):
            ordered = np.sort(np.asarray(values, float))
            share = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
            axes.step(ordered, share, where="post", label=f"{arm} (n = {len(ordered)})", **_line(number))
        for number, (arm, (low, high)) in enumerate((intervals or {}).items()):
            height = quantile - 0.035 * (number + 1)
            axes.plot([low, high], [height, height], "|-", color=_colour(list(samples).index(arm)), lw=2.5, ms=11)
        label = f"P{quantile * 100:g}" + (", 95 % CI beneath it" if intervals else "")
        axes.axhline(quantile, color="0.45", lw=0.8, zorder=0, label=label)
        axes.set(ylabel="share of requests", ylim=(0, 1.03))
        every = np.concatenate([np.asarray(values, float) for values in samples.values()])
        _scale_latency(axes, every, f"{quantity} ({unit})")
        _legend_above(figure, axes, columns=2)
    return figure


def timelines(runs: Mapping[str, pd.DataFrame], quantity: str = "latency") -> Figure:
    """When each request started and how long it took, a panel with its own scale per arm; the steady window is shaded.

    `runs`: by arm, columns `start_s`, `latency_s` and `steady` (whether the request lies in the measured window).
    """
    with _panels(len(runs), height=1.0 + 1.25 * len(runs)) as (figure, panels):
        for number, (axes, (arm, frame)) in enumerate(zip(panels, runs.items(), strict=True)):
            steady = frame.loc[frame["steady"].astype(bool), "start_s"]
            if len(steady):
                axes.axvspan(steady.min(), steady.max(), color="#009E73", alpha=0.12, lw=0)
            style: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "color": _colour(number)}
            axes.scatter(frame["start_s"], frame["latency_s"], s=12, alpha=0.75, lw=0, **style)
            axes.set_title(arm, loc="left", fontsize="medium")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.margins(y=0.15)
        panels[-1].set_xlabel("start of the request, since its block began (s); shaded: steady window")
        figure.supylabel(f"{quantity} (s)", fontsize="medium")
    return figure


def attribution(shares: pd.DataFrame, unit: str = "s") -> Figure:
    """Where time went: one bar of 100 % per row of `shares` (in `unit`), one segment per column, the sum at its end.

    Percent, because rows may differ a hundredfold: on one axis of seconds the longest would flatten all others.
    """
    with _axes(height=1.5 + 0.42 * len(shares)) as (figure, axes):
        values = shares.to_numpy(float)  # [rows, parts]
        totals = values.sum(axis=1)
        left, rows = np.zeros(len(shares)), np.arange(len(shares))
        for number, (part, widths) in enumerate(zip(shares.columns, 100 * (values / totals[:, None]).T, strict=True)):
            style: dict[str, Any] = {"color": _colour(number), "hatch": HATCHES[number % len(HATCHES)]}
            axes.barh(rows, widths, left=left, height=0.62, edgecolor="white", lw=0.6, label=part, **style)
            left += widths
        for row, total in enumerate(totals):
            axes.annotate(f"{total:.3g} {unit}", (100, row), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(rows, [str(name) for name in shares.index])
        axes.invert_yaxis()
        axes.set(xlabel="share of the request's time (%)", xlim=(0, 100))
        axes.grid(axis="y", visible=False)
        _legend_above(figure, axes)
    return figure


def ablation(arms: pd.DataFrame, unit: str = "s", quantity: str = "TTFT") -> Figure:
    """What each measure buys: a dot at the median, a mark at the tail with its confidence interval, a line between.

    `arms`: one row per arm, columns `arm`, `p50`, `tail`, `low`, `high` (the tail's 95 % CI; NaN draws the mark alone)
    and `tail_name` (`P99`, or `P90` where n was too small for it).
    """
    with _axes(height=1.3 + 0.46 * len(arms)) as (figure, axes):
        rows = np.arange(len(arms))
        axes.hlines(rows, arms["p50"], arms["tail"], color="0.7", lw=2, zorder=1)
        axes.plot(arms["p50"], rows, "o", color=PALETTE[0], ms=8, label="P50")
        for number, (name, group) in enumerate(arms.assign(row=rows).groupby("tail_name", sort=False)):
            tail = group["tail"].to_numpy(float)
            spread = [tail - group["low"].to_numpy(float), group["high"].to_numpy(float) - tail]
            marker: dict[str, Any] = {"fmt": MARKERS[number + 1], "color": (PALETTE[3], PALETTE[6])[number % 2]}
            label = f"{name}, 95 % CI" if np.isfinite(spread).any() else str(name)
            axes.errorbar(tail, group["row"], xerr=np.nan_to_num(spread), capsize=4, ms=7, label=label, **marker)
        axes.set_yticks(rows, list(arms["arm"]))
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        _scale_latency(axes, arms[["p50", "tail"]].to_numpy(float), f"{quantity} ({unit})")
        _legend_above(figure, axes)
    return figure


def roofline(bandwidth_gb_s: float, rates_gflop_s: Mapping[str, float], intensities: Mapping[str, float]) -> Figure:
    """Attainable arithmetic over arithmetic intensity (Williams, Waterman & Patterson, CACM 2009).

    `rates_gflop_s`: a ceiling per number format. `intensities`: FLOP per byte of workloads to mark on the axis.
    """
    with _axes(height=3.6) as (figure, axes):
        ridge = max(rates_gflop_s.values()) / bandwidth_gb_s
        lowest, highest = min(0.25, *intensities.values()), max(4 * ridge, *(2 * x for x in intensities.values()))
        x = np.geomspace(lowest, highest, 200)
        for number, (name, rate) in enumerate(rates_gflop_s.items()):
            axes.plot(x, np.minimum(bandwidth_gb_s * x, rate), label=f"{name}: {rate:,.0f} GFLOP/s", **_line(number))
        axes.set(
            xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP per byte read)", ylabel="GFLOP/s, at most"
        )
        for name, intensity in intensities.items():
            axes.axvline(intensity, color="0.5", lw=0.9, ls=":")
            where: dict[str, Any] = {"xy": (intensity, 0), "xycoords": axes.get_xaxis_transform(), "xytext": (3, 6)}
            axes.annotate(name, **where, textcoords="offset points", rotation=90, fontsize="small", color="0.25")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,g}")
        axes.plot([], [], " ", label=f"slope: {bandwidth_gb_s:,.0f} GB/s")
        _legend_above(figure, axes)
    return figure


def verdicts(counts: pd.DataFrame, pale: str = "not tested") -> Figure:
    """Rows of the ledger: chapters down (the index), states across (the columns), stacked; `pale` is no verdict."""
    with _axes(height=1.4 + 0.4 * len(counts)) as (figure, axes):
        left = np.zeros(len(counts))
        for number, state in enumerate(counts.columns):
            width = counts[state].to_numpy(float)
            colour = {"color": "0.93"} if state == pale else {"color": _colour(number), "hatch": _hatch(number)}
            axes.barh(np.arange(len(counts)), width, left=left, label=state, edgecolor="white", height=0.7, **colour)
            left += width
        axes.set_yticks(np.arange(len(counts)), [f"chapter {name}" for name in counts.index])
        axes.set_ylim(len(counts) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("rows of the ledger")
        _legend_above(figure, axes)
    return figure


@contextmanager
def _panels(number: int, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    with mpl.rc_context(_style()):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, list(figure.subplots(number, squeeze=False)[:, 0])


@contextmanager
def _axes(height: float) -> Iterator[tuple[Figure, Axes]]:
    with mpl.rc_context(_style()):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.subplots()


def _style() -> Any:
    base = sns.axes_style("whitegrid") | sns.plotting_context("notebook", font_scale=0.95)
    return base | {
        "axes.edgecolor": "0.6",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "grid.color": "0.9",
        "hatch.linewidth": 0.7,
        "legend.frameon": False,
    }


def _scale_latency(axes: Axes, values: ArrayLike, label: str) -> None:
    """A logarithmic axis with plain numbers where arms differ by more than a factor of eight, else one from 0."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    axes.set_xlabel(label)
    if not len(finite) or finite.min() <= 0 or finite.max() / finite.min() < 8:
        axes.set_xlim(left=0)
        return
    axes.set_xscale("log")
    axes.set_xlim(finite.min() / 1.3, finite.max() * 1.3)
    axes.set_xlabel(f"{label}, logarithmic")
    ticks = [step * 10.0**power for power in range(-4, 5) for step in (1, 2, 5)]
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _hatch(number: int) -> str:
    return HATCHES[number % len(HATCHES)]


def _line(number: int) -> dict[str, Any]:
    return {"color": _colour(number), "ls": LINES[number % len(LINES)], "lw": 2.0}


def _legend_above(figure: Figure, axes: Axes, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, max(1, len(labels))))
