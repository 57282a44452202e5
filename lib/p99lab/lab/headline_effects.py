"""What notebook 01 says of each measure, for the decision page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from p99lab.lab.effects import Effect
from p99lab.lab.headline import Cell, Headline
from p99lab.lab.headline_arms import ARMS, BASELINE, Arm, between, is_whole
from p99lab.lab.headline_tables import figure_of, ratio
from p99lab.probe.stats import e2e

FIGURES = {"p50": "E2E P50", "p99": "E2E P99", "std": "E2E jitter"}
CONFIDENCE = 0.025  # one-sided, of the bound for a handful of requests


def measure(arm: Arm) -> str:
    """What an arm adds, in its own name; `stock` adds the prefix cache."""
    return "prefix cache" if arm.name == BASELINE else arm.name.removeprefix("+")


def measures() -> list[str]:
    """Every measure of the article's and ours, tried here or not."""
    return [measure(arm) for arm in ARMS[1:] if not arm.is_peer]


def effects(headline: Headline) -> list[Effect]:
    """Each arm against the one before it and the full set against `stock`, per load: E2E P50, P99 and standard
    deviation as far as n allows; none of a void arm, or of one without a part of what it adds. Loads whose rates are
    shares of each arm's own capacity are left out: under them the faster arm gets more to do."""
    loads = [load for load in headline.loads if _is_common(load)]
    return [effect for load in loads for pair in _pairs(headline, load) for effect in _of_pair(headline, load, *pair)]


def _is_common(load: str) -> bool:
    """Whether all arms get the same: the closed load, a common rate, a rate in requests per second."""
    return load in ("closed", "open") or load.endswith("/s")


def _pairs(headline: Headline, load: str) -> list[tuple[Cell, Cell]]:
    own = [cell for cell in headline.cells(load) if not cell.arm.is_peer]
    cells = [cell for cell in own if is_whole(cell.arm, headline.parameters)]
    full = headline.full
    ends = [cell for cell in cells if cell.arm.name == BASELINE or cell.arm == full]
    whole = [(ends[0], ends[1])] if len(ends) == 2 else []
    neighbours = list(pairwise(cells))
    return neighbours + [pair for pair in whole if pair not in neighbours]


def _of_pair(headline: Headline, load: str, before: Cell, after: Cell) -> Iterator[Effect]:
    if before.void or after.void:
        return
    metrics = [cell.metrics["e2e"] for cell in (before, after)]
    found = {said: ratio(*(figure_of(metric, name) for metric in metrics)) for name, said in FIGURES.items()}
    if found["E2E P50"] is None:
        found = {"E2E, every request": _apart(*([e2e(record) for record in cell.used] for cell in (before, after)))}
    for said, quotient in found.items():
        if quotient is None:
            continue
        yield Effect(
            measure=" + ".join(measure(arm) for arm in between(before.arm, after.arm)),
            against=measure(before.arm) if before.arm.prefix_cache else before.arm.name,
            load=_load(headline, load),
            metric=said,
            ratio=quotient[0],
            ci_low=quotient[1],
            ci_high=quotient[2],
            n=min(metric.n for metric in metrics),
            conditions=_conditions(headline, (before, after)) | _brought(before.arm, after.arm),
        )


def _apart(before: Sequence[float], after: Sequence[float]) -> tuple[float, float | None, float | None] | None:
    """Of a handful of requests before: the ratio of the medians, and a lower bound of the scale where it can be had.

    If `before` were at most r times `after`, all n requests before would be longer than r times all m after in one of
    C(n + m, n) orders at most (the rank test); where that is rare enough, the least ratio of any two is a bound.
    """
    if not before or not after or not math.isfinite(max(*before, *after)):
        return None
    is_rare = 1 / math.comb(len(before) + len(after), len(before)) <= CONFIDENCE
    return statistics.median(before) / statistics.median(after), min(before) / max(after) if is_rare else None, None


def _load(headline: Headline, load: str) -> str:
    if load == "closed":
        return f"closed, {headline.parameters.concurrency} clients"
    if load == "open":
        return f"open, Poisson, {headline.parameters.open_share:.0%} of what stock answers"
    return f"open, Poisson, {load.removeprefix('open ')}"


def _conditions(headline: Headline, cells: Iterable[Cell]) -> dict[str, Any]:
    parameters, lengths = headline.parameters, headline.document_tokens
    reuse = min(len(cell.used) for cell in cells) // len(lengths)
    return {
        "model": parameters.model,
        "documents": len(lengths),
        "document tokens": _span(min(lengths), max(lengths)),
        "questions a document": reuse,
        "answer tokens": _span(*parameters.lengths[2]),
    }


def _brought(before: Arm, after: Arm) -> dict[str, Any]:
    """What else differs between two arms than the measures by whose names they go."""
    brought = [arm.brings for arm in between(before, after) if arm.brings]
    return {"with": ", ".join(brought)} if brought else {}


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}–{most}"
