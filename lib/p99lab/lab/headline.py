"""The headline experiment of notebook 01: the same requests, under the same loads, with one measure more per arm.

All arms run on one engine over one page pool. Before every block the cache is brought to the state the block declares
(`primed`: the documents and nothing else; `cold`: switched off), and the hit counters are checked against it
afterwards. Blocks of all arms are interleaved in seeded random order, so that drift of the machine falls on all alike.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, ModelConfig, SchedulerConfig
from p99lab.engine.request import IntArray
from p99lab.errors import AccountingError
from p99lab.lab.figures import Figure
from p99lab.lab.parameters import Headline01
from p99lab.probe.intervals import effective_size, percentile, spread
from p99lab.probe.load import Run, drive
from p99lab.probe.records import RequestRecord, to_table
from p99lab.probe.stats import SHARES, Distribution, Summary, attribution, e2e, measured, metric_values, summarise
from p99lab.probe.targets import InProcessTarget
from p99lab.probe.workload import (
    CacheState,
    ClosedLoad,
    Load,
    OpenLoad,
    Query,
    Workload,
    digest,
    make_documents,
    queries,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from p99lab.engine.engine import Engine
    from p99lab.engine.stats import EngineStats

LoadKind = Literal["closed", "open"]
OnBlock = Callable[[str], None]
MIN_N_P99 = 368


@dataclass(frozen=True, slots=True)
class Arm:
    """One more measure than the arm before it. `share`: of the parameters' closed requests it is given."""

    name: str
    adds: str
    composition: Literal["stock", "chunked"] = "chunked"
    prefix_cache: bool = True
    groups: bool = False
    built: bool = True

    @property
    def cache_state(self) -> CacheState:
        return "primed" if self.prefix_cache else "cold"

    def scheduler(self, parameters: Headline01) -> SchedulerConfig:
        """`stock` takes prompts whole; `chunked` cuts them to `chunk_tokens` a step."""
        whole = parameters.document_tokens_max + parameters.question_tokens_max
        return SchedulerConfig(
            composition=self.composition,
            max_num_batched_tokens=whole if self.composition == "stock" else parameters.chunk_tokens,
            max_num_seqs=parameters.max_num_seqs,
        )


ARMS = (
    Arm("no cache", "every prompt computed whole", composition="stock", prefix_cache=False),
    Arm("stock", "a prefix cache; whole prompts first, decode when none waits", composition="stock"),
    Arm("+chunked", "decode in every step, prompts in chunks beside it"),
    Arm("+shared-prefix groups", "a document's keys and values read once a step for all its requests", groups=True),
    Arm("+graphs and overlap", "CUDA graphs; the next step planned while one runs", built=False),
    Arm("+tiers and warm-up", "host and disk tiers, documents warmed before their traffic", built=False),
    Arm("+isolation and priority", "lanes of their own for urgent and bulk work", built=False),
)
BASELINE = "stock"
FULL = [arm.name for arm in ARMS if arm.built][-1]
LONG_ARMS = (BASELINE, FULL)  # with enough requests for a P99, and an open load


@dataclass(frozen=True, slots=True)
class Block:
    """One arm under one load, without a pause. `stats`: the engine's counters over the block, warm-up included."""

    arm: Arm
    load: LoadKind
    number: int
    order: int  # in which the blocks ran
    run: Run
    summary: Summary
    stats: EngineStats

    @property
    def used(self) -> list[RequestRecord]:
        """The measured requests of the steady window."""
        window = self.summary.steady_window
        return measured(self.run.records)[window.first : window.last + 1]


@dataclass(frozen=True, slots=True)
class Cell:
    """All blocks of one arm under one load, taken together."""

    arm: Arm
    load: LoadKind
    blocks: tuple[Block, ...]

    @property
    def used(self) -> list[RequestRecord]:
        return [record for block in self.blocks for record in block.used]

    @property
    def metrics(self) -> dict[str, Distribution]:
        """Each metric over all blocks, as `Summary.metrics` has it for one."""
        per_block = [metric_values(block.used) for block in self.blocks]
        return {name: Distribution.of(np.concatenate([v[name] for v in per_block])) for name in per_block[0]}

    @property
    def void(self) -> list[str]:
        return [reason for block in self.blocks for reason in block.summary.void]

    @property
    def requests_per_s(self) -> float:
        rates = [block.summary.requests_per_s or 0.0 for block in self.blocks]
        return sum(rates) / len(rates)


@dataclass(frozen=True, slots=True)
class Headline:
    """What notebook 01 shows. `geometry`, `workload_digest` and `prompt_tokens` say what was run."""

    parameters: Headline01
    geometry: str
    workload_digest: str
    document_tokens: tuple[int, ...]
    open_rate: float | None
    blocks: tuple[Block, ...] = field(repr=False)

    def cells(self, load: LoadKind) -> list[Cell]:
        """By arm, in the order of `ARMS`; arms that did not run are left out."""
        found = [(arm, tuple(b for b in self.blocks if b.load == load and b.arm == arm)) for arm in ARMS]
        return [Cell(arm, load, blocks) for arm, blocks in found if blocks]

    def cell(self, arm: str, load: LoadKind = "closed") -> Cell:
        return next(cell for cell in self.cells(load) if cell.arm.name == arm)

    def requests(self) -> pa.Table:
        """Every request of every block, all phases."""
        import pyarrow as pa

        tables = [
            to_table(block.run.records, arm=block.arm.name, load=block.load, block=f"{block.number}")
            for block in self.blocks
        ]
        return pa.concat_tables(tables)

    def summary(self) -> pd.DataFrame:
        """One row per arm and load: throughput and latency with intervals; arms not built yet say so."""
        import pandas as pd

        rows = [_summary_row(cell) for load in ("closed", "open") for cell in self.cells(load)]  # type: ignore[arg-type]
        rows += [{"arm": arm.name, "load": "closed", "remark": "not built yet"} for arm in ARMS if not arm.built]
        return pd.DataFrame(rows)

    def ablation(self) -> pd.DataFrame:
        """The closed load's E2E per arm, as `plots.ablation` takes it."""
        import pandas as pd

        return pd.DataFrame([_ablation_row(cell) for cell in self.cells("closed")])

    def attribution(self, load: LoadKind = "closed") -> pd.DataFrame:
        """Where the time of the slowest request and of the mean one went, by arm; seconds, columns are shares."""
        import pandas as pd

        rows, names = [], []
        for cell in self.cells(load):
            shares = [share for record in cell.used if (share := attribution(record)) is not None]
            slowest = max((r for r in cell.used if attribution(r) is not None), key=e2e)
            mean = {name: float(np.mean([share[name] for share in shares])) for name in SHARES}
            for what, values in (("slowest", attribution(slowest) or {}), ("mean", mean)):
                names.append(f"{cell.arm.name}: {what}")
                rows.append(values)
        return pd.DataFrame(rows, index=names, columns=list(SHARES))

    def hit_rates(self) -> pd.DataFrame:
        """What each block's cache was declared to be, and was. One tier so far: the device's pages."""
        import pandas as pd

        return pd.DataFrame([_hit_row(block) for block in self.blocks])

    def windows(self) -> pd.DataFrame:
        """The steady window of each block, and why where there is none."""
        import pandas as pd

        return pd.DataFrame([_window_row(block) for block in self.blocks])

    def latencies(self, load: LoadKind = "closed") -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """E2E of the used requests by arm, seconds, in order of time."""
        return {cell.arm.name: metric_values(cell.used)["e2e"] for cell in self.cells(load)}

    def p99_intervals(self, load: LoadKind = "closed") -> dict[str, tuple[float, float]]:
        """P99's confidence interval by arm, where n is large enough."""
        found = {cell.arm.name: cell.metrics["e2e"].percentiles["p99"] for cell in self.cells(load)}
        return {arm: (p99.low, p99.high) for arm, p99 in found.items() if p99.low is not None and p99.high is not None}

    def figures(self) -> list[Figure]:
        """What the claims of chapter 1 are judged by, each with the conditions it was taken under."""
        baseline, full = self.cell(BASELINE), self.cell(FULL)
        figures = [*_tail_figures(baseline, full), _allocation_figure(baseline)]
        conditions = self._conditions()
        figures = [dataclasses.replace(figure, conditions=conditions) for figure in figures]
        return [*figures, Figure.untestable("warm_lengths_done", takes="a GPU, 128K contexts and the compiled arm")]

    def _conditions(self) -> dict[str, Any]:
        longest = max(self.document_tokens) + self.parameters.question_tokens_max + self.parameters.answer_tokens
        return {
            "model": self.parameters.model,
            "geometry": self.geometry,
            "device": self.parameters.device.split(":")[0],
            "nodes": 1,
            "context": longest,
            "concurrency": self.parameters.concurrency,
        }


def run(parameters: Headline01, on_block: OnBlock | None = None) -> Headline:
    """Prime one engine and run all blocks on it. Minutes.

    Args:
        on_block: told what begins, one line per block.

    Raises:
        ModelError: the model cannot be used.
    """
    import torch

    from p99lab.engine.engine import Engine

    threads_before = torch.get_num_threads()
    torch.set_num_threads(parameters.threads or threads_before)
    try:
        with Engine(_engine_config(parameters)) as engine:
            return _Experiment(parameters, engine, on_block or (lambda line: None)).run()
    finally:
        torch.set_num_threads(threads_before)


class _Experiment:
    """One run of the notebook: an engine, the documents, and the queries that every arm is sent."""

    def __init__(self, parameters: Headline01, engine: Engine, tell: OnBlock) -> None:
        self._parameters = parameters
        self._engine = engine
        self._tell = tell
        self._workload = _workload(parameters)
        self._target = InProcessTarget(engine, parameters.model)
        self._documents = make_documents(self._workload, self._target.tokenize)
        self._blocks: list[Block] = []

    def run(self) -> Headline:
        parameters = self._parameters
        self._tell(f"priming {len(self._documents)} documents")
        self._prime()
        plan = [(arm, number) for arm in ARMS if arm.built for number in range(_num_blocks(arm, parameters))]
        random.Random(parameters.seed).shuffle(plan)
        for arm, number in plan:
            self._block(arm, "closed", number, self._closed_load(arm))
        rate = self._open_rate()
        if rate is not None:
            for name in LONG_ARMS:
                self._block(_arm(name), "open", 0, self._open_load(rate))
        return Headline(
            parameters=parameters,
            geometry=parameters.model.removeprefix("dummy:"),
            workload_digest=digest(self._workload, self._documents),
            document_tokens=tuple(document.passage.num_tokens for document in self._documents),
            open_rate=rate,
            blocks=tuple(self._blocks),
        )

    def _prime(self) -> None:
        _in_a_loop_of_its_own(self._target.prime(self._documents))

    def _block(self, arm: Arm, load_kind: LoadKind, number: int, load: Load) -> None:
        self._tell(f"{load_kind} load, {arm.name}, block {number + 1}")
        engine = self._engine
        engine.quiesce()
        engine.reconfigure(
            arm.scheduler(self._parameters), GroupingConfig(enabled=arm.groups), prefix_cache=arm.prefix_cache
        )
        if arm.prefix_cache:
            engine.forget_except([_ids(document.passage.token_ids) for document in self._documents])
        run = _in_a_loop_of_its_own(drive(self._target, load, self._queries(load, number)))
        stats = engine.stats()
        block = Block(arm, load_kind, number, len(self._blocks), run, summarise(run, load), stats)
        self._blocks.append(block)

    def _queries(self, load: Load, number: int) -> Iterator[Query]:
        """Block `number`'s stretch of the workload's queries; all of it is made before the clock starts."""
        num_sent = (load.num_requests or 0) + load.num_warmup_requests(self._parameters.concurrency)
        stretch = num_sent + 8 * self._parameters.concurrency  # the load is kept up until the last one is answered
        endless = queries(self._workload, self._documents, load, self._target.tokenize)
        if isinstance(load, OpenLoad):
            return iter(list(itertools.islice(endless, stretch)))
        return iter(list(itertools.islice(endless, number * stretch, (number + 1) * stretch)))

    def _closed_load(self, arm: Arm) -> ClosedLoad:
        parameters = self._parameters
        num_requests = _num_requests(arm, parameters)
        return ClosedLoad(
            num_requests=max(1, math.ceil(num_requests / _num_blocks(arm, parameters))),
            duration_s=parameters.max_block_s,
            concurrency=parameters.concurrency,
            cache=arm.cache_state,
        )

    def _open_load(self, rate: float) -> OpenLoad:
        parameters = self._parameters
        return OpenLoad(
            num_requests=parameters.open_requests, duration_s=parameters.max_block_s, rate=rate, cache="primed"
        )

    def _open_rate(self) -> float | None:
        """A share of what `stock` can answer at most, the same for all arms."""
        if not self._parameters.open_requests:
            return None
        rates = [block.summary.requests_per_s or 0.0 for block in self._blocks if block.arm.name == BASELINE]
        return self._parameters.open_share * sum(rates) / len(rates)


def _engine_config(parameters: Headline01) -> EngineConfig:
    """A pool that holds the documents, every client's private pages, and as much again for what has been answered."""
    page_size = CacheConfig().page_size
    document_pages = -(-parameters.document_tokens_max // page_size)
    private_tokens = parameters.question_tokens_max + parameters.answer_tokens
    client_pages = document_pages + -(-private_tokens // page_size) + 1  # without a cache it holds its document too
    return EngineConfig(
        model=ModelConfig(name=parameters.model, dtype=parameters.dtype, device=parameters.device),
        cache=CacheConfig(
            page_size=page_size,
            num_pages=document_pages * parameters.num_documents + 2 * client_pages * parameters.concurrency,
        ),
    )


def _workload(parameters: Headline01) -> Workload:
    return Workload(
        num_documents=parameters.num_documents,
        document_tokens=(parameters.document_tokens_min, parameters.document_tokens_max),
        question_tokens=(parameters.question_tokens_min, parameters.question_tokens_max),
        answer_tokens=(parameters.answer_tokens, parameters.answer_tokens),
        vocab_size=parameters.random_tokens,
        seed=parameters.seed,
    )


def _num_requests(arm: Arm, parameters: Headline01) -> int:
    if not arm.prefix_cache:
        return parameters.requests_without_cache
    return parameters.requests_for_p99 if arm.name in LONG_ARMS else parameters.requests_for_p90


def _num_blocks(arm: Arm, parameters: Headline01) -> int:
    return parameters.num_blocks if arm.prefix_cache else 1


def _arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def _ids(token_ids: IntArray | None) -> IntArray:
    if token_ids is None:
        raise AccountingError("the engine's own documents have no token ids")
    return token_ids


def _in_a_loop_of_its_own(work: Any) -> Any:
    """Run a coroutine to its end in another thread: a notebook's own thread is inside an event loop already."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="p99lab-clients") as executor:
        return executor.submit(asyncio.run, work).result()


def _summary_row(cell: Cell) -> dict[str, Any]:
    metrics = cell.metrics
    latency, first = metrics["e2e"], metrics["ttft"]
    p90, p99 = latency.percentiles["p90"], latency.percentiles["p99"]
    return {
        "arm": cell.arm.name,
        "load": cell.load,
        "n": latency.n,
        "requests/s": cell.requests_per_s,
        "TTFT P50 (s)": first.percentiles["p50"].value,
        "E2E P50 (s)": latency.percentiles["p50"].value,
        "E2E P90 (s)": p90.value,
        "E2E P99 (s)": p99.value,
        "P99 low (s)": p99.low,
        "P99 high (s)": p99.high,
        "E2E max (s)": latency.max_s,
        "std (s)": latency.std.value,
        "remark": "; ".join(_remarks(cell, latency)),
    }


def _remarks(cell: Cell, latency: Distribution) -> Iterable[str]:
    yield from (f"void: {reason}" for reason in dict.fromkeys(cell.void))
    if latency.num_failed:
        yield f"{latency.num_failed} failed"
    if latency.n < MIN_N_P99:
        yield f"n too small for a P99 ({MIN_N_P99})"
    elif latency.effective_n < MIN_N_P99:
        yield f"correlated: worth {latency.effective_n} independent requests"


def _ablation_row(cell: Cell) -> dict[str, Any]:
    """The deepest percentile that n allows: P99, else P90, else the maximum."""
    latency = cell.metrics["e2e"]
    for name, key in (("P99", "p99"), ("P90", "p90")):
        tail = latency.percentiles[key]
        if tail.value is not None:
            break
    else:
        name, tail = "max", percentile(np.array([latency.max_s or math.nan]), 0.5)
    value = tail.value if name != "max" else latency.max_s
    median = latency.percentiles["p50"].value
    return {
        "arm": cell.arm.name,
        "p50": math.nan if median is None else median,
        "tail": math.nan if value is None else value,
        "low": math.nan if tail.low is None else tail.low,
        "high": math.nan if tail.high is None else tail.high,
        "tail_name": name,
    }


def _hit_row(block: Block) -> dict[str, Any]:
    hits = block.summary.hit_rates
    return {
        "order": block.order,
        "arm": block.arm.name,
        "load": block.load,
        "block": block.number,
        "declared": hits.declared,
        "checked": hits.verdict,
        "prompt tokens cached": hits.cached_share,
        "document tokens cached": hits.document_share,
        "tier": "device",
        "waited for pages": block.stats.num_refusals,
        "preemptions": block.stats.num_preemptions,
    }


def _window_row(block: Block) -> dict[str, Any]:
    window = block.summary.steady_window
    return {
        "order": block.order,
        "arm": block.arm.name,
        "load": block.load,
        "block": block.number,
        "verdict": window.verdict,
        "from (s)": window.start_s,
        "to (s)": window.end_s,
        "requests": window.num_requests,
        "reason": window.reason or "",
    }


def _tail_figures(baseline: Cell, full: Cell) -> list[Figure]:
    """P99 and spread of both, and their ratios with intervals from the worst pairing of the bounds."""
    figures = []
    for metric, unit in (("p99_e2e", "s"), ("std_e2e", "s")):
        pair = [_tail(metric, cell) for cell in (baseline, full)]
        for which, found in zip(("stock", "full"), pair, strict=True):
            if found.value is not None:
                figures.append(Figure(f"{metric}_{which}", found.value, unit, found.low, found.high, found.n))
        before, after = pair
        if before.value is not None and after.value is not None:
            low = before.low / after.high if before.low is not None and after.high else None
            high = before.high / after.low if before.high is not None and after.low else None
            both = (low, high) if low is not None and high is not None else (None, None)
            name = metric.removesuffix("_e2e") + "_ratio"
            figures.append(Figure(name, before.value / after.value, "x", *both, min(before.n, after.n)))
    return figures


def _tail(metric: str, cell: Cell) -> Any:
    latency = metric_values(cell.used)["e2e"]
    if metric == "std_e2e":
        return spread(latency)
    return percentile(latency, 0.99, effective_size(latency))


def _allocation_figure(baseline: Cell) -> Figure:
    """Percent of the P99 requests' time that went into host work between steps, and into waiting if pages ever lacked.

    The P99 requests: those at or above the lower bound of P99's interval. The figure's interval is a bootstrap over
    them.
    """
    lacked = any(block.stats.num_refusals or block.stats.num_preemptions for block in baseline.blocks)
    tail = _tail("p99_e2e", baseline)
    if tail.low is None:
        return Figure.untestable("share_allocation", takes=f"{MIN_N_P99} independent requests")
    shares = [attribution(record) for record in baseline.used if e2e(record) >= tail.low]
    known = [share for share in shares if share is not None]
    blamed = np.array([share["scheduling"] + (share["queue"] if lacked else 0.0) for share in known])
    whole = np.array([sum(share.values()) for share in known])
    drawn = np.random.default_rng(0).integers(len(known), size=(1000, len(known)))
    low, high = np.quantile(blamed[drawn].sum(1) / whole[drawn].sum(1), [0.025, 0.975])
    return Figure("share_allocation", 100 * blamed.sum() / whole.sum(), "%", 100 * low, 100 * high, len(known))
