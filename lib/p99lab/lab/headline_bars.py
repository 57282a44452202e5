"""What the engine must reach under notebook 01's loads on one H200, and whether it did. Fixed before any run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from p99lab.lab.headline import Cell, Headline
from p99lab.lab.headline_arms import Arm
from p99lab.lab.headline_demand import churn_table, goodput_table
from p99lab.probe.intervals import Figure

PEER = "vLLM"
CLIENTS, LEAST_DOCUMENT = 64, 117_000  # the scenario that the bars are stated for
COLUMNS = ("figure", "bar", "measured", "n", "verdict")


@dataclass(frozen=True, slots=True)
class Bar:
    """`limit`: at most so much, or at least, where `is_floor`."""

    figure: str
    limit: float
    unit: str
    is_floor: bool = False

    def judge(self, value: float | None, n: int | None = None, without: str = "not run") -> dict[str, Any]:
        """A row of the table; a figure that there is not is not judged, and the verdict is `without`."""
        reached = value is not None and (value >= self.limit if self.is_floor else value <= self.limit)
        verdict = without if value is None else "held" if reached else "missed"
        bar = f"{'≥' if self.is_floor else '≤'} {self.limit:g} {self.unit}".rstrip()
        return dict(zip(COLUMNS, (self.figure, bar, value, n, verdict), strict=True))


CLOSED_P99 = Bar("closed load: P99 of E2E", 1.05, "s")
CLOSED_STD = Bar("closed load: standard deviation", 0.08, "s")
CLOSED_IDLE = Bar("closed load: share of the time in which no step ran", 0.03, "")
GOODPUT = Bar("goodput at the SLO", 50.0, "requests/s", is_floor=True)
GOODPUT_TIMES = Bar(f"goodput, times {PEER}'s", 8.0, "", is_floor=True)
HALF_P99 = Bar("open load at 50 % of capacity: P99 of E2E", 0.6, "s")
CHURN_TIMES = Bar("churn: the others' P99, times that without churn", 1.5, "")
CHURN_TTFT = Bar("churn: the longest TTFT of a cold document", 40.0, "s")


def bars(headline: Headline) -> pd.DataFrame:
    """The full set against the bars; no rows for another scenario than theirs, or where the full set was not run."""
    parameters, full = headline.parameters, headline.full
    is_theirs = parameters.on_gpu and parameters.concurrency == CLIENTS and parameters.lengths[0][0] >= LEAST_DOCUMENT
    rows = [] if full is None or not is_theirs else [*_closed(headline, full), *_open(headline, full)]
    return pd.DataFrame(rows, columns=COLUMNS).astype({"n": "Int64"})


def _closed(headline: Headline, full: Arm) -> Iterator[dict[str, Any]]:
    cell = headline.cell(full.name)
    yield CLOSED_P99.judge(*_latency(cell, "p99"), without=_unjudged(cell))
    yield CLOSED_STD.judge(*_latency(cell, "std"), without=_unjudged(cell))
    yield CLOSED_IDLE.judge(None if cell is None else idle_share(cell))


def _open(headline: Headline, full: Arm) -> Iterator[dict[str, Any]]:
    rates = goodput_table(headline).set_index("arm")
    ours = _number(rates["goodput at least/s"].get(full.name))
    theirs = _number(rates["at most/s"].get(PEER))
    is_tried, is_compared = full.name in rates.index, {full.name, PEER} <= set(rates.index)
    yield GOODPUT.judge(ours, without="cannot tell" if is_tried else "not run")
    times = ours / theirs if ours is not None and theirs else None
    yield GOODPUT_TIMES.judge(times, without="cannot tell" if is_compared else "not run")
    half, busy = headline.cell(full.name, "open 50 %"), headline.cell(full.name, "churn 50 %")
    yield HALF_P99.judge(*_latency(half, "p99"), without=_unjudged(half))
    churn = churn_table(headline).set_index("arm").to_dict("index").get(full.name, {})
    yield CHURN_TIMES.judge(_number(churn.get("times")), without=_unjudged(busy, half))
    waits = churn.get("their TTFT (s)") or []
    yield CHURN_TTFT.judge(max(waits) if waits else None, len(waits))


def idle_share(cell: Cell) -> float | None:
    """Of the time of a cell's blocks, that in which the device (else the engine) had no step; None of a peer."""
    stats = [(block.stats, block.run.records) for block in cell.blocks if block.stats is not None]
    known = [(each.device_s or each.busy_s, records) for each, records in stats]
    wall_s = sum(max((record.end_s for record in records), default=0.0) for _, records in known)
    return 1.0 - sum(busy_s for busy_s, _ in known) / wall_s if wall_s else None


def _latency(cell: Cell | None, name: str) -> tuple[float | None, int | None]:
    """A figure of E2E and its n; None of a void cell."""
    if cell is None or cell.void:
        return None, None
    latency = cell.metrics["e2e"]
    figure: Figure = latency.std if name == "std" else latency.percentiles[name]
    return figure.value, figure.n


def _unjudged(*cells: Cell | None) -> str:
    """The verdict where there is no figure that takes all of these cells."""
    if None in cells:
        return "not run"
    return "void" if any(cell.void for cell in cells if cell is not None) else "cannot tell"


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
