"""The headline experiment of notebook 01: the same requests, under the same loads, with one measure more per arm.

All arms run on one engine over one page pool. Before every block the cache is brought to the state the block declares
(`primed`: the documents and nothing else; `cold`: switched off), and the hit counters are checked against it
afterwards. Blocks of all arms are interleaved in seeded random order, so that drift of the machine falls on all alike.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, ModelConfig, SchedulerConfig
from p99lab.engine.request import IntArray
from p99lab.errors import AccountingError
from p99lab.lab.parameters import Headline01
from p99lab.probe.load import Run, drive
from p99lab.probe.records import RequestRecord, to_table
from p99lab.probe.stats import Distribution, Summary, measured, metric_values, summarise
from p99lab.probe.targets import InProcessTarget, shared_interpreter
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
    import pyarrow as pa

    from p99lab.engine.engine import Engine
    from p99lab.engine.stats import EngineStats

LoadKind = Literal["closed", "open"]
OnBlock = Callable[[str], None]
T = TypeVar("T")


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
NOTEBOOK = "01_headline_p99"
BASELINE = "stock"
FULL = [arm.name for arm in ARMS if arm.built][-1]
WEIGHT_WITHOUT_CACHE = 20.0  # a request that computes its document takes about as long as so many that find it
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
    """All that was measured; `headline_tables` shows it, `headline_figures` judges claims by it.

    `geometry`, `workload_digest` and `document_tokens` say what was run; `open_rate` is in requests per second.
    """

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
    torch.set_num_threads(parameters.threads or max(1, threads_before - 1))
    try:
        with shared_interpreter(), Engine(_engine_config(parameters)) as engine:
            return _Experiment(parameters, engine, on_block or (lambda line: None)).run()
    finally:
        torch.set_num_threads(threads_before)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A block that is still to run. `weight`: its share of the time, in closed requests over primed documents."""

    arm: Arm
    load: LoadKind
    number: int
    num_requests: int
    weight: float


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
        self._left_s = parameters.max_measuring_s

    def run(self) -> Headline:
        self._tell(f"priming {len(self._documents)} documents")
        in_a_loop_of_its_own(self._target.prime(self._documents))
        self._warm_up()
        plan = _plan(self._parameters)
        for place, planned in enumerate(plan):
            share = planned.weight / sum(later.weight for later in plan[place:])
            self._block(planned, limit_s=max(1.0, self._left_s * share))
        return Headline(
            parameters=self._parameters,
            geometry=self._parameters.model.removeprefix("dummy:"),
            workload_digest=digest(self._workload, self._documents),
            document_tokens=tuple(document.passage.num_tokens for document in self._documents),
            open_rate=self._open_rate if self._parameters.open_requests else None,
            blocks=tuple(self._blocks),
        )

    def _warm_up(self) -> None:
        """Questions of their own, not measured: kernels are built when a step of a new size first comes."""
        others = self._workload.model_copy(update={"seed": self._parameters.seed + 1})
        num_requests = self._parameters.warmup_requests
        for name in LONG_ARMS if num_requests else ():
            self._tell(f"warming up, {name}")
            self._configure(_arm(name))
            load = ClosedLoad(num_requests=num_requests, concurrency=self._parameters.concurrency)
            sent = queries(others, self._documents, load, self._target.tokenize)
            in_a_loop_of_its_own(drive(self._target, load, sent))

    def _block(self, planned: _Planned, limit_s: float) -> None:
        arm, engine = planned.arm, self._engine
        self._tell(f"{planned.load} load, {arm.name}, block {planned.number + 1}, at most {limit_s:.0f} s")
        self._configure(arm)
        load = self._closed_load(planned, limit_s) if planned.load == "closed" else self._open_load(planned, limit_s)
        sent = self._queries(load, planned)
        began_s = time.perf_counter()
        run = in_a_loop_of_its_own(drive(self._target, load, sent))
        self._left_s -= time.perf_counter() - began_s
        summary, order = summarise(run, load), len(self._blocks)
        self._blocks.append(Block(arm, planned.load, planned.number, order, run, summary, engine.stats()))

    def _configure(self, arm: Arm) -> None:
        """Schedule as the arm does, over a cache that holds the documents and nothing else."""
        engine = self._engine
        engine.quiesce()
        engine.reconfigure(
            arm.scheduler(self._parameters), GroupingConfig(enabled=arm.groups), prefix_cache=arm.prefix_cache
        )
        if arm.prefix_cache:
            engine.forget_except([_ids(document.passage.token_ids) for document in self._documents])

    def _queries(self, load: Load, planned: _Planned) -> Iterator[Query]:
        """The block's stretch of the queries, which begins alike for every arm; all of it is made beforehand."""
        endless = queries(self._workload, self._documents, load, self._target.tokenize)
        concurrency = self._parameters.concurrency
        num_sent = planned.num_requests + load.num_warmup_requests(concurrency)
        if planned.arm.prefix_cache:  # the load is kept up until the last measured one is answered
            num_sent += 8 * concurrency
        longest = math.ceil(self._parameters.requests_for_p99 / self._parameters.num_blocks)
        start = planned.number * (2 * longest + 16 * concurrency)
        return iter(list(itertools.islice(endless, start, start + num_sent)))

    def _closed_load(self, planned: _Planned, limit_s: float) -> ClosedLoad:
        return ClosedLoad(
            num_requests=planned.num_requests,
            duration_s=limit_s,
            concurrency=self._parameters.concurrency,
            warmup_share=0.1 if planned.arm.prefix_cache else 0.0,  # nothing to warm, and each request takes seconds
            cache=planned.arm.cache_state,
        )

    def _open_load(self, planned: _Planned, limit_s: float) -> OpenLoad:
        return OpenLoad(num_requests=planned.num_requests, duration_s=limit_s, rate=self._open_rate, cache="primed")

    @property
    def _open_rate(self) -> float:
        """A share of what `stock` can answer at most, the same for all arms, in requests per second."""
        rates = [b.summary.requests_per_s or 0.0 for b in self._blocks if (b.arm.name, b.load) == (BASELINE, "closed")]
        return self._parameters.open_share * sum(rates) / len(rates)


def _plan(parameters: Headline01) -> list[_Planned]:
    """Closed blocks of all arms in seeded random order, then the open ones, whose rate the closed ones decide."""
    closed = [_closed_block(arm, number, parameters) for arm in ARMS for number in range(_num_blocks(arm, parameters))]
    random.Random(parameters.seed).shuffle(closed)
    num_open = parameters.open_requests
    pace = 1.0 / parameters.open_share  # an open load is answered no faster than it arrives
    opened = [_Planned(_arm(name), "open", 0, num_open, num_open * pace) for name in LONG_ARMS if num_open]
    return closed + opened


def _closed_block(arm: Arm, number: int, parameters: Headline01) -> _Planned:
    num_requests = math.ceil(_num_requests(arm, parameters) / _num_blocks(arm, parameters))
    weight = num_requests if arm.prefix_cache else num_requests * WEIGHT_WITHOUT_CACHE
    return _Planned(arm, "closed", number, num_requests, weight)


def _engine_config(parameters: Headline01) -> EngineConfig:
    """A pool that holds the documents, every client's private pages, and as much again for what has been answered."""
    page_size = CacheConfig().page_size
    document_pages = -(-parameters.document_tokens_max // page_size)
    private_tokens = parameters.question_tokens_max + parameters.answer_tokens_max
    client_pages = document_pages + -(-private_tokens // page_size) + 1  # without a cache it holds its document too
    return EngineConfig(
        model=ModelConfig(name=parameters.model, dtype=parameters.dtype, device=parameters.device),
        cache=CacheConfig(
            page_size=page_size,
            num_pages=document_pages * parameters.num_documents + 2 * client_pages * parameters.concurrency,
        ),
    )


def _workload(parameters: Headline01) -> Workload:
    return Workload.parse(
        {
            "num_documents": parameters.num_documents,
            "document_tokens": (parameters.document_tokens_min, parameters.document_tokens_max),
            "question_tokens": (parameters.question_tokens_min, parameters.question_tokens_max),
            "answer_tokens": (parameters.answer_tokens_min, parameters.answer_tokens_max),
            "vocab_size": parameters.random_tokens,
            "seed": parameters.seed,
        }
    )


def _num_requests(arm: Arm, parameters: Headline01) -> int:
    if not arm.prefix_cache:
        return parameters.requests_without_cache
    return parameters.requests_for_p99 if arm.name in LONG_ARMS else parameters.requests_for_p90


def _num_blocks(arm: Arm, parameters: Headline01) -> int:
    if not arm.built:
        return 0
    return parameters.num_blocks if arm.prefix_cache else 1


def _arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def _ids(token_ids: IntArray | None) -> IntArray:
    if token_ids is None:
        raise AccountingError("the engine's own documents have no token ids")
    return token_ids


def in_a_loop_of_its_own(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in another thread: a notebook's own thread is inside an event loop already.

    An interrupt cancels the coroutine, waits until it has tidied up, and goes on.
    """
    begun: Future[Callable[[], Any]] = Future()

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # asyncio.run made one
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="p99lab-clients") as executor:
        try:
            return executor.submit(asyncio.run, cancellable()).result()
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # its loop is closed: it has just ended
                begun.result()()
            raise
