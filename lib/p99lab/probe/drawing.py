"""The style of all drawings: Okabe–Ito colours, with line styles, markers and hatches that survive grey print.

Figures are made here, without pyplot's global state. The packages that draw are imported when something is drawn: the
probe works without them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito, "Color Universal Design" (2008), without yellow, which white paper swallows.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo")
WIDTH = 6.6  # inches: readable on a page, and still when a phone shrinks it
STEADY = "#009E73"
GREY = "0.45"
TICKS = [step * 10.0**power for power in range(-4, 7) for step in (1, 2, 5)]


@contextmanager
def panels(
    number: int, height: float, heights: Sequence[float] | None = None, sharex: bool = False
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of `number` axes below each other; `height` in inches, `heights` their shares of it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_style()):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(number, squeeze=False, sharex=sharex, height_ratios=heights)
        yield figure, list(axes[:, 0])


@contextmanager
def single(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one axes; `height` in inches."""
    with panels(1, height) as (figure, axes):
        yield figure, axes[0]


def _style() -> Any:
    import seaborn as sns  # type: ignore[import-untyped]

    base = sns.axes_style("whitegrid") | sns.plotting_context("notebook", font_scale=0.95)
    return base | {
        "axes.edgecolor": "0.6",
        "axes.spines.right": False,
        "axes.spines.top": False,
        "grid.color": "0.9",
        "hatch.linewidth": 0.7,
        "legend.frameon": False,
    }


def scale_latency(axes: Axes, values: ArrayLike, name: str, axis: str = "x") -> None:
    """A logarithmic axis with plain numbers where values differ by more than a factor of eight, else one from 0."""
    finite = np.asarray(values, float)
    finite = finite[np.isfinite(finite)]
    if not len(finite) or finite.min() <= 0 or finite.max() / finite.min() < 8:
        axes.set(**{f"{axis}label": name, f"{axis}lim": (0, None)})
        return
    low, high = finite.min() / 1.3, finite.max() * 1.3
    axes.set(**{f"{axis}label": f"{name}, logarithmic", f"{axis}scale": "log", f"{axis}lim": (low, high)})
    its_axis = axes.xaxis if axis == "x" else axes.yaxis
    its_axis.set_ticks([tick for tick in TICKS if low <= tick <= high])
    its_axis.set_ticks([], minor=True)
    its_axis.set_major_formatter("{x:g}")


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def hatch(number: int) -> str:
    return HATCHES[number % len(HATCHES)]


def line(number: int) -> dict[str, Any]:
    """Colour, dashes and width of the n-th line."""
    return {"color": colour(number), "ls": LINES[number % len(LINES)], "lw": 2.0}


def legend_above(figure: Figure, axes: Axes, columns: int = 3) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(columns, max(1, len(labels))))
