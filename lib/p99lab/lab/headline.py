"""The headline experiment of notebook 01: the same requests, under the same loads, with one measure more per arm.

All arms run on one engine over one page pool. Before every block the cache is brought to the state the block declares
(`primed`: the documents and nothing else; `cold`: switched off), and the hit counters are checked against it
afterwards. Blocks of all arms are interleaved in seeded random order, so that drift of the machine falls on all alike.
A block is a work unit: a resumed run takes over those that are finished and measures the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, ModelConfig, SchedulerConfig
from p99lab.engine.request import IntArray
from p99lab.errors import AccountingError
from p99lab.lab import headline_units
from p99lab.lab.headline_clients import Clients, Stretch, clients, in_a_loop_of_its_own
from p99lab.lab.headline_units import Measurement
from p99lab.lab.parameters import Headline01
from p99lab.lab.units import Unit, Units
from p99lab.probe.documents import Document
from p99lab.probe.load import Run
from p99lab.probe.records import RequestRecord, to_table
from p99lab.probe.stats import Distribution, Summary, measured, metric_values, summarise
from p99lab.probe.targets import InProcessTarget, shared_interpreter
from p99lab.probe.workload import (
    CacheState,
    ClosedLoad,
    Load,
    OpenLoad,
    Workload,
    digest,
    make_documents,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from p99lab.engine.engine import Engine
    from p99lab.engine.stats import EngineStats

LoadKind = Literal["closed", "open"]
OnBlock = Callable[[str], None]


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
            to_table(
                block.run.records,
                arm=block.arm.name,
                load=block.load,
                block=f"{block.number}",
                transport=self.parameters.transport,
            )
            for block in self.blocks
        ]
        return pa.concat_tables(tables)


def run(parameters: Headline01, on_block: OnBlock | None = None, units: Units | None = None) -> Headline:
    """Prime one engine and run all blocks on it. Minutes.

    Args:
        on_block: told what begins, one line per block.
        units: where finished blocks are kept, and found by a resumed run; without it none are.

    Raises:
        ModelError: the model cannot be used.
    """
    import torch

    from p99lab.engine.engine import Engine

    threads_before = torch.get_num_threads()
    torch.set_num_threads(parameters.threads or max(1, threads_before - 1))
    try:
        with shared_interpreter(), Engine(_engine_config(parameters)) as engine:
            target, workload = InProcessTarget(engine, parameters.model), _workload(parameters)
            documents = make_documents(workload, target.tokenize)
            with clients(parameters, engine, workload, documents) as sending:
                experiment = _Experiment(parameters, engine, sending, documents, on_block or (lambda line: None), units)
                return experiment.run()
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

    @property
    def name(self) -> str:
        """Its work unit's."""
        return f"{self.load}.{self.arm.name.replace(' ', '-')}.{self.number + 1}"

    def __str__(self) -> str:
        return f"{self.load} load, {self.arm.name}, block {self.number + 1}"


class _Experiment:
    """One run of the notebook: an engine, its clients, the documents, and the queries that every arm is sent."""

    def __init__(
        self,
        parameters: Headline01,
        engine: Engine,
        sending: Clients,
        documents: tuple[Document, ...],
        tell: OnBlock,
        units: Units | None,
    ) -> None:
        self._parameters = parameters
        self._engine = engine
        self._clients = sending
        self._documents = documents
        self._tell = tell
        self._units = units
        self._plan = _plan(parameters)
        self._restored = _finished(self._plan, units)
        self._workload = _workload(parameters)
        self._blocks: list[Block] = []
        self._left_s = parameters.max_measuring_s

    def run(self) -> Headline:
        if len(self._restored) < len(self._plan):
            self._tell(f"priming {len(self._documents)} documents")
            self._prime()
            self._warm_up()
        for place, planned in enumerate(self._plan):
            if (unit := self._restored.get(planned.name)) is not None:
                self._restore(planned, unit)
                continue
            share = planned.weight / sum(later.weight for later in self._plan[place:])
            self._measure(planned, limit_s=max(1.0, self._left_s * share))
        return Headline(
            parameters=self._parameters,
            geometry=self._parameters.model.removeprefix("dummy:"),
            workload_digest=digest(self._workload, self._documents),
            document_tokens=tuple(document.passage.num_tokens for document in self._documents),
            open_rate=self._open_rate if self._parameters.open_requests else None,
            blocks=tuple(self._blocks),
        )

    def _prime(self) -> None:
        """In this process under either transport: it fills the cache, and is not measured."""
        in_a_loop_of_its_own(InProcessTarget(self._engine, self._parameters.model).prime(self._documents))

    def _warm_up(self) -> None:
        """Questions of their own, not measured: kernels are built when a step of a new size first comes."""
        others = self._workload.model_copy(update={"seed": self._parameters.seed + 1})
        num_requests = self._parameters.warmup_requests
        for name in LONG_ARMS if num_requests else ():
            self._tell(f"warming up, {name}")
            self._configure(_arm(name))
            load = ClosedLoad(num_requests=num_requests, concurrency=self._parameters.concurrency)
            self._clients.drive(load, Stretch(others, 0, None))

    def _restore(self, planned: _Planned, unit: Unit) -> None:
        self._tell(f"{planned}, restored from run {unit.manifest.run_id}")
        self._left_s -= unit.seconds
        self._keep(planned, headline_units.read(unit))

    def _measure(self, planned: _Planned, limit_s: float) -> None:
        self._tell(f"{planned}, at most {limit_s:.0f} s")
        self._configure(planned.arm)
        load = self._closed_load(planned, limit_s) if planned.load == "closed" else self._open_load(planned, limit_s)
        run = self._clients.drive(load, self._stretch(load, planned))
        seconds = max((record.end_s for record in run.records), default=0.0)  # without what was made beforehand
        self._left_s -= seconds
        measurement = Measurement(load, run, self._engine.stats())
        if self._units is not None:
            self._units.finish(planned.name, headline_units.files(measurement), seconds)
        self._keep(planned, measurement)

    def _keep(self, planned: _Planned, made: Measurement) -> None:
        summary, order = summarise(made.run, made.load), len(self._blocks)
        self._blocks.append(Block(planned.arm, planned.load, planned.number, order, made.run, summary, made.stats))

    def _configure(self, arm: Arm) -> None:
        """Schedule as the arm does, over a cache that holds the documents and nothing else."""
        engine = self._engine
        engine.quiesce()
        engine.reconfigure(
            arm.scheduler(self._parameters), GroupingConfig(enabled=arm.groups), prefix_cache=arm.prefix_cache
        )
        if arm.prefix_cache:
            engine.forget_except([_ids(document.passage.token_ids) for document in self._documents])

    def _stretch(self, load: Load, planned: _Planned) -> Stretch:
        """The block's part of the queries, which begins alike for every arm."""
        concurrency = self._parameters.concurrency
        num_sent = planned.num_requests + load.num_warmup_requests(concurrency)
        if planned.arm.prefix_cache:  # the load is kept up until the last measured one is answered
            num_sent += 8 * concurrency
        longest = math.ceil(self._parameters.requests_for_p99 / self._parameters.num_blocks)
        return Stretch(self._workload, planned.number * (2 * longest + 16 * concurrency), num_sent)

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


def _finished(plan: Iterable[_Planned], units: Units | None) -> dict[str, Unit]:
    """The blocks that need not be measured again, by the names of their units."""
    if units is None:
        return {}
    return {planned.name: unit for planned in plan if (unit := units.get(planned.name)) is not None}


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
