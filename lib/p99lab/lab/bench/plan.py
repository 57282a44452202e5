"""`p99lab bench plan`: what it costs to plan one step of many long requests whose documents are in the tree.

All requests arrive at once; one `schedule()` call matches, pins, allocates, groups and plans them. The floor is the
time to compare the same tokens with the documents as memory (memcmp), measured in turn with the calls: a match that is
exact to the token reads every token once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.grouping import arrange
from p99lab.engine.plan import StepResult
from p99lab.engine.request import IntArray, Request, SamplingParams
from p99lab.engine.scheduler import Scheduler
from p99lab.errors import AccountingError
from p99lab.lab.bench.rows import BenchRow


@dataclass(frozen=True, slots=True)
class PlanBench:
    """Sizes, in tokens. The defaults are the ones the project's bar (10 ms) is stated for."""

    num_requests: int = 64
    num_documents: int = 4
    prompt_len: int = 130_000
    question_len: int = 40  # the prompt's last tokens; the document before them ends inside a page
    page_size: int = 64
    repeats: int = 20


@dataclass(frozen=True, slots=True)
class Times:
    """One repeat, in milliseconds. `match` is part of `grant`, and both are part of `schedule`, as is `group`."""

    schedule: float
    match: float
    grant: float
    group: float
    floor: float


def run(bench: PlanBench | None = None) -> list[BenchRow]:
    """The median time of the whole call, and of its parts measured by themselves over the same requests."""
    bench = bench or PlanBench()
    rng = np.random.default_rng(0)
    shape = (bench.num_documents, bench.prompt_len - bench.question_len)
    documents = [*rng.integers(0, 50_000, shape, dtype=np.int32)]
    tree = _primed_tree(bench, documents)
    times = [_repeat(bench, tree, documents, rng) for _ in range(bench.repeats + 1)][1:]  # the first warms up

    def median(part: Callable[[Times], float]) -> float:
        return statistics.median(map(part, times))

    floor = median(lambda t: t.floor)

    def against_floor(name: str, value: float) -> BenchRow:
        return BenchRow(name, value, "ms", floor, value / floor)

    return [
        against_floor("plan_step", median(lambda t: t.schedule)),
        against_floor("plan_match", median(lambda t: t.match)),
        against_floor("plan_grant", median(lambda t: t.grant)),
        BenchRow("plan_group", median(lambda t: t.group), "ms"),
    ]


def _primed_tree(bench: PlanBench, documents: list[IntArray]) -> PrefixTree:
    pages_per_prompt = -(-bench.prompt_len // bench.page_size)
    num_pages = bench.num_documents * pages_per_prompt + 8 * bench.num_requests
    tree = PrefixTree(PagePool(num_pages, bench.page_size))
    for document in documents:
        grant = tree.grant(document, len(document))
        if grant is None:
            raise AccountingError("the pool is too small for its documents")
        tree.release(tree.insert(document, grant.pages, final=True))
    return tree


def _repeat(bench: PlanBench, tree: PrefixTree, documents: list[IntArray], rng: np.random.Generator) -> Times:
    tree.forget_except(documents)
    requests = [_request(bench, number, documents, rng) for number in range(bench.num_requests)]
    floor = _compare_as_memory(requests, documents)
    config = SchedulerConfig(
        max_num_batched_tokens=bench.num_requests * bench.question_len, max_num_seqs=bench.num_requests
    )
    grouping = GroupingConfig(enabled=True, min_shared_tokens=256)
    scheduler = Scheduler(config, grouping, tree)
    for request in requests:
        scheduler.add(request)
    began = time.perf_counter()
    plan = scheduler.schedule(now=0.0)
    schedule = time.perf_counter() - began
    if plan is None or len(plan.rows) != bench.num_requests:
        raise AccountingError("the step does not hold all requests")
    group = _time(lambda: arrange(plan.rows, bench.page_size, grouping.min_shared_tokens))
    scheduler.update(StepResult(plan.epoch, (0,) * len(plan.rows), (None,) * len(plan.rows)))
    tree.forget_except(documents)
    match = _time(lambda: _touch(tree, requests))
    grant = _time_grants(tree, requests)
    return Times(*(1e3 * seconds for seconds in (schedule, match, grant, group, floor)))


def _request(bench: PlanBench, number: int, documents: list[IntArray], rng: np.random.Generator) -> Request:
    question = rng.integers(0, 50_000, bench.question_len, dtype=np.int32)
    prompt = np.concatenate([documents[number % len(documents)], question])
    return Request.create(number, prompt, SamplingParams(max_tokens=1), 0.0, bench.page_size)


def _compare_as_memory(requests: list[Request], documents: list[IntArray]) -> float:
    known = [document.tobytes() for document in documents]
    asked = [request.tokens[: len(documents[0])].tobytes() for request in requests]
    return _time(lambda: [prompt == known[i % len(known)] for i, prompt in enumerate(asked)])


def _touch(tree: PrefixTree, requests: list[Request]) -> None:
    for request in requests:
        tree.touch(request.token_ids)


def _time_grants(tree: PrefixTree, requests: list[Request]) -> float:
    began = time.perf_counter()
    grants = [tree.grant(request.token_ids, request.num_prompt_tokens) for request in requests]
    seconds = time.perf_counter() - began
    for grant in grants:
        if grant is None:
            raise AccountingError("the pool is too small for the requests")
        if grant.copy is not None:
            tree.finish_copy(grant.copy)
        tree.release(grant.pages)
    return seconds


def _time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
