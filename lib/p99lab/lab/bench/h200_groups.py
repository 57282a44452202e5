"""`groups` of `p99lab bench h200`: steps with the prefix groups that the cost model chooses against steps with none.

The steps are made by hand and run by the engine's own runner: page tables over a pool of random values, no tree and no
scheduler. Those that are compared take turns in a random order, each launched while the one before it runs, as steps
are under load, and their medians count. Two more ways are information: every group that there could be, and none with
the best plain kernels (`PagedAttention`), which no CUDA graph holds.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from p99lab.engine.config import AttentionConfig, GroupingConfig
from p99lab.engine.costs import StepCost, device_costs
from p99lab.engine.geometry import Geometry
from p99lab.engine.grouping import arrange
from p99lab.engine.plan import InFlight, Row, StepPlan
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.lab.bench.h200_floors import ELEMENT_BYTES, Rates, Work, floor_s
from p99lab.lab.bench.h200_runner import BenchRunner
from p99lab.lab.bench.h200_sizes import CASES, GROUPS_BAR, H200Bench
from p99lab.lab.bench.rows import BenchRow

Kind = Literal["even", "skewed", "nested"]

SYSTEM_LEN = 2048  # tokens that nested documents share, at most half of each
LEAST_REPEATS, MOST_REPEATS, PLAIN_REPEATS = 3, 25, 3
NUM_WORST = 5  # steps that are shown


@dataclass(frozen=True)
class Cell:
    """A step of one row a request.

    `kind`: requests are spread evenly over the documents; each document but the last has half of those that are left;
    or evenly, over documents that begin with the same tokens. `asks`: one row of each document is a question, the
    others decode; without, all decode.
    """

    num_requests: int
    num_documents: int
    prefix_len: int
    kind: Kind
    asks: bool
    question_len: int
    private_len: int  # tokens that a decoding request has of its own
    page_size: int

    def __str__(self) -> str:
        kind = "" if self.kind == "even" else f", {self.kind}"
        asks = ", a question on each" if self.asks else ""
        return f"{self.num_requests} on {self.num_documents} × {self.prefix_len}{kind}{asks}"

    @cached_property
    def document_of(self) -> IntArray:
        """Whom each request reads, [num_requests]; in the order of their arrival, which mixes documents."""
        if self.kind != "skewed":
            return np.arange(self.num_requests, dtype=np.int32) % self.num_documents
        left, sizes = self.num_requests, []
        for num_after in range(self.num_documents - 1, -1, -1):
            sizes.append(max(1, min(left // 2, left - num_after)) if num_after else left)
            left -= sizes[-1]
        readers = np.repeat(np.arange(self.num_documents, dtype=np.int32), sizes)
        return np.random.default_rng(0).permutation(readers)

    @property
    def system_pages(self) -> int:
        """That all documents begin with."""
        return min(SYSTEM_LEN, self.prefix_len // 2) // self.page_size if self.kind == "nested" else 0

    @property
    def num_pages(self) -> int:
        """From page 0 on. Between what different rows read lies a page that nobody reads: nothing runs on by chance."""
        return self._first_private + self.num_requests * self._private_stride

    @property
    def _own_pages(self) -> int:
        return self.prefix_len // self.page_size - self.system_pages

    @property
    def _private_stride(self) -> int:
        return -(-max(self.private_len + 1, self.question_len) // self.page_size) + 1

    @property
    def _first_private(self) -> int:
        return self.system_pages + 1 + self.num_documents * (self._own_pages + 1)

    def rows(self) -> list[Row]:
        """In the order of arrival."""
        document_of = self.document_of.tolist()
        return [self._row(i, document, document_of.index(document) == i) for i, document in enumerate(document_of)]

    def _row(self, index: int, document: int, is_first: bool) -> Row:
        asks = self.asks and is_first
        num_tokens, num_private = (self.question_len, 0) if asks else (1, self.private_len)
        own = self.system_pages + 1 + document * (self._own_pages + 1)
        private = self._first_private + index * self._private_stride
        pages = [
            np.arange(self.system_pages),
            np.arange(own, own + self._own_pages),
            np.arange(private, private + -(-(num_private + num_tokens) // self.page_size)),
        ]
        table = np.concatenate(pages).astype(np.int32)
        ids = np.full(num_tokens, 1 + index % 7, np.int32)
        return Row(f"row-{index}", index, ids, self.prefix_len + num_private, table, True, SamplingParams(), 0)

    @property
    def work(self) -> Work:
        rows = self.rows()
        lengths = np.array([len(row.token_ids) for row in rows])
        known = np.array([row.num_computed_tokens for row in rows])
        shared = self.page_size * (self.system_pages + self.num_documents * self._own_pages)
        return Work(
            num_tokens=int(lengths.sum()),
            num_sampled=len(rows),
            num_kv_tokens=int(shared + (known - self.prefix_len).sum()),
            num_pairs=int((lengths * known + lengths * (lengths + 1) // 2).sum()),
        )


@dataclass(frozen=True, slots=True)
class Ways:
    """One step in three ways: `plain` in the order of arrival and without groups, `chosen` as the engine would run it,
    `every` with each group that is possible."""

    plain: StepPlan
    chosen: StepPlan
    every: StepPlan

    @classmethod
    def of(cls, cell: Cell, costs: StepCost | None) -> Ways:
        rows = cell.rows()
        least = GroupingConfig().min_shared_tokens

        def arranged(min_shared_tokens: int, costs: StepCost | None) -> StepPlan:
            order, groups = arrange(rows, cell.page_size, min_shared_tokens, costs)
            return StepPlan(0, tuple(rows[i] for i in order), groups)

        return cls(StepPlan(0, tuple(rows)), arranged(least, costs), arranged(1, None))

    @property
    def different(self) -> dict[str, StepPlan]:
        """By name; a way that is the same as one before it is left out."""
        found = {"plain": self.plain}
        if self.chosen.groups:
            found["chosen"] = self.chosen
        if self.every.groups not in ((), self.chosen.groups):
            found["every"] = self.every
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell's medians, seconds; `n` steps of each. Ways that are the same step have the same time."""

    cell: Cell
    num_groups: int
    floor_s: float
    plain_s: float
    chosen_s: float
    every_s: float
    paged_s: float
    n: int
    predicted_s: tuple[float, float] | None  # plain, chosen

    @property
    def ratio(self) -> float:
        return self.chosen_s / self.plain_s

    @property
    def every_ratio(self) -> float:
        return self.every_s / self.plain_s


def grid(bench: H200Bench, page_size: int) -> list[Cell]:
    """All steps of the sweep, whether the pool holds them or not."""
    most = max(bench.group_requests)
    private_len = bench.question_len + bench.closed_answer_len
    alone = Cell(1, 1, page_size, "even", False, bench.question_len, private_len, page_size)
    pairs = [(r, d) for r in bench.group_requests for d in bench.group_documents if d <= r]
    between = [d for d in bench.group_documents if 1 < d < most]
    asking = {bench.group_requests[len(bench.group_requests) // 2], most}
    cells = []
    for prefix_len in bench.group_prefixes:
        at = replace(alone, prefix_len=max(1, prefix_len // page_size) * page_size)
        cells += [replace(at, num_requests=r, num_documents=d) for r, d in pairs]
        for d in between[len(between) // 2 :][:1]:
            cells += [replace(at, num_requests=most, num_documents=d, kind=kind) for kind in ("skewed", "nested")]
        few = [(r, d) for r, d in pairs if r in asking and d in bench.group_documents[::2]]
        cells += [replace(at, num_requests=r, num_documents=d, asks=True) for r, d in few]
    return cells


def rows(bench: H200Bench, runner: BenchRunner, geometry: Geometry, rates: Rates) -> Iterator[BenchRow]:
    """Each step's rows, as details, as soon as they are known; then what they come to."""
    pool = runner.pool
    runner.fill(bench.seed)
    cells = [cell for cell in grid(bench, pool.page_size) if cell.num_pages <= pool.k.shape[1]]
    on_gpu = pool.k.device.type == "cuda"
    device = device_costs(torch.cuda.get_device_name(pool.k.device) if on_gpu else "cpu")
    costs = None if device is None else StepCost(device, geometry, pool.page_size, pool.k.element_size())
    found: list[Measured] = []
    for cell in cells:
        floor = floor_s(geometry, cell.work, rates, ELEMENT_BYTES[bench.dtype])
        found.append(_measure(bench, runner, cell, costs, floor))
        yield from _details(bench, found[-1], on_gpu)
    if found:
        yield from summary(bench, found)


def _measure(bench: H200Bench, runner: BenchRunner, cell: Cell, costs: StepCost | None, floor: float) -> Measured:
    ways = Ways.of(cell, costs)
    times = _times(runner, ways.different, bench.group_cell_s)
    with runner.attending(AttentionConfig(kernels="paged")):
        paged = [*step_seconds(runner, [ways.plain] * (PLAIN_REPEATS + 1))][1:]  # the first warms up
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    chosen_s = medians.get("chosen", medians["plain"])
    predicted = [costs.step_time_s(plan.rows, plan.groups) for plan in (ways.plain, ways.chosen)] if costs else None
    return Measured(
        cell=cell,
        num_groups=len(ways.chosen.groups),
        floor_s=floor,
        plain_s=medians["plain"],
        chosen_s=chosen_s,
        every_s=medians.get("every", chosen_s if ways.every.groups else medians["plain"]),
        paged_s=statistics.median(paged),
        n=len(times["plain"]),
        predicted_s=None if predicted is None else (predicted[0], predicted[1]),
    )


def _details(bench: H200Bench, found: Measured, on_gpu: bool) -> Iterator[BenchRow]:
    """A step's rows: with the groups that were chosen, with every one, and with the plain kernels."""
    note = f"{found.num_groups} groups" if found.num_groups else "no groups chosen: the same step"
    if found.predicted_s is not None:
        plain_ms, chosen_ms = (1e3 * seconds for seconds in found.predicted_s)
        note += f"; predicted {chosen_ms:.4g} ms, {plain_ms:.4g} without"
    bar = 1e3 * GROUPS_BAR * found.plain_s if bench.is_stated else None
    yield _detail(found, f"groups, {found.cell}", found.chosen_s, found.n, bar, note)
    yield _detail(found, f"groups, {found.cell}: every group", found.every_s, found.n)
    no_other = None if on_gpu else "no GPU: attention in plain torch, as without"
    yield _detail(found, f"groups, {found.cell}: paged kernels", found.paged_s, PLAIN_REPEATS, note=no_other)


def _detail(
    found: Measured, name: str, seconds: float, n: int, bar: float | None = None, note: str | None = None
) -> BenchRow:
    return BenchRow(
        name=name,
        value=1e3 * seconds,
        unit="ms",
        floor=1e3 * found.floor_s,
        ratio_to_floor=seconds / found.floor_s,
        peer="without groups",
        peer_value=1e3 * found.plain_s,
        ratio_to_peer=found.plain_s / seconds,
        n=n,
        bar=bar,
        note=note,
        detail=True,
    )


def summary(bench: H200Bench, found: Sequence[Measured]) -> Iterator[BenchRow]:
    """The slowest step against the same without groups, which holds the bar or does not; the next ones; information.

    Steps for which no groups were chosen are the same either way, and stand for nothing while there are others.
    """
    chosen = [one for one in found if one.num_groups]
    worst = sorted(chosen or found, key=lambda one: one.ratio, reverse=True)[:NUM_WORST]
    note = f"{worst[0].cell}; groups chosen in {len(chosen)} of {len(found)} steps"
    yield _ratio(f"groups: {CASES['groups']}", worst[0], worst[0].ratio, len(found), bench.is_stated, note)
    for one in worst[1:] if chosen else ():
        yield _ratio(f"groups: next, {one.cell}", one, one.ratio, one.n, bench.is_stated)
    best = min(chosen or found, key=lambda one: one.ratio)
    yield _ratio("groups: the fastest", best, best.ratio, best.n, False, str(best.cell))
    every = max(found, key=lambda one: one.every_ratio)
    yield _ratio("groups: every group, the slowest", every, every.every_ratio, every.n, False, str(every.cell))


def _ratio(name: str, found: Measured, ratio: float, n: int, has_bar: bool, note: str | None = None) -> BenchRow:
    """The floor: of the step's own floor to the step without groups."""
    floor = found.floor_s / found.plain_s
    bar = GROUPS_BAR if has_bar else None
    return BenchRow(name, ratio, "×", floor, ratio / floor, n=n, bar=bar, note=note)


def _times(runner: BenchRunner, plans: Mapping[str, StepPlan], cell_s: float) -> dict[str, list[float]]:
    """Seconds of each plan's steps: as many rounds as fit into `cell_s`, after one that warms up; few of one alone."""
    names = list(plans)
    round_s = sum(step_seconds(runner, list(plans.values())))
    most = MOST_REPEATS if len(plans) > 1 else LEAST_REPEATS
    num_rounds = min(max(LEAST_REPEATS, int(cell_s / round_s)), most)
    rng = np.random.default_rng(0)
    order = [names[i] for _ in range(num_rounds) for i in rng.permutation(len(names))]
    times: dict[str, list[float]] = {name: [] for name in names}
    for name, seconds in zip(order, step_seconds(runner, [plans[name] for name in order]), strict=True):
        times[name].append(seconds)
    return times


def step_seconds(runner: BenchRunner, plans: Sequence[StepPlan]) -> Iterator[float]:
    """Device time of each step, the next one launched while it runs; where the host computes, its time."""
    underway: deque[tuple[float, InFlight]] = deque()
    for plan in plans:
        began_s = time.perf_counter()
        step = runner.launch(plan)
        underway.append((time.perf_counter() - began_s, step))
        if len(underway) > 1:
            yield _ended(*underway.popleft())
    while underway:
        yield _ended(*underway.popleft())


def _ended(launch_s: float, step: InFlight) -> float:
    device_s = step.result().device_s
    return launch_s if device_s is None else device_s
