"""`groups` of `p99lab bench h200`: steps as the engine puts them together against steps without groups.

The steps are made by hand and run by the engine's own runner: page tables over a pool of random values, no tree and no
scheduler. A step without groups is run in two plain ways: by our own kernels, and by the best plain ones there are
(`PagedAttention`, FlashInfer's wrappers, which no CUDA graph holds). The faster of the two is what grouping must not
be slower than. One more way is information: every group that there could be.

All ways have the same number of steps, each launched while the one before it runs, as steps are under load, and their
medians count. Our kernels' ways take turns in a random order. The plain kernels' steps come in one piece, between the
halves of the others, so that a drift of the machine is none of the comparison.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
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
LEAST_REPEATS, MOST_REPEATS = 3, 25
NUM_WORST = 5  # steps that are shown
PAGED = AttentionConfig(kernels="paged")
OWN_PLAIN, PAGED_PLAIN = "our kernels", "paged kernels"


@dataclass(frozen=True)
class SweepStep:
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


def arranged(
    rows: Sequence[Row], page_size: int, costs: StepCost | None, min_shared_tokens: int | None = None
) -> StepPlan:
    """A step of these rows, grouped as the engine would; `min_shared_tokens`: other than its own."""
    least = GroupingConfig().min_shared_tokens if min_shared_tokens is None else min_shared_tokens
    order, groups = arrange(rows, page_size, least, costs)
    return StepPlan(0, tuple(rows[i] for i in order), groups)


def costs_on(runner: BenchRunner, geometry: Geometry) -> StepCost | None:
    """Of the runner's device; None where nobody has measured it."""
    pool = runner.pool
    on_gpu = pool.k.device.type == "cuda"
    device = device_costs(torch.cuda.get_device_name(pool.k.device) if on_gpu else "cpu")
    return None if device is None else StepCost(device, geometry, pool.page_size, pool.k.element_size())


@dataclass(frozen=True, slots=True)
class Ways:
    """One step put together in three ways: `plain` in the order of arrival and without groups, `chosen` as the engine
    would, `every` with each group that is possible."""

    plain: StepPlan
    chosen: StepPlan
    every: StepPlan

    @classmethod
    def of(cls, step: SweepStep, costs: StepCost | None) -> Ways:
        rows = step.rows()
        chosen, every = arranged(rows, step.page_size, costs), arranged(rows, step.page_size, None, 1)
        return cls(StepPlan(0, tuple(rows)), chosen, every)

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
class SweepResult:
    """A step's medians in every way, seconds; `n` steps of each. Ways that are the same step have the same time."""

    step: SweepStep
    num_groups: int
    floor_s: float
    own_plain_s: float
    paged_plain_s: float
    chosen_s: float
    every_s: float
    n: int
    predicted_s: tuple[float, float] | None  # without groups by our kernels, and with those chosen

    @property
    def plain_s(self) -> float:
        """Of the faster plain way."""
        return min(self.own_plain_s, self.paged_plain_s)

    @property
    def plain(self) -> str:
        """Which way that is."""
        return OWN_PLAIN if self.own_plain_s <= self.paged_plain_s else PAGED_PLAIN

    @property
    def ratio(self) -> float:
        """Of the step as the engine runs it to the faster plain one."""
        return self.chosen_s / self.plain_s

    @property
    def own_ratio(self) -> float:
        """Likewise, to our own kernels without groups."""
        return self.chosen_s / self.own_plain_s

    @property
    def every_ratio(self) -> float:
        return self.every_s / self.plain_s


def grid(bench: H200Bench, page_size: int) -> list[SweepStep]:
    """All steps of the sweep, whether the pool holds them or not."""
    most = max(bench.group_requests)
    private_len = bench.question_len + bench.closed_answer_len
    alone = SweepStep(1, 1, page_size, "even", False, bench.question_len, private_len, page_size)
    pairs = [(r, d) for r in bench.group_requests for d in bench.group_documents if d <= r]
    between = [d for d in bench.group_documents if 1 < d < most]
    asking = {bench.group_requests[len(bench.group_requests) // 2], most}
    steps = []
    for prefix_len in bench.group_prefixes:
        at = replace(alone, prefix_len=max(1, prefix_len // page_size) * page_size)
        steps += [replace(at, num_requests=r, num_documents=d) for r, d in pairs]
        for d in between[len(between) // 2 :][:1]:
            steps += [replace(at, num_requests=most, num_documents=d, kind=kind) for kind in ("skewed", "nested")]
        few = [(r, d) for r, d in pairs if r in asking and d in bench.group_documents[::2]]
        steps += [replace(at, num_requests=r, num_documents=d, asks=True) for r, d in few]
    return steps


def rows(bench: H200Bench, runner: BenchRunner, geometry: Geometry, rates: Rates) -> Iterator[BenchRow]:
    """Each step's rows, as details, as soon as they are known; then what they come to."""
    pool = runner.pool
    runner.fill(bench.seed)
    steps = [step for step in grid(bench, pool.page_size) if step.num_pages <= pool.k.shape[1]]
    on_gpu, costs = pool.k.device.type == "cuda", costs_on(runner, geometry)
    found: list[SweepResult] = []
    for step in steps:
        floor = floor_s(geometry, step.work, rates, ELEMENT_BYTES[bench.dtype])
        found.append(_measure(bench, runner, step, costs, floor))
        yield from _details(bench, found[-1], on_gpu)
    if found:
        yield from summary(bench, found)


def _measure(
    bench: H200Bench, runner: BenchRunner, step: SweepStep, costs: StepCost | None, floor: float
) -> SweepResult:
    ways = Ways.of(step, costs)
    times = way_times(runner, ways.different, bench.group_cell_s)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    chosen_s = medians.get("chosen", medians["plain"])
    predicted = [costs.step_time_s(plan.rows, plan.groups) for plan in (ways.plain, ways.chosen)] if costs else None
    return SweepResult(
        step=step,
        num_groups=len(ways.chosen.groups),
        floor_s=floor,
        own_plain_s=medians["plain"],
        paged_plain_s=medians["paged"],
        chosen_s=chosen_s,
        every_s=medians.get("every", chosen_s if ways.every.groups else medians["plain"]),
        n=len(times["plain"]),
        predicted_s=None if predicted is None else (predicted[0], predicted[1]),
    )


def _details(bench: H200Bench, found: SweepResult, on_gpu: bool) -> Iterator[BenchRow]:
    """A step's rows: with the groups that were chosen, with every one, and in both plain ways."""
    note = f"{found.num_groups} groups" if found.num_groups else "no groups chosen"
    if found.predicted_s is not None:
        plain_ms, chosen_ms = (1e3 * seconds for seconds in found.predicted_s)
        note += f"; predicted {chosen_ms:.4g} ms, {plain_ms:.4g} without"
    bar = 1e3 * GROUPS_BAR * found.plain_s if bench.is_stated else None
    yield _detail(found, f"groups, {found.step}", found.chosen_s, bar, note)
    yield _detail(found, f"groups, {found.step}: every group", found.every_s)
    yield _detail(found, f"groups, {found.step}: none, {OWN_PLAIN}", found.own_plain_s)
    no_other = None if on_gpu else "no GPU: attention in plain torch, as in every way"
    yield _detail(found, f"groups, {found.step}: none, {PAGED_PLAIN}", found.paged_plain_s, note=no_other)


def _detail(
    found: SweepResult, name: str, seconds: float, bar: float | None = None, note: str | None = None
) -> BenchRow:
    return BenchRow(
        name=name,
        value=1e3 * seconds,
        unit="ms",
        floor=1e3 * found.floor_s,
        ratio_to_floor=seconds / found.floor_s,
        peer=f"without groups, {found.plain}",
        peer_value=1e3 * found.plain_s,
        ratio_to_peer=found.plain_s / seconds,
        n=found.n,
        bar=bar,
        note=note,
        detail=True,
    )


def summary(bench: H200Bench, found: Sequence[SweepResult]) -> Iterator[BenchRow]:
    """The slowest step with groups against the faster plain one, and the slowest for which none were chosen: each holds
    the bar or does not. Then information."""
    grouped = [one for one in found if one.num_groups]
    alone = [one for one in found if not one.num_groups]
    bar = GROUPS_BAR if bench.is_stated else None
    worst = sorted(grouped or alone, key=lambda one: one.ratio, reverse=True)[:NUM_WORST]
    note = f"{worst[0].step}; {_against(worst[0])}; groups chosen in {len(grouped)} of {len(found)} steps"
    yield _ratio(f"groups: {CASES['groups']}", worst[0], worst[0].ratio, note, bar, len(grouped or alone))
    for one in worst[1:] if grouped else ():
        yield _ratio(f"groups: next, {one.step}", one, one.ratio, _against(one), bar)
    if grouped and alone:
        slowest = max(alone, key=lambda one: one.ratio)
        note = f"{slowest.step}; {_against(slowest)}"
        yield _ratio("groups: none chosen, the slowest", slowest, slowest.ratio, note, bar, len(alone))
    best = min(grouped or alone, key=lambda one: one.ratio)
    yield _ratio("groups: the fastest", best, best.ratio, f"{best.step}; {_against(best)}")
    every = max(found, key=lambda one: one.every_ratio)
    yield _ratio("groups: every group, the slowest", every, every.every_ratio, f"{every.step}; {_against(every)}")
    own = max(grouped or alone, key=lambda one: one.own_ratio)
    floor = own.floor_s / own.own_plain_s
    name = f"groups: ÷ {OWN_PLAIN} without, the slowest"
    yield BenchRow(name, own.own_ratio, "×", floor, own.own_ratio / floor, n=own.n, note=str(own.step))


def _against(found: SweepResult) -> str:
    return f"plain: {found.plain}"


def _ratio(
    name: str, found: SweepResult, ratio: float, note: str, bar: float | None = None, n: int | None = None
) -> BenchRow:
    """The floor: of the step's own floor to the faster plain one."""
    floor = found.floor_s / found.plain_s
    return BenchRow(name, ratio, "×", floor, ratio / floor, n=found.n if n is None else n, bar=bar, note=note)


def way_times(runner: BenchRunner, plans: Mapping[str, StepPlan], step_s: float) -> dict[str, list[float]]:
    """Seconds of each plan's steps by our kernels, and of the plain one's by the paged ones (`paged`).

    As many rounds of all as fit into `step_s`, after one that warms up. The first step of each piece is launched while
    nothing runs, and does not count.
    """
    names = list(plans)
    first_s = dict(zip(names, step_seconds(runner, list(plans.values())), strict=True))
    with runner.attending(PAGED):
        (first_s["paged"],) = step_seconds(runner, [plans["plain"]])
    num_rounds = min(max(LEAST_REPEATS, int(step_s / sum(first_s.values()))), MOST_REPEATS)
    rng = np.random.default_rng(0)
    rounds = [[names[i] for i in rng.permutation(len(names))] for _ in range(num_rounds)]
    times: dict[str, list[float]] = {name: [] for name in first_s}

    def run(order: Sequence[str], before: str) -> None:
        steps = [plans.get(name, plans["plain"]) for name in (before, *order)]
        for name, seconds in zip(order, islice(step_seconds(runner, steps), 1, None), strict=True):
            times[name].append(seconds)

    shortest, middle = min(names, key=first_s.__getitem__), num_rounds // 2
    run(list(chain.from_iterable(rounds[:middle])), shortest)
    with runner.attending(PAGED):
        run(["paged"] * num_rounds, "paged")
    run(list(chain.from_iterable(rounds[middle:])), shortest)
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
