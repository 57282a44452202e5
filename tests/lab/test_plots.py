from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from p99lab.lab import plots

RANDOM = np.random.default_rng(0)
ARMS = {name: RANDOM.lognormal(size=400) for name in ("stock", "+chunked", "+shared-prefix groups")}


def ecdf() -> Figure:
    return plots.ecdf(ARMS, intervals={"stock": (5.0, 9.0), "+chunked": (5.5, 8.0)}, quantity="TTFT")


def timelines() -> Figure:
    starts = np.arange(400)
    steady = (starts > 50) & (starts < 350)
    runs = {arm: pd.DataFrame({"start_s": starts, "latency_s": ARMS[arm], "steady": steady}) for arm in ARMS}
    return plots.timelines(runs, quantity="TTFT")


def attribution() -> Figure:
    parts = ("queue", "prefill", "decode", "stalled", "scheduling")
    return plots.attribution(pd.DataFrame(RANDOM.random((3, 5)), index=list(ARMS), columns=list(parts)))


def ablation() -> Figure:
    rows = [("no cache", 9.0, 9.5, np.nan, np.nan, "P90"), ("stock", 2.0, 4.8, 4.0, 5.5, "P99")]
    return plots.ablation(pd.DataFrame(rows, columns=["arm", "p50", "tail", "low", "high", "tail_name"]))


def roofline() -> Figure:
    return plots.roofline(30.0, {"fp32": 101.0, "bf16": 221.0}, {"decode": 1, "prefill": 512})


FIGURES = [ecdf, timelines, attribution, ablation, roofline]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


@pytest.mark.parametrize("draw", FIGURES)
def test_axes_are_labelled_with_units(draw: Callable[[], Figure]) -> None:
    axes = draw().axes[-1]
    assert "(" in axes.get_xlabel()
    assert axes.get_ylabel() or len(axes.get_yticklabels()) > 1


@pytest.mark.parametrize("draw", FIGURES)
def test_no_text_is_clipped(draw: Callable[[], Figure]) -> None:
    figure = draw()
    figure.savefig(io.BytesIO())
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn.x0 >= 0
    assert drawn.y0 >= 0
    assert drawn.x1 <= width
    assert drawn.y1 <= height


def test_arms_differ_in_grey_print_too() -> None:
    lines = [line for line in ecdf().axes[0].get_lines() if line.get_label() and "n = 400" in str(line.get_label())]
    assert len({line.get_linestyle() for line in lines}) == 3
    hatches = {bar.get_hatch() for bar in attribution().axes[0].patches}
    assert len(hatches) == 5


def test_an_attribution_shows_shares_of_each_row_and_its_sum() -> None:
    rows = pd.DataFrame({"queue": [15.0, 0.1], "decode": [5.0, 0.3]}, index=["no cache", "stock"])
    figure = plots.attribution(rows)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([75.0, 25.0, 25.0, 75.0])
    assert {"20 s", "0.4 s"} <= set(words(figure))


def test_an_ecdf_ends_at_one_and_says_n() -> None:
    figure = plots.ecdf({"a": [3.0, 1.0, 2.0]})
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [1.0, 2.0, 3.0]
    assert line.get_ydata()[-1] == 1.0
    assert "a (n = 3)" in words(figure)


def test_a_tail_without_an_interval_claims_none() -> None:
    labels = words(ablation())
    assert "P90" in labels
    assert "P99, 95 % CI" in labels


def test_each_arm_has_its_panel_and_the_steady_window_is_shaded_where_there_is_one() -> None:
    figure = timelines()
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(ARMS)
    assert all(len(axes.patches) == 1 for axes in figure.axes)
    unsteady = pd.DataFrame({"start_s": [1.0], "latency_s": [2.0], "steady": [False]})
    bare = plots.timelines({"a": unsteady}).axes[0]
    assert not bare.patches
    assert "shaded" in figure.axes[-1].get_xlabel()
    assert "shaded" not in bare.get_xlabel()


def test_the_style_does_not_leak() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    ecdf()
    assert dict(mpl.rcParams) == before
