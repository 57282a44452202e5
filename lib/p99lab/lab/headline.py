"""The headline experiment of notebook 01: the same requests, under the same loads, with one measure more per arm.

All arms run on one engine over one page pool. Before every block the cache is brought to the state the block declares
(`primed`: the documents and nothing else; `cold`: switched off), and the hit counters are checked against it
afterwards. Blocks of all arms are interleaved in seeded random order, so that drift of the machine falls on all alike;
a peer's come before them, because two engines do not share a device. A block is a work unit: a resumed run takes over
those that are finished and measures the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from p99lab.engine.config import CacheConfig, EngineConfig, ModelConfig
from p99lab.engine.request import IntArray
from p99lab.errors import AccountingError, P99labError
from p99lab.lab import headline_checks, headline_units
from p99lab.lab.headline_arms import ARMS, Arm, full_set, long_arms, measured_arms
from p99lab.lab.headline_clients import Asked, Clients, Stretch, clients, in_a_loop_of_its_own, peer_clients
from p99lab.lab.headline_loads import Planned, all_loads, closed_load, open_load, open_s, plan, skipped
from p99lab.lab.headline_units import Measurement
from p99lab.lab.parameters import Headline01
from p99lab.lab.units import Unit, Units
from p99lab.lab.vllm_server import PeerError, spec_of
from p99lab.probe.load import Run
from p99lab.probe.records import RequestRecord, to_table
from p99lab.probe.stats import Distribution, Summary, measured, metric_values, summarise
from p99lab.probe.targets import InProcessTarget, TargetError, shared_interpreter
from p99lab.probe.workload import ClosedLoad, OpenLoad, digest

if TYPE_CHECKING:
    import pyarrow as pa

    from p99lab.engine.engine import Engine
    from p99lab.engine.stats import EngineStats

OnBlock = Callable[[str], None]
NOTEBOOK = "01_headline_p99"


@dataclass(frozen=True, slots=True)
class Block:
    """One arm under one load, without a pause.

    `load`: its name. `run`: without the cold documents of a churn, which are in `cold`. `stats`: the engine's counters
    over the block, warm-up included; None of a peer. `rate`: requests per second that an open load offered.
    """

    arm: Arm
    load: str
    number: int
    order: int  # in which the blocks ran
    run: Run
    summary: Summary
    stats: EngineStats | None
    rate: float | None = None
    cold: tuple[RequestRecord, ...] = ()

    @property
    def used(self) -> list[RequestRecord]:
        """The measured requests of the steady window."""
        window = self.summary.steady_window
        return measured(self.run.records)[window.first : window.last + 1]


@dataclass(frozen=True, slots=True)
class Cell:
    """All blocks of one arm under one load, taken together."""

    arm: Arm
    load: str
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

    `geometry`, `workload_digest`, `document_tokens` and `ids` say what was run. `left_out`: why an arm, or an arm under
    a load (`arm: load`), was not run after all.
    """

    parameters: Headline01
    geometry: str
    workload_digest: str
    document_tokens: tuple[int, ...]
    ids: str
    left_out: dict[str, str]
    blocks: tuple[Block, ...] = field(repr=False)

    @property
    def loads(self) -> list[str]:
        """The names of the loads that were run, the closed one first."""
        run = {block.load for block in self.blocks}
        known = [load.name for load in all_loads(self.parameters)]
        return [name for name in known if name in run] + sorted(run.difference(known))

    @property
    def full(self) -> Arm | None:
        """The arm that has every measure that was tried."""
        return full_set(self.parameters)

    @property
    def open_rate(self) -> float | None:
        """Of the open load whose rate is common to all arms."""
        return next((block.rate for block in self.blocks if block.load == "open"), None)

    def cells(self, load: str) -> list[Cell]:
        """By arm, in the order of `ARMS`; arms that did not run are left out."""
        found = [(arm, tuple(b for b in self.blocks if b.load == load and b.arm == arm)) for arm in ARMS]
        return [Cell(arm, load, blocks) for arm, blocks in found if blocks]

    def all_cells(self) -> list[Cell]:
        return [cell for load in self.loads for cell in self.cells(load)]

    def cell(self, arm: str, load: str = "closed") -> Cell | None:
        """None where it was not run."""
        return next((cell for cell in self.cells(load) if cell.arm.name == arm), None)

    def requests(self) -> pa.Table:
        """Every request of every block, all phases."""
        import pyarrow as pa

        tables = [
            to_table(
                (*block.run.records, *block.cold),
                arm=block.arm.name,
                load=block.load,
                block=f"{block.number + 1}",
                transport=self.parameters.transport,
            )
            for block in self.blocks
        ]
        return pa.concat_tables(tables)


def run(parameters: Headline01, on_block: OnBlock | None = None, units: Units | None = None) -> Headline:
    """Prime one engine and run all blocks on it, and before that a peer's on the peer. Minutes.

    Args:
        on_block: told what begins, one line per block.
        units: where finished blocks are kept, and found by a resumed run; without it none are.

    Raises:
        ModelError: the model cannot be used.
        BadParameterError: what the parameters ask for cannot be measured here (`headline_checks`).
        P99labError: no arm was measured after all: why.
    """
    headline_checks.check(parameters)
    experiment = _Experiment(parameters, Asked.of(parameters), on_block or (lambda line: None), units)
    with _threads(parameters), shared_interpreter():
        experiment.run()
    return experiment.outcome()


@contextlib.contextmanager
def _threads(parameters: Headline01) -> Iterator[None]:
    """Torch's threads as the parameters have them, and as they were on leaving."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(parameters.threads or max(1, before - 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Experiment:
    """One run of the notebook: its targets, their clients, the documents, and the queries that every arm is sent."""

    def __init__(self, parameters: Headline01, asked: Asked, tell: OnBlock, units: Units | None) -> None:
        self._parameters = parameters
        self._asked = asked
        self._tell = tell
        self._units = units
        self._plan = plan(parameters)
        self._restored = _finished(self._plan, units)
        self._blocks: list[Block] = []
        self._left_out: dict[str, str] = {}
        self._left_s = parameters.max_measuring_s

    def run(self) -> None:
        own = [planned for planned in self._plan if not planned.arm.is_peer]
        if self._peers:
            self._run_peer(self._peers)
        if self._to_measure(own):
            self._run_engine(own)
        else:
            self._run_blocks(own, None)

    def outcome(self) -> Headline:
        if not self._blocks:
            raise P99labError(f"nothing was measured: {'; '.join(f'{k}, {v}' for k, v in self._left_out.items())}")
        return Headline(
            parameters=self._parameters,
            geometry=self._parameters.model.removeprefix("dummy:"),
            workload_digest=digest(self._asked.workload, self._asked.documents),
            document_tokens=tuple(document.passage.num_tokens for document in self._asked.documents),
            ids=self._asked.source,
            left_out=self._left_out,
            blocks=tuple(self._blocks),
        )

    @property
    def _peers(self) -> list[Planned]:
        return [planned for planned in self._plan if planned.arm.is_peer]

    def _to_measure(self, blocks: Sequence[Planned]) -> list[Planned]:
        return [planned for planned in blocks if planned.name not in self._restored]

    # --- targets ----------------------------------------------------------------------------------------------------

    def _run_peer(self, blocks: Sequence[Planned]) -> None:
        """A peer that cannot be started leaves its arm out; the page says why."""
        name, parameters = blocks[0].arm.name, self._parameters
        spec = spec_of(parameters.vllm_site, parameters.vllm_model, parameters.vllm_arguments)
        if spec is None or not self._to_measure(blocks):
            self._run_blocks(blocks, None)
            return
        self._tell(f"starting {name}")
        try:
            with peer_clients(spec, self._asked) as sending:
                self._tell(f"priming {len(self._asked.documents)} documents, {name}")
                sending.prime()
                self._warm_up(sending)
                self._run_blocks(blocks, _Target(sending, None))
        except (PeerError, TargetError) as error:
            self._left_out[name] = f"not run: {error}"
            self._tell(f"{name} {self._left_out[name]}")

    def _run_engine(self, blocks: Sequence[Planned]) -> None:
        from p99lab.engine.engine import Engine

        parameters = self._parameters
        with Engine(_engine_config(parameters)) as engine, clients(parameters, engine, self._asked) as sending:
            self._tell(f"priming {len(self._asked.documents)} documents")
            self._configure(engine, _priming_arm(parameters))
            in_a_loop_of_its_own(InProcessTarget(engine, parameters.model).prime(self._asked.documents))
            for arm in long_arms(parameters):
                if not arm.is_peer and parameters.warmup_requests:
                    self._tell(f"warming up, {arm.name}")
                    self._configure(engine, arm)
                    self._warm_up(sending)
            self._run_blocks(blocks, _Target(sending, engine))

    def _warm_up(self, sending: Clients) -> None:
        """Questions of their own, not measured: kernels are built when a step of a new size first comes."""
        num_requests = self._parameters.warmup_requests
        if num_requests:
            others = self._asked.workload.model_copy(update={"seed": self._parameters.seed + 1})
            load = ClosedLoad(num_requests=num_requests, concurrency=self._parameters.concurrency)
            sending.drive(load, Stretch(others, 0, None))

    def _configure(self, engine: Engine, arm: Arm) -> None:
        """Schedule as the arm does, over a cache that holds the documents and nothing else."""
        engine.quiesce()
        engine.reconfigure(
            scheduler=arm.scheduler(self._parameters),
            grouping=arm.grouping,
            attention=arm.attention,
            graphs=arm.graphs_config(self._parameters),
            prefix_cache=arm.prefix_cache,
        )
        if arm.prefix_cache:
            engine.forget_except([_ids(document.passage.token_ids) for document in self._asked.documents])

    # --- blocks -----------------------------------------------------------------------------------------------------

    def _run_blocks(self, blocks: Sequence[Planned], target: _Target | None) -> None:
        """Without a target every block has been measured before."""
        for planned in blocks:
            if (unit := self._restored.get(planned.name)) is not None:
                self._restore(planned, unit)
            elif (reason := skipped(planned, self._capacities)) is not None:
                self._left_out[f"{planned.arm.name}: {planned.load.name}"] = reason
                self._tell(f"{planned}, {reason}")
            elif target is not None:
                self._measure(planned, target)

    def _limited(self, planned: Planned, seconds: float | None) -> float:
        """A block's own seconds, or its share of what is left, whichever ends first."""
        left = self._plan[self._plan.index(planned) :]
        share_s = max(1.0, self._left_s * planned.weight / sum(later.weight for later in left))
        return share_s if seconds is None else min(seconds, share_s)

    def _restore(self, planned: Planned, unit: Unit) -> None:
        self._tell(f"{planned}, restored from run {unit.manifest.run_id}")
        self._left_s -= unit.seconds
        self._keep(planned, headline_units.read(unit))

    def _measure(self, planned: Planned, target: _Target) -> None:
        load = self._load(planned)
        self._tell(f"{planned}, at most {load.duration_s:.0f} s")
        if target.engine is not None:
            self._configure(target.engine, planned.arm)
        run = target.clients.drive(load, self._stretch(load, planned))
        seconds = max((record.end_s for record in run.records), default=0.0)  # without what was made beforehand
        self._left_s -= seconds
        measurement = Measurement(load, run, None if target.engine is None else target.engine.stats())
        if self._units is not None:
            self._units.finish(planned.name, headline_units.files(measurement), seconds)
        self._keep(planned, measurement)

    def _keep(self, planned: Planned, made: Measurement) -> None:
        usual, cold = _apart(made.run, len(self._asked.documents))
        self._blocks.append(
            Block(
                arm=planned.arm,
                load=planned.load.name,
                number=planned.number,
                order=len(self._blocks),
                run=usual,
                summary=summarise(usual, made.load),
                stats=made.stats,
                rate=made.load.rate if isinstance(made.load, OpenLoad) else None,
                cold=cold,
            )
        )

    def _load(self, planned: Planned) -> ClosedLoad | OpenLoad:
        parameters = self._parameters
        if planned.load.kind == "closed":
            return closed_load(planned, parameters, self._limited(planned, planned.duration_s))
        rate = planned.load.rate(planned.arm, self._capacities)
        return open_load(planned, parameters, rate, self._limited(planned, open_s(planned, parameters, rate)))

    def _stretch(self, load: ClosedLoad | OpenLoad, planned: Planned) -> Stretch:
        """The block's part of the queries. Where requests are counted, what can be needed is made before it begins."""
        if planned.num_requests is None:
            return Stretch(self._asked.workload, planned.first_query, None)
        concurrency = self._parameters.concurrency
        num_sent = planned.num_requests + load.num_warmup_requests(concurrency)
        if planned.arm.prefix_cache:  # the load is kept up until the last measured one is answered
            num_sent += 8 * concurrency
        return Stretch(self._asked.workload, planned.first_query, num_sent)

    @property
    def _capacities(self) -> dict[str, float]:
        """What each arm has answered under the closed load so far, requests per second; void blocks do not count."""
        found: dict[str, list[float]] = {}
        for block in self._blocks:
            if block.load == "closed" and not block.summary.void:
                found.setdefault(block.arm.name, []).append(block.summary.requests_per_s or 0.0)
        return {name: sum(rates) / len(rates) for name, rates in found.items()}


@dataclass(frozen=True, slots=True)
class _Target:
    """What a block is sent to. `engine`: None of a peer, which cannot be told how to schedule."""

    clients: Clients
    engine: Engine | None


def _apart(run: Run, num_documents: int) -> tuple[Run, tuple[RequestRecord, ...]]:
    """The run without the cold documents of a churn, and those; they are numbered from `num_documents` on."""
    cold = tuple(record for record in run.records if record.document >= num_documents)
    if not cold:
        return run, ()
    return replace(run, records=tuple(record for record in run.records if record.document < num_documents)), cold


def _finished(blocks: Sequence[Planned], units: Units | None) -> dict[str, Unit]:
    """The blocks that need not be measured again, by the names of their units."""
    if units is None:
        return {}
    return {planned.name: unit for planned in blocks if (unit := units.get(planned.name)) is not None}


def _priming_arm(parameters: Headline01) -> Arm:
    """The last measured arm that takes prompts in chunks."""
    own = [arm for arm in measured_arms(parameters) if not arm.is_peer and arm.composition == "chunked"]
    return own[-1] if own else next(arm for arm in ARMS if arm.composition == "chunked")


def _engine_config(parameters: Headline01) -> EngineConfig:
    """The priming arm's, with room for every measured arm's steps. On a GPU the pool takes what memory is left."""
    base = EngineConfig(
        model=ModelConfig(name=parameters.model, dtype=parameters.dtype, device=parameters.device),
        cache=CacheConfig(num_pages=None if parameters.on_gpu else _num_pages(parameters)),
    )
    config = _priming_arm(parameters).engine_config(base, parameters)
    whole = [arm for arm in measured_arms(parameters) if not arm.is_peer and arm.composition == "stock"]
    return config.model_copy(update={"scheduler": whole[0].scheduler(parameters)}) if whole else config


def _num_pages(parameters: Headline01) -> int:
    """The documents, every client's private pages, and as much again for what has been answered; with churn room for
    two cold documents besides."""
    page_size = CacheConfig().page_size
    documents, questions, answers = parameters.lengths
    document_pages = -(-documents[1] // page_size)
    client_pages = (
        document_pages + -(-(questions[1] + answers[1]) // page_size) + 1
    )  # without a cache: its document too
    num_documents = parameters.num_documents + 2 * bool(parameters.cold_documents)
    return document_pages * num_documents + 2 * client_pages * parameters.concurrency


def _ids(token_ids: IntArray | None) -> IntArray:
    if token_ids is None:
        raise AccountingError("the engine's own documents have no token ids")
    return token_ids
