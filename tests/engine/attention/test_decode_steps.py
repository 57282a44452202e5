"""Decode steps as the scheduler plans them: each fits the captured step for its rows, with nothing in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.attention.lists import Room
from p99lab.engine.attention.shape import GraphShape
from p99lab.engine.attention.spans import SpanPlan, Split, plan_spans
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.costs import H200, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.graphs import shapes
from p99lab.engine.plan import StepPlan, StepResult
from p99lab.engine.request import IntArray, Request, SamplingParams
from p99lab.engine.scheduler import Scheduler

PAGE_SIZE, NUM_ROWS, NUM_STEPS = 64, 64, 128
COSTS = StepCost(H200, Geometry.named("llama-3.1-8b"), PAGE_SIZE)
SPLIT = Split(COSTS.segment_tokens, max_decode_tokens=16, num_lanes=33)  # of that model on an H200
GRAPH: GraphShape = next(shape for shape in shapes(NUM_ROWS, 512) if shape.num_tokens == NUM_ROWS)


def _decode_steps(documents: Sequence[IntArray], prompts: Sequence[IntArray], reserve_tokens: int) -> list[StepPlan]:
    """The steps in which all prompts decode, after the documents have been computed."""
    config = SchedulerConfig(max_num_batched_tokens=1 << 17, max_num_seqs=NUM_ROWS, reserve_tokens=reserve_tokens)
    pool = PagePool(4096, PAGE_SIZE)
    scheduler = Scheduler(config, GroupingConfig(decide_by="length"), PrefixTree(pool, enabled=True))
    steps = [*_run(scheduler, documents, 1), *_run(scheduler, prompts, NUM_STEPS + 1)]
    scheduler.check()
    return [step for step in steps if len(step.rows) == step.num_tokens == NUM_ROWS]


def _run(scheduler: Scheduler, prompts: Sequence[IntArray], num_tokens: int) -> Iterator[StepPlan]:
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        scheduler.add(Request.create(number, prompt, sampling, 0.0, PAGE_SIZE))
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        yield plan
        sampled = tuple(0 if row.samples else None for row in plan.rows)
        scheduler.update(StepResult(plan.epoch, sampled, (None,) * len(plan.rows)))


def _questions(documents: Sequence[IntArray], rng: np.random.Generator) -> list[IntArray]:
    questions = rng.integers(0, 1000, (NUM_ROWS, 40), dtype=np.int32)
    return [np.concatenate([documents[i % len(documents)], question]) for i, question in enumerate(questions)]


def _planned(step: StepPlan) -> SpanPlan:
    plan = plan_spans(step, PAGE_SIZE, SPLIT)
    assert plan is not None
    return plan


def _in_one_piece(plan: SpanPlan) -> bool:
    """Every row has its private part beside what 16 rows share, and nothing else."""
    return bool((plan.private_lens > 0).all() and (plan.items[:, 1] == NUM_ROWS // 4).all())


@pytest.mark.parametrize("multiple_of", [PAGE_SIZE, 1], ids=["whole pages", "any lengths"])
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_over_documents_have_their_private_parts_in_one_piece(multiple_of: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1000, 6000, 4) // multiple_of * multiple_of
    documents = [rng.integers(0, 1000, length, dtype=np.int32) for length in lengths]
    steps = _decode_steps(documents, _questions(documents, rng), reserve_tokens=256)
    assert len(steps) == NUM_STEPS
    for step in steps:
        plan = _planned(step)
        assert _in_one_piece(plan)
        assert plan.num_span_partials == 0
        assert Room.of(GRAPH, SPLIT).holds(plan)


def test_without_a_reserve_they_would_not() -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, 2048, dtype=np.int32) for _ in range(4)]
    steps = _decode_steps(documents, _questions(documents, rng), reserve_tokens=0)
    assert not all(_in_one_piece(_planned(step)) for step in steps)


def test_long_rows_that_share_nothing_are_one_decode_span_each() -> None:
    rng = np.random.default_rng(0)
    prompts = list(rng.integers(0, 1000, (NUM_ROWS, 1024), dtype=np.int32))
    steps = _decode_steps([], prompts, reserve_tokens=256)
    assert len(steps) == NUM_STEPS
    for step in steps:
        plan = _planned(step)
        assert Room.of(GRAPH, SPLIT).holds(plan)
        assert len(plan.items) <= NUM_ROWS + SPLIT.num_lanes - 1
        assert plan.num_span_partials == 0
