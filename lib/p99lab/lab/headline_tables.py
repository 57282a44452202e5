"""Notebook 01's tables and series: views of a `Headline`, nothing is measured or decided here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pandas as pd

from p99lab.lab.headline import Block, Cell, Headline
from p99lab.lab.headline_arms import ARMS, Arm, here, long_arms, why_not
from p99lab.lab.headline_loads import Planned, all_loads, plan
from p99lab.lab.parameters import Headline01
from p99lab.lab.results import bounded, shown
from p99lab.lab.vllm_server import spec_of
from p99lab.probe import ratios as ratios_of
from p99lab.probe import stats
from p99lab.probe.intervals import Figure, FloatArray, min_n
from p99lab.probe.slo import against
from p99lab.probe.stats import Distribution, e2e, measured, metric_values

A_HANDFUL = 5  # requests
RATIO_COLUMNS = ("arm", "against", "E2E", "times shorter", "low", "high", "shown")


def summary(headline: Headline) -> pd.DataFrame:
    """One short row per arm and load: throughput, median, the deepest tail that n allows, jitter; noted for open loads,
    which have a demand to meet: whether the P99 meets the SLO."""
    return pd.DataFrame([_summary_row(cell, headline) for cell in headline.all_cells()])


def percentiles(headline: Headline) -> pd.DataFrame:
    """One row per arm, load and metric, seconds: every percentile with its interval, as numbers."""
    found = ((cell, name, metric) for cell in headline.all_cells() for name, metric in cell.metrics.items())
    return pd.DataFrame([_percentile_row(cell, name, metric) for cell, name, metric in found if metric.n])


def ratios(headline: Headline) -> pd.DataFrame:
    """How many times shorter each arm's latency is than that of the arm before, and the last arm's than a peer's,
    under the closed load.

    `shown`: whether the interval of the ratio leaves 1 out.
    """
    cells = headline.cells("closed")
    own = [cell for cell in cells if not cell.arm.is_peer]
    pairs = [*pairwise(own), *((cell, own[-1]) for cell in cells if cell.arm.is_peer and own)]
    rows = [_ratio_row(before, after, name) for before, after in pairs for name in ("p50", "p90", "p99", "std")]
    return pd.DataFrame([row for row in rows if row], columns=RATIO_COLUMNS)


def ablation(headline: Headline) -> pd.DataFrame:
    """The closed load's E2E per arm, as `plots.ablation` takes it."""
    return pd.DataFrame([_ablation_row(cell) for cell in headline.cells("closed")])


def attribution(headline: Headline, load: str = "closed") -> pd.DataFrame:
    """Where the time of the slowest request and of the mean one went, by arm; seconds, columns are shares."""
    rows: dict[str, dict[str, float]] = {}
    for cell in headline.cells(load):
        found = stats.attributions(cell.used)
        rows |= {f"{_name(cell)}: {what}": found[what]["shares_s"] for what in ("slowest", "mean") if found}
    return pd.DataFrame.from_dict(rows, orient="index", columns=list(stats.SHARES))


def arms(parameters: Headline01) -> pd.DataFrame:
    """Every arm: what it adds, and whether this run measures it; of a peer its release and what it was told."""
    rows = [{"arm": arm.name, "adds": arm.adds, "here": here(arm, parameters)} for arm in ARMS]
    spec = spec_of(parameters.vllm_site, parameters.vllm_model, parameters.vllm_arguments)
    for row, arm in zip(rows, ARMS, strict=True):
        if arm.is_peer and spec is not None and row["here"] == "measured":
            row["here"] = f"measured: {spec.version}, {' '.join(spec.arguments)}"
    return pd.DataFrame(rows)


def coverage(headline: Headline) -> pd.DataFrame:
    """Requests used of each arm under each load; where none were, why."""
    loads = [load.name for load in all_loads(headline.parameters)]
    return pd.DataFrame([{"arm": arm.name, **{load: _covered(headline, arm, load) for load in loads}} for arm in ARMS])


def _covered(headline: Headline, arm: Arm, load: str) -> str:
    if (cell := headline.cell(arm.name, load)) is not None:
        return f"{shown(len(cell.used))}{' (void)' if cell.void else ''}"
    reasons = (why_not(arm, headline.parameters), headline.left_out.get(arm.name))
    return next((why for why in (*reasons, headline.left_out.get(f"{arm.name}: {load}")) if why), "not run")


def hit_rates(headline: Headline) -> pd.DataFrame:
    """What each block's cache was declared to be, and was; how its steps ran. One tier so far: the device's pages."""
    return pd.DataFrame([_hit_row(block) for block in headline.blocks])


def windows(headline: Headline) -> pd.DataFrame:
    """The steady window of each block, and why where there is none; how late the client of an open load was."""
    return pd.DataFrame([_window_row(block) for block in headline.blocks])


def latencies(headline: Headline, load: str = "closed") -> dict[str, FloatArray]:
    """E2E of the used requests by arm, seconds, in order of time."""
    return {_name(cell): metric_values(cell.used)["e2e"] for cell in headline.cells(load)}


def p99_intervals(headline: Headline, load: str = "closed") -> dict[str, tuple[float, float]]:
    """P99's confidence interval by arm, where n is large enough."""
    found = {_name(cell): cell.metrics["e2e"].percentiles["p99"] for cell in headline.cells(load)}
    return {arm: (p99.low, p99.high) for arm, p99 in found.items() if p99.low is not None and p99.high is not None}


def timelines(headline: Headline, load: str = "closed") -> dict[str, pd.DataFrame]:
    """Per arm its longest block's measured requests: `start_s`, `latency_s`, `steady` (in a window found steady).

    Arms of a handful of requests are left out: they show nothing over time.
    """
    frames = {}
    for cell in headline.cells(load):
        block = max(cell.blocks, key=lambda block: len(block.used))
        is_steady = block.summary.steady_window.verdict == "steady"
        steady = {record.index for record in block.used} if is_steady else set()
        rows = [(r.start_s, e2e(r), r.index in steady) for r in measured(block.run.records)]
        if len(rows) > A_HANDFUL:
            frames[_name(cell)] = pd.DataFrame(rows, columns=["start_s", "latency_s", "steady"])
    return frames


def ratio(before: Figure, after: Figure) -> tuple[float, float | None, float | None] | None:
    """How many times shorter `after` is, and its 95 % bounds (`probe.ratios`); None without values."""
    times = ratios_of.ratio(before, after)
    return None if times is None else (times, *ratios_of.bounds(before, after))


def _name(cell: Cell) -> str:
    """The arm's, as figures show it."""
    return f"{cell.arm.name} (void)" if cell.void else cell.arm.name


def _summary_row(cell: Cell, headline: Headline) -> dict[str, Any]:
    latency = cell.metrics["e2e"]
    name, figure = latency.deepest_tail
    return {
        "arm": cell.arm.name,
        "load": cell.load,
        "n": latency.n,
        "offered/s": cell.blocks[0].rate,
        "requests/s": cell.requests_per_s,
        "E2E P50 (s)": latency.percentiles["p50"].value,
        "E2E tail (s)": f"{name} {bounded(figure.value, figure.low, figure.high)}",
        "jitter (s)": latency.std.value,
        "note": "; ".join(_remarks(cell, latency, headline)),
    }


def _ratio_row(before: Cell, after: Cell, name: str) -> dict[str, Any]:
    quotient = ratio(*(figure_of(cell.metrics["e2e"], name) for cell in (before, after)))
    if quotient is None:
        return {}
    times, low, high = quotient
    known = low is not None and high is not None
    return {
        "arm": _name(after),
        "against": _name(before),
        "E2E": name.replace("p", "P"),
        "times shorter": times,
        "low": low,
        "high": high,
        "shown": "no interval" if not known else "yes" if (low or 0) > 1 or (high or 0) < 1 else "no",
    }


def figure_of(latency: Distribution, name: str) -> Figure:
    return latency.std if name == "std" else latency.percentiles[name]


def _meets(slo_s: float, p99: Figure) -> str:
    """Met and missed only if the whole interval is on that side."""
    if p99.value is None:
        return "missed, requests failed" if p99.n >= min_n(0.99) else "cannot tell, n too small"
    said = against(p99, 0.99, slo_s)
    return {"meets": "met", "misses": "missed"}.get(said, said)


def _percentile_row(cell: Cell, name: str, metric: Distribution) -> dict[str, Any]:
    row: dict[str, Any] = {"arm": cell.arm.name, "load": cell.load, "metric": name}
    row |= {"void": bool(cell.void), "n": metric.n}
    row["effective n"] = metric.effective_n
    for label, figure in {**metric.percentiles, "std": metric.std}.items():
        row |= {label: figure.value, f"{label} low": figure.low, f"{label} high": figure.high}
    return {**row, "max": metric.max_s}


def _remarks(cell: Cell, latency: Distribution, headline: Headline) -> Iterable[str]:
    yield from (f"void: {reason}" for reason in dict.fromkeys(cell.void))
    slo_s = headline.parameters.slo_p99_s
    if cell.load != "closed" and not cell.void:
        yield f"SLO of {slo_s:g} s: {_meets(slo_s, latency.percentiles['p99'])}"
    p99 = latency.percentiles["p99"]
    if cell.load == "closed" and cell.arm in long_arms(headline.parameters) and p99.value is None and p99.reason:
        yield f"no P99: {p99.reason}"
        if _ended_early(cell, headline.parameters):
            yield "it ended early, with its share of max_measuring_s"
    if any(block.summary.steady_window.verdict == "drifting" for block in cell.blocks):
        yield "drifting"
    yield from dict.fromkeys(doubt for block in cell.blocks for doubt in block.summary.doubts)
    if latency.num_failed:
        yield f"{latency.num_failed} failed"
    name, tail = latency.deepest_tail
    if tail.effective_n < latency.n:
        yield f"correlated: worth {tail.effective_n} independent requests for {name}"


def _ended_early(cell: Cell, parameters: Headline01) -> bool:
    """Whether a block got neither to its number of requests nor to its seconds: then its share of the time was over."""
    planned = {(one.arm, one.load.name, one.number): one for one in plan(parameters)}
    found = ((block, planned.get((block.arm, block.load, block.number))) for block in cell.blocks)
    return any(own is not None and _is_cut(block, own) for block, own in found)


def _is_cut(block: Block, planned: Planned) -> bool:
    if planned.num_requests is not None and len(measured(block.run.records)) < planned.num_requests:
        return True
    last_s = max((record.end_s for record in block.run.records), default=0.0)
    return planned.duration_s is not None and last_s < planned.duration_s


def _ablation_row(cell: Cell) -> dict[str, Any]:
    latency = cell.metrics["e2e"]
    name, figure = latency.deepest_tail
    bounded = figure.low is not None and figure.high is not None
    return {
        "arm": _name(cell),
        "p50": _number(latency.percentiles["p50"].value),
        "tail": _number(figure.value),
        "low": _number(figure.low if bounded else None),
        "high": _number(figure.high if bounded else None),
        "tail_name": name,
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else 1000 * seconds


def _hit_row(block: Block) -> dict[str, Any]:
    hits = block.summary.hit_rates
    return {
        "order": block.order,
        "arm": block.arm.name,
        "load": block.load,
        "block": block.number + 1,
        "declared": hits.declared,
        "checked": hits.verdict,
        "prompt tokens cached": hits.cached_share,
        "tier": "device",
        "waited for pages": None if block.stats is None else block.stats.num_page_waits,
        "preemptions": None if block.stats is None else block.stats.num_preemptions,
        "steps replayed": None if block.stats is None else block.stats.graph_share,
        "steps fell back": None if block.stats is None else block.stats.fallback_share,
    }


def _window_row(block: Block) -> dict[str, Any]:
    window, late = block.summary.steady_window, block.summary.lateness
    return {
        "order": block.order,
        "arm": block.arm.name,
        "load": block.load,
        "block": block.number + 1,
        "verdict": window.verdict,
        "from (s)": window.start_s,
        "to (s)": window.end_s,
        "requests": window.num_requests,
        "client late, P50 (ms)": _ms(late.distribution.percentiles["p50"].value),
        "client late, P99 at least (ms)": _ms(late.p99_at_least_s),
        "client late, max (ms)": _ms(late.distribution.max_s),
        "allowed (ms)": _ms(late.limit_s),
        "reason": window.reason or "",
    }
