"""What notebook 01 says of open loads: goodput, the cold documents of a churn and what they did to the others."""

from __future__ import annotations

from typing import Any

import pandas as pd

from p99lab.lab.headline import Block, Cell, Headline
from p99lab.lab.headline_arms import Arm
from p99lab.probe.hits import COLD_SHARE, COLD_TOKENS
from p99lab.probe.records import RequestRecord
from p99lab.probe.slo import Verdict, against, goodput
from p99lab.probe.stats import e2e, measured, ttft
from p99lab.probe.throughput import lag

GOODPUT_COLUMNS = ("arm", "at least/s", "below/s", "rates tried (verdict)")
CHURN_COLUMNS = ("arm", "cold documents", "their TTFT (s)", "of whom cold", "others' P99 (s)", "quiet P99 (s)", "times")


def goodput_table(headline: Headline) -> pd.DataFrame:
    """Per arm the highest Poisson rate whose P99 of E2E meets the SLO, and a rate that goodput is below.

    That is the lowest that misses the SLO or, where none does, what the arm answers to clients without think time.
    """
    rows = []
    for arm in dict.fromkeys(cell.arm for cell in headline.all_cells()):
        cells = [cell for cell in headline.all_cells() if cell.arm == arm and is_poisson(cell.load)]
        points = [(cell.blocks[0].rate or 0.0, verdict(cell, headline.parameters.slo_p99_s)) for cell in cells]
        if points:
            found = goodput(points)
            named = sorted((*point, cell.load) for point, cell in zip(points, cells, strict=True))
            tried = ", ".join(f"{load}: {rate:.3g} ({said})" for rate, said, load in named)
            rows.append((arm.name, found.shown, found.missed or _capacity(headline, arm), tried))
    return pd.DataFrame(rows, columns=GOODPUT_COLUMNS)


def churn_table(headline: Headline) -> pd.DataFrame:
    """Per arm every cold document's TTFT, and the others' P99 beside that of the same share of load without churn."""
    rows = [_churn_row(headline, cell) for cell in headline.all_cells() if is_churn(cell.load)]
    return pd.DataFrame(rows, columns=CHURN_COLUMNS)


def verdict(cell: Cell, slo_s: float) -> Verdict:
    """Of one rate: saturated where fewer requests are answered than arrive, outside the lag's interval."""
    if cell.void:
        return "void"
    if any(_is_saturated(block) for block in cell.blocks):
        return "saturated"
    return against(cell.metrics["e2e"].percentiles["p99"], 0.99, slo_s)


def is_poisson(load: str) -> bool:
    return load.startswith("open")


def is_churn(load: str) -> bool:
    return load.startswith("churn")


def _capacity(headline: Headline, arm: Arm) -> float | None:
    closed = headline.cell(arm.name)
    return None if closed is None or closed.void else closed.requests_per_s


def _is_saturated(block: Block) -> bool:
    """Until the first median latency has passed a load is answered less often than it arrives, however light it is."""
    used = block.used
    if not used:
        return False
    begin_s, end_s = used[0].start_s, used[-1].start_s
    filled_s = used[0].start_s + sorted(e2e(record) for record in used)[len(used) // 2]
    behind = lag(block.run.records, min(filled_s, (begin_s + end_s) / 2), end_s)
    return behind.low is not None and behind.low > 0


def _churn_row(headline: Headline, cell: Cell) -> tuple[Any, ...]:
    cold = [record for block in cell.blocks for record in measured(block.cold)]
    quiet = headline.cell(cell.arm.name, cell.load.replace("churn", "open"))
    p99, calm = _p99(cell), None if quiet is None else _p99(quiet)
    times = p99 / calm if p99 is not None and calm else None
    num_cold = sum(_is_cold(record) for record in cold)
    return cell.arm.name, len(cold), [ttft(record) for record in cold], num_cold, p99, calm, times


def _p99(cell: Cell) -> float | None:
    """Of E2E; None of a void cell."""
    return None if cell.void else cell.metrics["e2e"].percentiles["p99"].value


def _is_cold(record: RequestRecord) -> bool:
    return (record.num_cached_tokens or 0) <= COLD_TOKENS + COLD_SHARE * record.num_prompt_tokens
