"""The lab's figures, in one style: Okabe–Ito colours, with line styles, markers and hatches that survive grey print.

Each function takes plain arrays or a DataFrame and returns a Figure of its own; pyplot's global state is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from p99lab.probe.drawing import (
    MARKERS,
    PALETTE,
    STEADY,
    colour,
    hatch,
    legend_above,
    line,
    panels,
    scale_latency,
    single,
)

if TYPE_CHECKING:
    import pandas as pd


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
    with single(height=3.6) as (figure, axes):
        for number, (arm, values) in enumerate(samples.items()):
            ordered = np.sort(np.asarray(values, float))
            share = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
            axes.step(ordered, share, where="post", label=f"{arm} (n = {len(ordered)})", **line(number))
        for number, (arm, (low, high)) in enumerate((intervals or {}).items()):
            height = quantile - 0.035 * (number + 1)
            axes.plot([low, high], [height, height], "|-", color=colour(list(samples).index(arm)), lw=2.5, ms=11)
        label = f"P{quantile * 100:g}" + (", 95 % CI beneath it" if intervals else "")
        axes.axhline(quantile, color="0.45", lw=0.8, zorder=0, label=label)
        axes.set(ylabel="share of requests", ylim=(0, 1.03))
        every = np.concatenate([np.asarray(values, float) for values in samples.values()])
        scale_latency(axes, every, f"{quantity} ({unit})")
        legend_above(figure, axes, columns=2)
    return figure


def timelines(runs: Mapping[str, pd.DataFrame], quantity: str = "latency") -> Figure:
    """When each request started and how long it took, a panel with its own scale per arm; a steady window is shaded.

    `runs`: by arm, columns `start_s`, `latency_s` and `steady` (whether the request lies in the measured window).
    """
    with panels(max(1, len(runs)), height=1.0 + 1.25 * max(1, len(runs))) as (figure, below_each_other):
        if not runs:
            below_each_other[0].set_title("no arm has enough requests to show one over time", loc="left")
        for number, (axes, (arm, frame)) in enumerate(zip(below_each_other, runs.items(), strict=False)):
            steady = frame.loc[frame["steady"].astype(bool), "start_s"]
            if len(steady):
                axes.axvspan(steady.min(), steady.max(), color=STEADY, alpha=0.12, lw=0)
            style: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "color": colour(number)}
            axes.scatter(frame["start_s"], frame["latency_s"], s=12, alpha=0.75, lw=0, **style)
            axes.set_title(arm, loc="left", fontsize="medium")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.margins(y=0.15)
        shading = "; shaded: steady window" if any(frame["steady"].any() for frame in runs.values()) else ""
        below_each_other[-1].set_xlabel(f"start of the request, since its block began (s){shading}")
        figure.supylabel(f"{quantity} (s)", fontsize="medium")
    return figure


def attribution(shares: pd.DataFrame, unit: str = "s") -> Figure:
    """Where time went: one bar of 100 % per row of `shares` (in `unit`), one segment per column, the sum at its end.

    Percent, because rows may differ a hundredfold: on one axis of seconds the longest would flatten all others.
    """
    with single(height=1.5 + 0.42 * len(shares)) as (figure, axes):
        values = shares.to_numpy(float)  # [rows, parts]
        totals = values.sum(axis=1)
        left, rows = np.zeros(len(shares)), np.arange(len(shares))
        for number, (part, widths) in enumerate(zip(shares.columns, 100 * (values / totals[:, None]).T, strict=True)):
            style: dict[str, Any] = {"color": colour(number), "hatch": hatch(number)}
            axes.barh(rows, widths, left=left, height=0.62, edgecolor="white", lw=0.6, label=part, **style)
            left += widths
        for row, total in enumerate(totals):
            axes.annotate(f"{total:.3g} {unit}", (100, row), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(rows, [str(name) for name in shares.index])
        axes.invert_yaxis()
        axes.set(xlabel="share of the request's time (%)", xlim=(0, 100))
        axes.grid(axis="y", visible=False)
        legend_above(figure, axes)
    return figure


def ablation(arms: pd.DataFrame, unit: str = "s", quantity: str = "TTFT") -> Figure:
    """What each measure buys: a dot at the median, a mark at the tail with its confidence interval, a line between.

    `arms`: one row per arm, columns `arm`, `p50`, `tail`, `low`, `high` (the tail's 95 % CI; NaN draws the mark alone)
    and `tail_name` (`P99`, or `P90` where n was too small for it).
    """
    with single(height=1.3 + 0.46 * len(arms)) as (figure, axes):
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
        scale_latency(axes, arms[["p50", "tail"]].to_numpy(float), f"{quantity} ({unit})")
        legend_above(figure, axes)
    return figure


def roofline(bandwidth_gb_s: float, rates_gflop_s: Mapping[str, float], intensities: Mapping[str, float]) -> Figure:
    """Attainable arithmetic over arithmetic intensity (Williams, Waterman & Patterson, CACM 2009).

    `rates_gflop_s`: a ceiling per number format. `intensities`: FLOP per byte of workloads to mark on the axis.
    """
    with single(height=3.6) as (figure, axes):
        ridge = max(rates_gflop_s.values()) / bandwidth_gb_s
        lowest, highest = min(0.25, *intensities.values()), max(4 * ridge, *(2 * x for x in intensities.values()))
        x = np.geomspace(lowest, highest, 200)
        for number, (name, rate) in enumerate(rates_gflop_s.items()):
            axes.plot(x, np.minimum(bandwidth_gb_s * x, rate), label=f"{name}: {rate:,.0f} GFLOP/s", **line(number))
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
        legend_above(figure, axes)
    return figure


def verdicts(counts: pd.DataFrame, pale: str = "not tested") -> Figure:
    """Rows of the ledger: chapters down (the index), states across (the columns), stacked; `pale` is no verdict."""
    with single(height=1.4 + 0.4 * len(counts)) as (figure, axes):
        left = np.zeros(len(counts))
        for number, state in enumerate(counts.columns):
            width = counts[state].to_numpy(float)
            shade: dict[str, Any] = (
                {"color": "0.93"} if state == pale else {"color": colour(number), "hatch": hatch(number)}
            )
            axes.barh(np.arange(len(counts)), width, left=left, label=state, edgecolor="white", height=0.7, **shade)
            left += width
        axes.set_yticks(np.arange(len(counts)), [f"chapter {name}" for name in counts.index])
        axes.set_ylim(len(counts) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("rows of the ledger")
        legend_above(figure, axes)
    return figure
