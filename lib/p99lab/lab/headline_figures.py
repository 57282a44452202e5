"""The figures that chapter 1's claims are judged by, taken from a `Headline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from p99lab.lab.claims import Claim, load_claims, machine_conditions, verdict
from p99lab.lab.figures import Conditions, Figure
from p99lab.lab.headline import NOTEBOOK, Cell, Headline
from p99lab.lab.headline_arms import BASELINE, measured_arms
from p99lab.observe.hardware import fingerprint
from p99lab.probe import intervals, ratios
from p99lab.probe.stats import attribution, e2e


def verdicts(headline: Headline, figures: Iterable[Figure]) -> pd.DataFrame:
    """The claims that this notebook tests, judged by these figures on this machine; under `why` also what is void."""
    by_metric = {figure.metric: figure for figure in figures}
    machine = machine_conditions(fingerprint())
    claims = [claim for claim in load_claims() if claim.notebook == NOTEBOOK]
    judged = _judged(headline).values()
    void = [f"{cell.arm.name} is void: {reason}" for cell in judged for reason in dict.fromkeys(cell.void)]
    rows = [_verdict_row(claim, by_metric, machine, void) for claim in claims]
    return pd.DataFrame(rows).astype({"n": "Int64"})


def figures(headline: Headline) -> list[Figure]:
    """What the claims of chapter 1 are judged by, each with the conditions it was taken under; none of a void arm."""
    untested = Figure.untestable("warm_lengths_done", takes="a GPU, 128K contexts and a compiled arm")
    judged = _judged(headline)
    found = _tail_figures(judged)
    if (baseline := judged.get("stock")) is not None and not baseline.void:
        found += _allocation_figure(baseline)
    conditions = _conditions(headline)
    return [*(dataclasses.replace(figure, conditions=conditions) for figure in found), untested]


def _judged(headline: Headline) -> dict[str, Cell]:
    """`stock` and `full`, as far as they ran, under the closed load alone: the article's was closed."""
    full = headline.full
    found = {"stock": headline.cell(BASELINE), "full": None if full is None else headline.cell(full.name)}
    return {which: cell for which, cell in found.items() if cell is not None}


def _conditions(headline: Headline) -> dict[str, Any]:
    parameters = headline.parameters
    return {
        "model": parameters.model,
        "geometry": headline.geometry,
        "device": parameters.device.split(":")[0],
        "nodes": 1,
        "context": max(headline.document_tokens) + parameters.lengths[1][1] + parameters.lengths[2][1],
        "concurrency": parameters.concurrency,
        "transport": parameters.transport,
        "measures": [
            arm.name.removeprefix("+") for arm in measured_arms(parameters) if arm.prefix_cache and not arm.is_peer
        ],
    }


def _verdict_row(
    claim: Claim, figures: Mapping[str, Figure], machine: Conditions, void: Sequence[str]
) -> dict[str, Any]:
    name, why, figure = verdict(claim, figures, machine)
    return {
        "claim": claim.id,
        "says": claim.says,
        "stated": "" if claim.stated is None else f"{claim.stated:g} {claim.unit}",
        "measured": None if figure is None else figure.value,
        "unit": None if figure is None else figure.unit,
        "low": None if figure is None else figure.ci_low,
        "high": None if figure is None else figure.ci_high,
        "n": None if figure is None else figure.n,
        "verdict": "no verdict" if name is None else name.value,
        "why": why if figure is not None else "; ".join((why, *void)),
    }


def _tail_figures(cells: Mapping[str, Cell]) -> list[Figure]:
    """P99 and spread of both, and their ratios."""
    latency = {which: cell.metrics["e2e"] for which, cell in cells.items() if not cell.void}
    figures = []
    for metric in ("p99", "std"):
        found = {which: m.std if metric == "std" else m.percentiles[metric] for which, m in latency.items()}
        for which, one in found.items():
            if one.value is not None:
                figures.append(_figure(f"{metric}_e2e_{which}", one.value, "s", one.low, one.high, one.n))
        before, after = found.get("stock"), found.get("full")
        if before and after and (times := ratios.ratio(before, after)) is not None:
            figures.append(
                _figure(f"{metric}_ratio", times, "x", *ratios.bounds(before, after), min(before.n, after.n))
            )
    return figures


def _figure(metric: str, value: float, unit: str, low: float | None, high: float | None, n: int) -> Figure:
    """With its interval where both sides are there, without one otherwise."""
    if low is None or high is None:
        return Figure(metric, value, unit, n=n)
    return Figure(metric, value, unit, low, high, n)


def _allocation_figure(baseline: Cell) -> list[Figure]:
    """Percent of a P99 request's time that went into host work between steps, and into waiting if pages ever lacked.

    P99 requests: those at or above the lower bound of P99's interval. The figure is the median of their shares, whose
    interval is one of order statistics like any other here. None where P99 has no interval: which requests are at the
    P99 is not known then.
    """
    tail = baseline.metrics["e2e"].percentiles["p99"]
    if tail.low is None or tail.high is None:
        return []
    stats = [block.stats for block in baseline.blocks if block.stats is not None]
    lacked = any(each.num_page_waits or each.num_preemptions for each in stats)
    known = [share for r in baseline.used if e2e(r) >= tail.low and (share := attribution(r)) is not None]
    blamed = [share["scheduling"] + (share["queue"] if lacked else 0.0) for share in known]
    percent = np.array([100 * part / sum(share.values()) for part, share in zip(blamed, known, strict=True)])
    median = intervals.percentile(percent, 0.5, intervals.effective_size(percent))
    if median.value is None:
        return []
    return [_figure("share_allocation", median.value, "percent", median.low, median.high, median.n)]
