"""How often the probe's intervals hold the truth: known servers on a virtual clock, and over HTTP."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from p99lab.lab.proof import real_runs, steadiness, virtual_clock
from p99lab.lab.proof.cases import CASES, ONE_STALL, PERCENTILES, Case
from p99lab.lab.proof.check import Check
from p99lab.lab.proof.known_server import KnownTarget
from p99lab.probe.intervals import Figure
from p99lab.probe.load import Run, drive
from p99lab.probe.stats import Summary, summarise

RUNS, PROCESSES = 2000, 2
BAND = (0.93, 0.97)


@dataclass(frozen=True)
class Coverage:
    """Of many runs: in how many an interval missed the truth, on which side, and in how many it was open above."""

    runs: int
    truth_s: float
    too_low: int  # the whole interval lies below the truth
    too_high: int
    open_above: int

    @property
    def share(self) -> float:
        return 1.0 - (self.too_low + self.too_high) / self.runs

    @classmethod
    def of(cls, figures: Sequence[Figure], truth_s: float) -> Self:
        return cls(
            len(figures),
            truth_s,
            too_low=sum(f.high is not None and f.high < truth_s for f in figures),
            too_high=sum(f.low is not None and f.low > truth_s for f in figures),
            open_above=sum(f.high is None for f in figures),
        )


def checks(work: Path) -> Iterator[Check]:
    """Coverage on a virtual clock; the same servers over HTTP; a stall under two loads; steady windows."""
    for name in CASES:
        for (metric, percentile), found in measured(name, range(RUNS), PROCESSES).items():
            yield _coverage_check(f"{name}: {metric} {percentile}", found, once=name == ONE_STALL)
    yield from real_runs.checks()
    yield from steadiness.checks()


def _coverage_check(name: str, found: Coverage, once: bool) -> Check:
    low, high = BAND[0], 1.0 if once else BAND[1]
    misses = f"{found.too_high} above the truth, {found.too_low} below"
    note = (
        f"true value {1000 * found.truth_s:.4g} ms; {misses}; open above in {found.open_above / found.runs:.1%} of runs"
    )
    if once:
        note += (
            "; one stall is one event: the requests it hit are worth about one, the interval says so by its open end"
        )
    expected = f"at least {low:.0%} of {found.runs} runs" if once else f"{low:.0%} to {high:.0%} of {found.runs} runs"
    return Check(name, expected, f"{found.share:.2%}", low <= found.share <= high, note)


def measured(name: str, seeds: Iterable[int], processes: int = 1) -> dict[tuple[str, str], Coverage]:
    """Coverage by metric and percentile over one run per seed."""
    truth = CASES[name].truths()
    one = functools.partial(figures, name)
    if processes == 1:
        runs = [one(seed) for seed in seeds]
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            runs = list(pool.map(one, seeds, chunksize=20))
    return {key: Coverage.of([run[key] for run in runs], truth[key]) for key in truth}


def figures(name: str, seed: int) -> dict[tuple[str, str], Figure]:
    """What one run states, by metric and percentile."""
    metrics = simulated(CASES[name], seed).metrics
    return {(metric, p): metrics[metric].percentiles[p] for metric in CASES[name].metrics for p in PERCENTILES}


def simulated(case: Case, seed: int) -> Summary:
    """One run of a case on a virtual clock, through the probe's driver and its summary."""

    async def main() -> Run:
        clock = asyncio.get_running_loop().time
        return await drive(KnownTarget(case.law(seed)), case.load, case.queries(seed), clock=clock, spin_s=0.0)

    return summarise(virtual_clock.run(main), case.load)
