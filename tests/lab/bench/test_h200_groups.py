"""`bench h200`, groups: the steps made by hand, how ways are compared, and what the figures come to."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from p99lab.engine.costs import H200, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.lab.bench.h200_floors import Work
from p99lab.lab.bench.h200_groups import Cell, Measured, Ways, grid, rows, step_seconds, summary
from p99lab.lab.bench.h200_runner import reachable
from p99lab.lab.bench.h200_sizes import H200Bench
from tests.lab.bench.test_h200 import H200 as RATES
from tests.lab.bench.test_h200 import TINY

PAGE = 64
CELL = Cell(16, 4, 16 * PAGE, "even", False, question_len=64, private_len=80, page_size=PAGE)
CELLS = [
    replace(CELL, kind=kind, asks=asks, num_documents=num_documents)
    for kind in ("even", "skewed", "nested")
    for asks in (False, True)
    for num_documents in (1, 4, 16)
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_requests_share_the_pages_of_their_document_and_no_others(cell: Cell) -> None:
    made = cell.rows()
    prefix_pages = cell.prefix_len // PAGE
    for row in made:
        assert len(row.page_table) == -(-row.seq_len // PAGE)
        assert row.num_computed_tokens >= cell.prefix_len
        assert int(row.page_table.max()) < cell.num_pages
    for (a, one), (b, other) in itertools.combinations(enumerate(made), 2):
        shared = prefix_pages if cell.document_of[a] == cell.document_of[b] else cell.system_pages
        assert (one.page_table[:shared] == other.page_table[:shared]).all()
        assert not np.intersect1d(one.page_table[shared:], other.page_table[shared:]).size
    runs = np.unique(np.concatenate([row.page_table[cell.system_pages :] for row in made]))
    num_parts = np.count_nonzero(np.diff(runs) > 1) + 1
    assert num_parts == cell.num_documents + cell.num_requests  # each lies by itself, and in one piece
    num_questions = sum(len(row.token_ids) == 64 for row in made)
    assert num_questions == (cell.num_documents if cell.asks else 0)


def test_skewed_documents_have_half_of_what_is_left_and_none_goes_without() -> None:
    sizes = {d: np.bincount(replace(CELL, num_documents=d, kind="skewed").document_of).tolist() for d in (2, 4, 16)}
    assert sizes == {2: [8, 8], 4: [8, 4, 2, 2], 16: [1] * 16}
    assert np.bincount(replace(CELL, num_requests=64, kind="skewed").document_of).tolist() == [32, 16, 8, 8]


def test_a_steps_work_is_that_of_the_cases_by_name() -> None:
    even = replace(CELL, num_requests=64)
    assert even.work == replace(Work.decode_shared(64, 4, 1024, 80), num_pairs=64 * (1024 + 81))
    asking = replace(CELL, num_requests=4, asks=True)
    assert asking.work == Work.questions(4, 4, 1024, 64)
    nested = replace(CELL, kind="nested")
    assert nested.system_pages == 8
    assert nested.work.num_kv_tokens == 512 + 4 * 512 + 16 * 80


def test_the_grid_is_the_sweep_that_was_asked_for() -> None:
    cells = grid(H200Bench(), PAGE)
    assert len(set(cells)) == len(cells)
    assert {cell.prefix_len for cell in cells} == {256, 2048, 16_384, 131_072}
    assert {(cell.num_requests, cell.num_documents) for cell in cells if cell.kind == "even" and not cell.asks} == {
        (r, d) for r in (1, 2, 8, 16, 64) for d in (1, 2, 4, 16, 64) if d <= r
    }
    assert {cell.kind for cell in cells} == {"even", "skewed", "nested"}
    assert {(cell.num_requests, cell.num_documents) for cell in cells if cell.asks} == {
        *((8, 1), (8, 4), (64, 1), (64, 4), (64, 64))
    }


def test_a_way_that_is_the_same_step_is_not_run_twice() -> None:
    costs = StepCost(H200, Geometry.named("llama-3.1-8b"), PAGE)
    long = Ways.of(replace(CELL, prefix_len=131_072), costs)
    assert [group.num_pages for group in long.chosen.groups] == [2048] * 4
    assert list(long.different) == ["plain", "chosen"]  # every group that there is was chosen
    apart = Ways.of(replace(CELL, num_documents=16), costs)
    assert list(apart.different) == ["plain"]
    short = Ways.of(replace(CELL, num_requests=2, num_documents=1, prefix_len=PAGE), costs)
    assert list(short.different) == ["plain", "every"]
    assert {row.request_id for row in long.chosen.rows} == {row.request_id for row in long.plain.rows}


@pytest.mark.parametrize("cell", [CELLS[0], *CELLS[7:9], *CELLS[15:17]], ids=str)
def test_every_way_samples_the_same(cell: Cell) -> None:
    """The steps are what they are taken for: groups change no token."""
    fitting = replace(cell, num_requests=8, num_documents=min(cell.num_documents, 4), prefix_len=4 * PAGE)
    with reachable(TINY.engine) as (_, runner):
        runner.fill(0)
        ways = Ways.of(fitting, None)
        assert ways.every.groups
        chosen = [
            {row.request_id: token for row, token in zip(plan.rows, runner.execute(plan).token_ids, strict=True)}
            for plan in (ways.plain, ways.every)
        ]
        assert chosen[0] == chosen[1]
        assert None not in chosen[0].values()
        assert len([*step_seconds(runner, [ways.plain, ways.every, ways.plain])]) == 3


def test_the_sweep_runs_what_the_pool_holds() -> None:
    """300 pages: two documents of 1 024 tokens fit, two of 16 384 do not."""
    bench = TINY.model_copy(update={"group_prefixes": (1024, 16_384)})
    with reachable(bench.engine) as (engine, runner):
        found = [*rows(bench, runner, engine.geometry, RATES)]
        assert engine.stats().num_steps == 0  # its own counters know of nothing
    details, shown = [row for row in found if row.detail], [row for row in found if not row.detail]
    assert len(details) == 3 * len([cell for cell in grid(bench, PAGE) if cell.num_pages <= 300])
    assert any("1 on 1 × 16384" in row.name for row in details)
    assert not any("2 × 16384" in row.name for row in details)
    assert found[-len(shown) :] == shown
    for row in details:
        assert row.ratio_to_peer == pytest.approx(row.peer_value / row.value)
        assert row.unit == "ms"


def _measured(ratio: float, num_groups: int, num_requests: int) -> Measured:
    cell = replace(CELL, num_requests=num_requests)
    return Measured(cell, num_groups, 0.002, 0.010, 0.010 * ratio, 0.010 * ratio * 2, 0.02, 7, None)


def test_the_slowest_step_holds_the_bar_or_not() -> None:
    found = [_measured(1.0, 0, 4), _measured(0.5, 4, 8), _measured(1.04, 4, 16), _measured(1.02, 4, 64)]
    told = list(summary(H200Bench(), found))
    assert told[0].value == pytest.approx(1.04)
    assert (told[0].n, told[0].bar, told[0].verdict) == (4, 1.03, "missed")
    assert told[0].floor == pytest.approx(0.2)
    assert told[0].ratio_to_floor == pytest.approx(1.04 / 0.2)
    assert told[0].note == "16 on 4 × 1024; groups chosen in 3 of 4 steps"
    named = {row.name: row.value for row in told}
    assert named["groups: next, 64 on 4 × 1024"] == pytest.approx(1.02)
    assert named["groups: the fastest"] == pytest.approx(0.5)
    assert named["groups: every group, the slowest"] == pytest.approx(2.08)
    assert not any("next, 4 on" in row.name for row in told)  # the same step either way
    (same, *_) = summary(TINY, found[:1])
    assert (same.value, same.bar) == (1.0, None)
