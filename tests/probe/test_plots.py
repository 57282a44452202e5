"""What the drawings say, not how they look. Needs the extra `lab`."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from p99lab.probe import plots
from p99lab.probe.command import ProbeResult
from p99lab.probe.load import Run
from p99lab.probe.options import ProbeOptions
from p99lab.probe.records import Outcome, Phase
from p99lab.probe.slo import Slo
from p99lab.probe.stats import summarise
from p99lab.probe.sweep import SweepResult
from tests.probe.test_stats import record
from tests.probe.virtual_sweep import swept


def result_of(n: int = 500, num_failed: int = 0, drift: float = 0.0) -> ProbeResult:
    rng = np.random.default_rng(0)
    latencies = rng.lognormal(-1, 0.3, n) * (1.0 + drift * np.arange(n) / n)
    records = [record(i, float(latency)) for i, latency in enumerate(latencies)]
    lost = {"outcome": Outcome.ERROR, "error": "http 500", "first_token_s": None, "token_times_s": ()}
    for place in range(0, n, n // num_failed) if num_failed else ():
        records[place] = replace(records[place], **lost)
    records += [record(n + i, phase=Phase.COOLDOWN) for i in range(5)]
    options = ProbeOptions(target="in-process", requests=n)
    run = Run(tuple(records), {}, {})
    return ProbeResult(options, "tiny", "in-process", "", run, summarise(run, options.load_spec))


@pytest.fixture(scope="module")
def curve() -> SweepResult:
    return swept("1,2,5", Slo(limit_s=4.0), requests=2000)


def words(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text) if text.get_text())


def line(figure: Figure, label: str) -> tuple[list[float], list[float]]:
    found = next(line for line in figure.axes[0].get_lines() if str(line.get_label()).startswith(label))
    return list(found.get_xdata()), list(found.get_ydata())


def test_a_distribution_reaches_from_all_to_the_last_request() -> None:
    result = result_of()
    figure = plots.ecdf(result)
    latencies, longer = line(figure, "E2E (n = 500)")
    assert longer[0] == 1.0
    assert longer[-1] == pytest.approx(1 / 500)
    p99 = result.summary.metrics["e2e"].percentiles["p99"]
    assert p99.value is not None
    assert max(x for x, y in zip(latencies, longer, strict=True) if y > 0.01 + 1e-9) == pytest.approx(1000 * p99.value)
    said = words(figure)
    for word in ("TTFT (n = 500)", "95 % CI of P99", "1 % (P99)", "latency (ms)", "share of requests that took longer"):
        assert word in said


def test_the_interval_of_the_p99_is_drawn_at_its_height() -> None:
    result = result_of()
    p99 = result.summary.metrics["e2e"].percentiles["p99"]
    assert p99.low is not None
    assert p99.high is not None
    brackets = [drawn for drawn in plots.ecdf(result).axes[0].get_lines() if len(drawn.get_xdata()) == 2]
    ends = [list(drawn.get_xdata()) for drawn in brackets]
    assert [1000 * p99.low, 1000 * p99.high] in ends
    assert all(0.008 < drawn.get_ydata()[0] < 0.012 for drawn in brackets)


def test_a_short_run_shows_the_quantile_that_it_has() -> None:
    said = words(plots.ecdf(result_of(60)))
    assert "95 % CI of P90" in said
    assert "CI of P99" not in said


def test_failed_requests_end_the_distribution_above_the_axis() -> None:
    figure = plots.ecdf(result_of(num_failed=50))
    assert "E2E (n = 500, 50 failed)" in words(figure)
    latencies, longer = line(figure, "E2E")
    assert min(y for x, y in zip(latencies, longer, strict=True) if np.isfinite(x)) > 0.1


def test_a_timeline_shades_what_is_steady_and_marks_what_failed() -> None:
    result = result_of(num_failed=5)
    window = result.summary.steady_window
    assert window.verdict == "steady"
    upper, lower = plots.timeline(result).axes
    for axes in (upper, lower):
        (shade,) = axes.patches
        assert shade.get_x() == window.start_s
        assert shade.get_x() + shade.get_width() == pytest.approx(window.end_s)
    dots = {str(of.get_label()): len(of.get_offsets()) for of in upper.collections if isinstance(of, PathCollection)}
    assert (dots["E2E"], dots["TTFT"], dots["failed"]) == (495, 495, 5)
    assert upper.get_ylabel() == "latency (ms)"
    assert lower.get_xlabel() == "start of the request, since the run began (s)\nshaded: steady window"


def test_a_timeline_without_a_steady_window_shades_nothing() -> None:
    upper, lower = plots.timeline(result_of(drift=3.0)).axes
    assert not upper.patches
    assert "no steady window: drifting" in lower.get_xlabel()


def test_long_latencies_are_in_seconds() -> None:
    result = result_of()
    slow = Run(tuple(replace(r, end_s=r.end_s + 20.0) for r in result.run.records), {}, {})
    slow_result = replace(result, run=slow, summary=summarise(slow, result.options.load_spec))
    assert plots.timeline(slow_result).axes[0].get_ylabel() == "latency (s)"


def test_a_curve_shows_what_came_of_each_rate(curve: SweepResult) -> None:
    figure = plots.rate_curve(curve)
    said = words(figure)
    for word in (
        "P50",
        "P99: meets",
        "P99: saturated",
        "SLO 4 s",
        "capacity 4/s",
        "goodput 2/s",
        "E2E (s), logarithmic",
    ):
        assert word in said
    assert figure.axes[0].get_xlabel() == "offered rate (requests/s)"
    rates, medians = line(figure, "P50")
    assert rates == [1.0, 2.0, 5.0]
    assert medians == [pytest.approx(point.median) for point in curve.points]
    tails = [drawn for drawn in figure.axes[0].get_lines() if list(drawn.get_xdata()) == [1.0, 2.0, 5.0]]
    assert any(list(t.get_ydata()) == [pytest.approx(point.figure.value) for point in curve.points] for t in tails)


def test_a_curve_without_an_slo_promises_none(curve: SweepResult) -> None:
    plain = swept("1,2", requests=400)
    said = words(plots.rate_curve(plain))
    assert "SLO" not in said
    assert "goodput" not in said
    assert "P99" in said


def test_a_curve_of_too_few_requests_says_so() -> None:
    figure = plots.rate_curve(swept("1,2", requests=50))
    assert "no rate has enough requests for P99" in words(figure)
    rates, medians = line(figure, "P50")
    assert rates == [1.0, 2.0]
    assert np.all(np.isfinite(medians))
    low, high = figure.axes[0].get_ylim()
    assert all(low < median < high for median in medians)
    assert_whole(figure)


@pytest.mark.parametrize("draw", [plots.ecdf, plots.timeline])
def test_a_void_result_says_so_in_its_title(draw: Callable[[ProbeResult], Figure]) -> None:
    result = result_of()
    assert "(void)" not in words(draw(result))
    void = draw(replace(result, summary=replace(result.summary, void=("late",))))
    assert "(void)" in words(void)
    assert_whole(void)


@pytest.mark.parametrize("draw", [plots.ecdf, plots.timeline])
def test_no_text_is_clipped(draw: Callable[[ProbeResult], Figure]) -> None:
    assert_whole(draw(result_of(num_failed=50)))


def test_no_text_of_a_curve_is_clipped(curve: SweepResult) -> None:
    assert_whole(plots.rate_curve(curve))


def assert_whole(figure: Figure) -> None:
    figure.savefig(io.BytesIO())
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(drawn.x0, drawn.y0) >= 0
    assert drawn.x1 <= width
    assert drawn.y1 <= height
