"""`bench h200`, steps: what the steps made by hand read, and how their kernels are told apart."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from p99lab.engine.costs import H200, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.lab.bench.h200_floors import Work
from p99lab.lab.bench.h200_groups import arranged
from p99lab.lab.bench.h200_runner import reachable
from p99lab.lab.bench.h200_sizes import H200Bench
from p99lab.lab.bench.h200_steps import KINDS, NOBODY, STEPS, Layout, LoadStep, kind_of, rows
from tests.lab.bench.test_h200 import H200 as RATES
from tests.lab.bench.test_h200 import TINY

LAYOUT = Layout(document_len=20 * 64, private_len=72, page_size=64)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_rows_of_a_document_share_its_pages_and_nothing_else(step: LoadStep) -> None:
    made = LAYOUT.rows(step)
    assert sum(len(row.token_ids) for row in made) == step.num_tokens
    for row in made:
        assert len(row.page_table) == -(-row.seq_len // 64)
        assert int(row.page_table.max()) < LAYOUT.num_pages(step)
    for one, other in itertools.combinations(made, 2):
        shared = np.intersect1d(one.page_table, other.page_table)
        assert len(shared) in (0, 20)
        assert len(shared) == 0 or (one.page_table[:20] == other.page_table[:20]).all()
    on_documents = [row for row in made if len(row.page_table) > 20 and row.num_computed_tokens >= 20 * 64]
    assert len(on_documents) == sum(step.decoding) + sum(map(len, step.asked))


def test_a_steps_work_counts_what_is_shared_once() -> None:
    decode = LoadStep("decode", (16, 16, 16, 16), NOBODY)
    assert LAYOUT.work(decode) == Work(64, 64, 4 * 1280 + 64 * 64, 64 * (1280 + 72 + 1))
    reads = LoadStep("reads", (0,), ((),), (128, 0.5))
    assert LAYOUT.work(reads) == Work(128, 1, 640, 128 * 640 + 128 * 129 // 2)


def test_steps_of_the_loads_are_grouped_by_document_and_within_their_bound() -> None:
    geometry = Geometry.named("llama-3.1-8b")
    costs, layout = StepCost(H200, geometry, 64), Layout(130_816, 72, 64)
    for step in STEPS:
        plan = arranged(layout.rows(step), 64, costs)
        assert len(plan.groups) == sum(d + len(a) > 1 for d, a in zip(step.decoding, step.asked, strict=True))
        assert 0.02 < costs.step_time_s(plan.rows, plan.groups) < 0.042


def test_a_step_has_a_row_with_its_prediction_where_the_pool_holds_it() -> None:
    small = LoadStep("small", (2, 1), ((3,), ()), (5, 0.5))
    large = LoadStep("large", (1,) * 80, ((),) * 80)
    with reachable(TINY.engine) as (engine, runner):
        found = [*rows(TINY, runner, engine.geometry, RATES, (small, large))]
        assert engine.stats().num_steps == 0  # its own counters know of nothing
    assert [row.name for row in found] == ["steps: small", "steps: large"]
    assert math.isnan(found[1].value)
    assert found[1].note == "not measured: 491 pages, and the pool has 300"
    assert found[0].note is not None
    assert found[0].note.startswith("11 tokens; predicted ")
    assert found[0].n is not None
    assert found[0].n >= 3
    assert found[0].bar is None
    assert H200Bench().document_len % 64 == 0  # as the steps' shapes assume


def test_kernels_are_told_apart_by_their_names() -> None:
    names = {
        "void flashinfer::PrefillWithKVCacheKernel<CollectiveMainloop<cutlass::gemm>>": "attention, computed",
        "_attend_decode_spans": "attention, read",
        "_finish_states": "attention, merged",
        "_rotate_and_store": "norms, rotation, gates",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "products",
        "_tile": "products",
        "Memcpy HtoD (Pinned -> Device)": "the rest",
    }
    assert {name: kind_of(name) for name in names} == names
    assert set(names.values()) == set(KINDS)
