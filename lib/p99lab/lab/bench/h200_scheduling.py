"""How steps are put together in `p99lab bench h200`, and the rows that say so.

The loads run as notebook 01 schedules them on this machine: `closed-idle`, and all that clients ask over HTTP of the
model that the notebook serves. The other cases in process have steps of `chunk_tokens` without a bound on their time.
"""

from __future__ import annotations

from collections.abc import Iterator

from p99lab.engine.config import SchedulerConfig
from p99lab.lab import parameters
from p99lab.lab.bench.h200_sizes import APART, OVER_HTTP, WITHOUT_ENGINE, H200Bench
from p99lab.lab.bench.rows import BenchRow
from p99lab.lab.headline_arms import arm

FULL_SET = "+graphs and overlap"
CLOSED = frozenset({"closed-idle"})


def headline() -> parameters.Headline01:
    """Notebook 01's parameters on an H200."""
    tier = parameters.load(parameters.find("01"), "h200")
    assert isinstance(tier, parameters.Headline01)
    return tier


def closed(bench: H200Bench) -> SchedulerConfig:
    """Of `closed-idle`: the notebook's, unless the sizes have their own."""
    return _as_the_notebook(bench, headline(), bench.closed_chunk_tokens, bench.closed_max_step_s)


def over_http(bench: H200Bench) -> SchedulerConfig:
    """Of cases over HTTP: the notebook's for its own model, whose steps its bound is meant for."""
    tier = headline()
    is_the_same = (bench.model, bench.dtype) == (tier.model, tier.dtype)
    return _as_the_notebook(bench, tier, None, None) if is_the_same else bench.engine.scheduler


def _as_the_notebook(
    bench: H200Bench, tier: parameters.Headline01, chunk_tokens: int | None, max_step_s: float | None
) -> SchedulerConfig:
    there = arm(FULL_SET).scheduler(tier)
    changes = {
        "max_num_batched_tokens": chunk_tokens or min(there.max_num_batched_tokens, bench.chunk_tokens),
        "max_num_seqs": bench.engine.scheduler.max_num_seqs,  # graphs were captured for
        "max_step_s": max_step_s or there.max_step_s,
    }
    return SchedulerConfig.parse(there.model_dump() | changes)


def rows(bench: H200Bench, cases: frozenset[str]) -> Iterator[BenchRow]:
    """The settings that these cases are measured with."""
    if cases - OVER_HTTP - APART - WITHOUT_ENGINE - CLOSED:
        yield _row("in process", bench.engine.scheduler)
    if cases & CLOSED:
        yield _row("of closed-idle", closed(bench))
    if cases & OVER_HTTP:
        yield _row("over HTTP", over_http(bench))


def _row(where: str, config: SchedulerConfig) -> BenchRow:
    others = config.model_dump(exclude={"max_num_batched_tokens"})
    note = ", ".join(f"{name}={value}" for name, value in others.items())
    return BenchRow(
        f"scheduler {where}: max_num_batched_tokens", float(config.max_num_batched_tokens), "tokens", note=note
    )
