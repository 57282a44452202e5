"""`closed-idle` of `p99lab bench h200`: the time in which no step runs under the closed load, clients in the engine's
loop.

Each client asks its next question as soon as the one before is answered, in the thread that steps, so that no process
or transport stands between engine and figure. A step lasts from its first kernel to its last: where it was not
replayed from a graph, pauses between its kernels count as the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p99lab.engine.engine import Engine
from p99lab.engine.events import TokenEvent, Usage
from p99lab.engine.request import SamplingParams
from p99lab.engine.stats import EngineStats
from p99lab.errors import AccountingError
from p99lab.lab.bench import h200_scheduling
from p99lab.lab.bench.h200_sizes import CASES, IDLE_BAR, H200Bench
from p99lab.lab.bench.rows import BenchRow
from p99lab.probe.documents import Document
from p99lab.probe.workload import ClosedLoad, queries

FIRST_QUERY = 500_000  # far from those of other cases
PARTS = ("schedule", "launch", "wait", "update")
IN_PROCESS = "in process"


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """What some time of the load has shown. `e2e_s`: of the requests that ended in it."""

    wall_s: float
    before: EngineStats
    after: EngineStats
    e2e_s: NDArray[np.float64]

    @property
    def num_steps(self) -> int:
        return self.after.num_steps - self.before.num_steps

    @property
    def num_tokens(self) -> int:
        return self.after.num_step_tokens - self.before.num_step_tokens

    @property
    def graph_share(self) -> float:
        """Of the steps, those replayed from a graph."""
        return self.spent("num_graph_steps") / self.num_steps

    @property
    def idle_share(self) -> float:
        """Of the time, that in which the device (where it has no clock, the engine) had no step."""
        busy_s = self.spent("device_s") or self.spent("busy_s")
        return max(0.0, 1.0 - busy_s / self.wall_s)

    def host_s(self, part: str) -> float:
        """A step's share of what the host did, see `StepTimes`; `rest`: clients, and whatever is no part."""
        if part == "rest":
            return self.wall_s / self.num_steps - sum(self.host_s(each) for each in PARTS)
        return self.spent(f"{part}_s") / self.num_steps

    def spent(self, name: str) -> float:
        """By how much a counter of `EngineStats` has grown."""
        return float(getattr(self.after, name) - getattr(self.before, name))


class LoopClients:
    """`num_clients` of them; `ended` grows by the bill of each request that has ended."""

    def __init__(self, engine: Engine, bench: H200Bench, documents: Sequence[Document]) -> None:
        self._engine = engine
        load = ClosedLoad(num_requests=1, concurrency=bench.num_requests)  # closed: queries have no times
        self._queries = queries(bench.closed, documents, load, first=FIRST_QUERY)
        self._asks = True
        self.ended: list[Usage] = []

    def stop(self) -> None:
        """Ask nothing more, whatever ends."""
        self._asks = False

    def ask(self) -> None:
        """One client's next question."""
        query = next(self._queries)
        prompt = query.prompt.token_ids
        if prompt is None:
            raise AccountingError("a synthetic passage without token ids")
        sampling = SamplingParams(max_tokens=query.max_tokens, ignore_eos=True)
        self._engine.add(prompt, sampling, on_event=self._on_event, detokenize=False)

    def _on_event(self, event: TokenEvent) -> None:
        if event.usage is not None:
            self.ended.append(event.usage)
            if self._asks:
                self.ask()


def measure(bench: H200Bench, engine: Engine, documents: Sequence[Document]) -> ClosedRun:
    """Run the load. The engine has no requests before and after, and is as it was."""
    usual = engine.config.scheduler
    engine.quiesce()
    engine.reconfigure(scheduler=h200_scheduling.closed(bench))
    engine.forget_except([ids for document in documents if (ids := document.passage.token_ids) is not None])
    clients = LoopClients(engine, bench, documents)
    for _ in range(bench.num_requests):
        clients.ask()
    _advance(engine, bench.closed_warmup_s)
    num_before, before, began_s = len(clients.ended), engine.stats(), time.perf_counter()
    _advance(engine, bench.closed_s)
    after, wall_s = engine.stats(), time.perf_counter() - began_s
    ended = [usage.timeline for usage in clients.ended[num_before:]]
    e2e_s = [times.finished_s - times.arrival_s for times in ended if times.finished_s is not None]
    clients.stop()
    engine.quiesce()
    engine.reconfigure(scheduler=usual)
    return ClosedRun(wall_s, before, after, np.array(e2e_s))


def _advance(engine: Engine, seconds: float) -> None:
    """Whole steps: it ends when one has been taken in."""
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        engine.advance()


def rows(bench: H200Bench, found: ClosedRun, floor_s: float) -> Iterator[BenchRow]:
    """Time without a step, host times and, as information, what the clients saw. `floor_s`: of a round of clients."""
    n, bar = found.num_steps, IDLE_BAR if bench.is_stated else None
    replayed = f"{100 * found.graph_share:.3g} % of steps replayed from a graph"
    note = f"{replayed}; in the others pauses between kernels count as the step"
    yield BenchRow(f"closed-idle: {CASES['closed-idle']}", 100 * found.idle_share, "%", 0.0, n=n, bar=bar, note=note)
    for part in (*PARTS, "rest"):
        yield BenchRow(f"closed-idle: host, {part}, a step", 1e3 * found.host_s(part), "ms", n=n)
    yield BenchRow("closed-idle: tokens, a step", found.num_tokens / n, "tokens", n=n)
    for what, name in (("replayed from a graph", "num_graph_steps"), ("left to slower kernels", "num_fallback_steps")):
        yield BenchRow(f"closed-idle: steps {what}", 100 * found.spent(name) / n, "%", n=n)
    e2e_s = found.e2e_s
    if len(e2e_s) == 0:
        return
    yield BenchRow("closed-idle: requests", len(e2e_s) / found.wall_s, "1/s", n=len(e2e_s), note=IN_PROCESS)
    p50_s, p99_s = np.percentile(e2e_s, [50, 99]).tolist()
    e2e = ("closed-idle: E2E P50", p50_s, "s", floor_s, p50_s / floor_s)
    yield BenchRow(*e2e, n=len(e2e_s), note=IN_PROCESS)
    for name, seconds in (("P99", p99_s), ("std", float(e2e_s.std()))):
        yield BenchRow(f"closed-idle: E2E {name}", seconds, "s", n=len(e2e_s), note=IN_PROCESS)
