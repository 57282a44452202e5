"""What the engine must reach under notebook 01's loads on one H200, and whether it did. Fixed before any run.

A verdict is given for the scenario that the bars were stated for and nothing smaller. `held` and `missed` are meant
of the whole 95 % interval; where that straddles the bar, or is open on the bar's side, the verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from p99lab.lab.headline import Cell, Headline
from p99lab.lab.headline_arms import Arm
from p99lab.lab.headline_demand import churn_table, goodput_table
from p99lab.lab.parameters import Headline01
from p99lab.probe import ratios
from p99lab.probe.intervals import Figure

PEER = "vLLM"
MODEL, DTYPE, DOCUMENTS, CLIENTS, SLO_S = "dummy:llama-3.1-8b", "bfloat16", 4, 64, 2.0
LEAST_LENGTHS = (117_000, 48, 16)  # of a document, a question, an answer
CLOSED_REQUESTS, CLOSED_S = 5000, 120.0
COLD_DOCUMENTS, COLD_EVERY_S = 5, 60.0
MOST_FAILED = 0.01  # more, and they are the P99
COLUMNS = ("figure", "bar", "measured", "low", "high", "n", "verdict")
BY_VALUE = "by its value alone"


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure and the bounds of its interval, or why there is none to judge (`without`)."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    without: str | None = None

    @classmethod
    def exact(cls, value: float | None, n: int | None = None, without: str | None = None) -> Measured:
        """Of what has no interval: a count, a maximum, a bound."""
        return cls(value, value, value, n, without)


@dataclass(frozen=True, slots=True)
class Bar:
    """`limit`: at most so much, or at least, where `is_floor`."""

    figure: str
    limit: float
    unit: str
    is_floor: bool = False

    def judge(self, measured: Measured) -> dict[str, Any]:
        """A row of the table; a figure that there is not, or that something speaks against, is not judged."""
        bar = f"{'≥' if self.is_floor else '≤'} {self.limit:g} {self.unit}".rstrip()
        figures = (measured.value, measured.low, measured.high, measured.n)
        return dict(zip(COLUMNS, (self.figure, bar, *figures, self._verdict(measured)), strict=True))

    def _verdict(self, measured: Measured) -> str:
        if measured.without is not None or measured.value is None:
            return measured.without or "cannot tell"
        verdict, far = ("held", measured.high) if self._reaches(measured.value) else ("missed", measured.low)
        if self.is_floor:
            far = measured.low if verdict == "held" else measured.high
        is_whole = far is not None and self._reaches(far) == (verdict == "held")
        return verdict if is_whole else f"{verdict}, {BY_VALUE}"

    def _reaches(self, value: float) -> bool:
        return value >= self.limit if self.is_floor else value <= self.limit


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
    full = headline.full
    is_judged = full is not None and _is_stated(headline.parameters)
    rows = [*_closed(headline, full), *_open(headline, full), *_churn(headline, full)] if full and is_judged else []
    return pd.DataFrame(rows, columns=COLUMNS).astype({"n": "Int64"})


def _is_stated(parameters: Headline01) -> bool:
    """Whether it is the scenario that the bars are stated for, or harder."""
    sizes = (parameters.model, parameters.dtype, parameters.num_documents, parameters.concurrency, parameters.slo_p99_s)
    least = tuple(lengths[0] for lengths in parameters.lengths)
    is_long = all(length >= bar for length, bar in zip(least, LEAST_LENGTHS, strict=True))
    is_same = sizes == (MODEL, DTYPE, DOCUMENTS, CLIENTS, SLO_S)
    return parameters.on_gpu and parameters.transport == "http" and is_same and is_long


def _closed(headline: Headline, full: Arm) -> Iterator[dict[str, Any]]:
    cell = headline.cell(full.name)
    without = _unjudged(cell) or (None if cell is None else _too_short(cell))
    yield CLOSED_P99.judge(_latency(cell, "p99", without))
    yield CLOSED_STD.judge(_latency(cell, "std", without))
    yield CLOSED_IDLE.judge(Measured.exact(None if cell is None else idle_share(cell), without=without))


def _open(headline: Headline, full: Arm) -> Iterator[dict[str, Any]]:
    rates = goodput_table(headline).set_index("arm")
    (ours, ours_below), (theirs, theirs_below) = (_goodput(rates, arm) for arm in (full.name, PEER))
    is_run, is_compared = full.name in rates.index, {full.name, PEER} <= set(rates.index)
    yield GOODPUT.judge(Measured(ours, ours, ours_below, without=None if is_run else "not run"))
    times, times_below = _quotient(ours, theirs_below), _quotient(ours_below, theirs)
    yield GOODPUT_TIMES.judge(Measured(times, times, times_below, without=None if is_compared else "not run"))
    half = headline.cell(full.name, "open 50 %")
    yield HALF_P99.judge(_latency(half, "p99", _unjudged(half)))


def _churn(headline: Headline, full: Arm) -> Iterator[dict[str, Any]]:
    quiet, churn = headline.cell(full.name, "open 50 %"), headline.cell(full.name, "churn 50 %")
    row = churn_table(headline).set_index("arm").to_dict("index").get(full.name, {})
    waits = list(row.get("their TTFT (s)", []))
    without = _unjudged(churn) or _too_few_cold(headline.parameters, len(waits), row.get("of whom cold", 0))
    times = Measured(without=without or _unjudged(quiet))
    if churn is not None and quiet is not None:
        p99 = [cell.metrics["e2e"].percentiles["p99"] for cell in (churn, quiet)]
        times = Measured(ratios.ratio(*p99), *ratios.bounds(*p99), p99[0].n, times.without)
    yield CHURN_TIMES.judge(times)
    yield CHURN_TTFT.judge(Measured.exact(max(waits, default=None), len(waits), without))


def _goodput(rates: pd.DataFrame, arm: str) -> tuple[float | None, float | None]:
    """At least so much, and less than so much."""
    return _number(rates["at least/s"].get(arm)), _number(rates["below/s"].get(arm))


def _quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def idle_share(cell: Cell) -> float | None:
    """Of the time of a cell's blocks, that in which the device (else the engine) had no step; None of a peer."""
    stats = [(block.stats, block.run.records) for block in cell.blocks if block.stats is not None]
    known = [(each.device_s or each.busy_s, records) for each, records in stats]
    wall_s = sum(max((record.end_s for record in records), default=0.0) for _, records in known)
    return 1.0 - sum(busy_s for busy_s, _ in known) / wall_s if wall_s else None


def _latency(cell: Cell | None, name: str, without: str | None) -> Measured:
    """A figure of E2E."""
    if cell is None:
        return Measured(without=without)
    latency = cell.metrics["e2e"]
    figure: Figure = latency.std if name == "std" else latency.percentiles[name]
    return Measured(figure.value, figure.low, figure.high, figure.n, without)


def _unjudged(cell: Cell | None) -> str | None:
    """Why a cell's figures are not judged."""
    if cell is None:
        return "not run"
    if cell.void:
        return "void"
    if (latency := cell.metrics["e2e"]).num_failed > MOST_FAILED * latency.n:
        return f"{latency.num_failed} of {latency.n} failed"
    is_steady = all(block.summary.steady_window.verdict == "steady" for block in cell.blocks)
    return None if is_steady else "not steady"


def _too_short(cell: Cell) -> str | None:
    windows = [block.summary.steady_window for block in cell.blocks]
    seconds, num_requests = sum(window.end_s - window.start_s for window in windows), len(cell.used)
    if num_requests >= CLOSED_REQUESTS and seconds >= CLOSED_S:
        return None
    return f"too short: {num_requests} requests in {seconds:.0f} s, of {CLOSED_REQUESTS} in {CLOSED_S:.0f} s"


def _too_few_cold(parameters: Headline01, num_documents: int, num_cold: int) -> str | None:
    if num_cold < num_documents:
        return "not cold"
    if num_documents < COLD_DOCUMENTS or parameters.cold_every_s > COLD_EVERY_S:
        return f"too few: {num_documents} cold documents, of {COLD_DOCUMENTS} that come every {COLD_EVERY_S:.0f} s"
    return None


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
