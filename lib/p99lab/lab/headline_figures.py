"""The figures that chapter 1's claims are judged by, taken from a `Headline`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from p99lab.lab.claims import Claim, load_claims, machine_conditions, verdict
from p99lab.lab.figures import Conditions, Figure
from p99lab.lab.headline import BASELINE, FULL, NOTEBOOK, Cell, Headline
from p99lab.observe.hardware import fingerprint
from p99lab.probe import intervals
from p99lab.probe.stats import attribution, e2e, metric_values


def verdicts(figures: Iterable[Figure]) -> pd.DataFrame:
    """The claims that this notebook tests, judged by these figures on this machine."""
    by_metric = {figure.metric: figure for figure in figures}
    machine = machine_conditions(fingerprint())
    claims = [claim for claim in load_claims() if claim.notebook == NOTEBOOK]
    return pd.DataFrame([_verdict_row(claim, by_metric, machine) for claim in claims])


def figures(headline: Headline) -> list[Figure]:
    """What the claims of chapter 1 are judged by, each with the conditions it was taken under."""
    baseline, full = headline.cell(BASELINE), headline.cell(FULL)
    conditions = _conditions(headline)
    found = [*_tail_figures(baseline, full), _allocation_figure(baseline)]
    untested = Figure.untestable("warm_lengths_done", takes="a GPU, 128K contexts and a compiled arm")
    return [*(dataclasses.replace(figure, conditions=conditions) for figure in found), untested]


def _conditions(headline: Headline) -> dict[str, Any]:
    parameters = headline.parameters
    return {
        "model": parameters.model,
        "geometry": headline.geometry,
        "device": parameters.device.split(":")[0],
        "nodes": 1,
        "context": max(headline.document_tokens) + parameters.question_tokens_max + parameters.answer_tokens_max,
        "concurrency": parameters.concurrency,
    }


def _verdict_row(claim: Claim, figures: Mapping[str, Figure], machine: Conditions) -> dict[str, Any]:
    name, why, figure = verdict(claim, figures, machine)
    return {
        "claim": claim.id,
        "says": claim.says,
        "stated": "" if claim.stated is None else f"{claim.stated:g} {claim.unit}",
        "measured": None if figure is None else figure.value,
        "low": None if figure is None else figure.ci_low,
        "high": None if figure is None else figure.ci_high,
        "n": None if figure is None else figure.n,
        "verdict": "none" if name is None else name.value,
        "why": why,
    }


def _tail_figures(baseline: Cell, full: Cell) -> list[Figure]:
    """P99 and spread of both, and their ratios with intervals from the worst pairing of the bounds."""
    figures = []
    for metric, unit in (("p99_e2e", "s"), ("std_e2e", "s")):
        pair = [_tail(metric, cell) for cell in (baseline, full)]
        for which, found in zip(("stock", "full"), pair, strict=True):
            if found.value is not None:
                figures.append(_figure(f"{metric}_{which}", found.value, unit, found.low, found.high, found.n))
        before, after = pair
        if before.value is not None and after.value is not None:
            low, high = _quotient(before.low, after.high), _quotient(before.high, after.low)
            name = metric.removesuffix("_e2e") + "_ratio"
            figures.append(_figure(name, before.value / after.value, "x", low, high, min(before.n, after.n)))
    return figures


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _figure(metric: str, value: float, unit: str, low: float | None, high: float | None, n: int) -> Figure:
    """With its interval where both sides are there, without one otherwise."""
    if low is None or high is None:
        return Figure(metric, value, unit, n=n)
    return Figure(metric, value, unit, low, high, n)


def _tail(metric: str, cell: Cell) -> intervals.Figure:
    latency = metric_values(cell.used)["e2e"]
    if metric == "std_e2e":
        return intervals.spread(latency)
    return intervals.percentile(latency, 0.99, intervals.effective_size(latency))


def _allocation_figure(baseline: Cell) -> Figure:
    """Percent of the P99 requests' time that went into host work between steps, and into waiting if pages ever lacked.

    The P99 requests: those at or above the lower bound of P99's interval. The figure's interval is a bootstrap over
    them.
    """
    lacked = any(block.stats.num_refusals or block.stats.num_preemptions for block in baseline.blocks)
    tail = _tail("p99_e2e", baseline)
    if tail.low is None:
        return Figure.untestable("share_allocation", takes=f"{intervals.min_n(0.99)} independent requests")
    shares = [attribution(record) for record in baseline.used if e2e(record) >= tail.low]
    known = [share for share in shares if share is not None]
    blamed = np.array([share["scheduling"] + (share["queue"] if lacked else 0.0) for share in known])
    whole = np.array([sum(share.values()) for share in known])
    drawn = np.random.default_rng(0).integers(len(known), size=(1000, len(known)))
    low, high = np.quantile(blamed[drawn].sum(1) / whole[drawn].sum(1), [0.025, 0.975])
    return Figure("share_allocation", 100 * blamed.sum() / whole.sum(), "percent", 100 * low, 100 * high, len(known))
