"""`bench h200`, groups: the steps made by hand, how ways are compared, and what the figures come to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from p99lab.engine.config import AttentionConfig
from p99lab.engine.costs import H200, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.plan import StepPlan
from p99lab.lab.bench.h200_floors import Work
from p99lab.lab.bench.h200_groups import (
    PAGED,
    SweepResult,
    SweepStep,
    Ways,
    grid,
    rows,
    step_seconds,
    summary,
    way_times,
)
from p99lab.lab.bench.h200_runner import reachable
from p99lab.lab.bench.h200_sizes import H200Bench
from tests.lab.bench.test_h200 import H200 as RATES
from tests.lab.bench.test_h200 import TINY

PAGE = 64
STEP = SweepStep(16, 4, 16 * PAGE, "even", False, question_len=64, private_len=80, page_size=PAGE)
STEPS = [
    replace(STEP, kind=kind, asks=asks, num_documents=num_documents)
    for kind in ("even", "skewed", "nested")
    for asks in (False, True)
    for num_documents in (1, 4, 16)
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_requests_share_the_pages_of_their_document_and_no_others(step: SweepStep) -> None:
    made = step.rows()
    prefix_pages = step.prefix_len // PAGE
    for row in made:
        assert len(row.page_table) == -(-row.seq_len // PAGE)
        assert row.num_computed_tokens >= step.prefix_len
        assert int(row.page_table.max()) < step.num_pages
    for (a, one), (b, other) in itertools.combinations(enumerate(made), 2):
        shared = prefix_pages if step.document_of[a] == step.document_of[b] else step.system_pages
        assert (one.page_table[:shared] == other.page_table[:shared]).all()
        assert not np.intersect1d(one.page_table[shared:], other.page_table[shared:]).size
    runs = np.unique(np.concatenate([row.page_table[step.system_pages :] for row in made]))
    num_parts = np.count_nonzero(np.diff(runs) > 1) + 1
    assert num_parts == step.num_documents + step.num_requests  # each lies by itself, and in one piece
    num_questions = sum(len(row.token_ids) == 64 for row in made)
    assert num_questions == (step.num_documents if step.asks else 0)


def test_skewed_documents_have_half_of_what_is_left_and_none_goes_without() -> None:
    sizes = {d: np.bincount(replace(STEP, num_documents=d, kind="skewed").document_of).tolist() for d in (2, 4, 16)}
    assert sizes == {2: [8, 8], 4: [8, 4, 2, 2], 16: [1] * 16}
    assert np.bincount(replace(STEP, num_requests=64, kind="skewed").document_of).tolist() == [32, 16, 8, 8]


def test_a_steps_work_is_that_of_the_cases_by_name() -> None:
    even = replace(STEP, num_requests=64)
    assert even.work == replace(Work.decode_shared(64, 4, 1024, 80), num_pairs=64 * (1024 + 81))
    asking = replace(STEP, num_requests=4, asks=True)
    assert asking.work == Work.questions(4, 4, 1024, 64)
    nested = replace(STEP, kind="nested")
    assert nested.system_pages == 8
    assert nested.work.num_kv_tokens == 512 + 4 * 512 + 16 * 80


def test_the_grid_is_the_sweep_that_was_asked_for() -> None:
    steps = grid(H200Bench(), PAGE)
    assert len(set(steps)) == len(steps)
    assert {step.prefix_len for step in steps} == {256, 2048, 16_384, 131_072}
    assert {(step.num_requests, step.num_documents) for step in steps if step.kind == "even" and not step.asks} == {
        (r, d) for r in (1, 2, 8, 16, 64) for d in (1, 2, 4, 16, 64) if d <= r
    }
    assert {step.kind for step in steps} == {"even", "skewed", "nested"}
    assert {(step.num_requests, step.num_documents) for step in steps if step.asks} == {
        *((8, 1), (8, 4), (64, 1), (64, 4), (64, 64))
    }


def test_a_way_that_is_the_same_step_is_not_run_twice() -> None:
    costs = StepCost(H200, Geometry.named("llama-3.1-8b"), PAGE)
    long = Ways.of(replace(STEP, prefix_len=131_072), costs)
    assert [group.num_pages for group in long.chosen.groups] == [2048] * 4
    assert list(long.different) == ["plain", "chosen"]  # every group that there is was chosen
    apart = Ways.of(replace(STEP, num_documents=16), costs)
    assert list(apart.different) == ["plain"]
    short = Ways.of(replace(STEP, num_requests=2, num_documents=1, prefix_len=PAGE), costs)
    assert list(short.different) == ["plain", "every"]
    assert {row.request_id for row in long.chosen.rows} == {row.request_id for row in long.plain.rows}


@pytest.mark.parametrize("step", [STEPS[0], *STEPS[7:9], *STEPS[15:17]], ids=str)
def test_every_way_samples_the_same(step: SweepStep) -> None:
    """The steps are what they are taken for: groups change no token."""
    fitting = replace(step, num_requests=8, num_documents=min(step.num_documents, 4), prefix_len=4 * PAGE)
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
    assert len(details) == 4 * len([step for step in grid(bench, PAGE) if step.num_pages <= 300])
    assert any("1 on 1 × 16384" in row.name for row in details)
    assert not any("2 × 16384" in row.name for row in details)
    assert found[-len(shown) :] == shown
    for row in details:
        assert row.ratio_to_peer == pytest.approx(row.peer_value / row.value)
        assert row.unit == "ms"
    for chosen, every, own, paged in zip(*[iter(details)] * 4, strict=True):
        assert chosen.peer_value == min(own.value, paged.value)
        assert chosen.peer == f"without groups, {'our' if own.value <= paged.value else 'paged'} kernels"
        assert chosen.n == every.n == own.n == paged.n >= 3


def test_every_way_has_as_many_steps_and_the_plain_kernels_theirs_in_the_middle() -> None:
    """Our kernels' ways are on both sides of them; each piece begins with a step that does not count."""
    ways = Ways.of(STEP, None)
    plans = {"plain": ways.plain, "every": ways.every}
    runner = _Runner()
    times = way_times(runner, plans, 7 * 0.006 + 0.001)
    assert times == {"plain": [0.001] * 7, "every": [0.002] * 7, "paged": [0.003] * 7}
    kinds = [kind for kind, _ in itertools.groupby(runner.ran)]
    assert set(runner.ran[:2]) == {"plain", "every"}
    paged = [i for i, kind in enumerate(runner.ran) if kind == "paged"]
    assert paged == [2, *range(10, 18)]  # after 1 + 3 × 2 of ours, and before 1 + 4 × 2
    assert len(runner.ran) == 3 + (1 + 6) + 8 + (1 + 8)
    assert kinds.count("paged") == 2
    assert len(way_times(_Runner(), {"plain": ways.plain}, 1e-9)["paged"]) == 3
    assert len(way_times(_Runner(), plans, 1.0)["plain"]) == 25


class _Runner:
    """Steps of 1 ms without groups, 2 with, 3 by the paged kernels; `ran`: which, in their order."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self._is_paged = False

    def launch(self, plan: StepPlan) -> SimpleNamespace:
        self.ran.append("paged" if self._is_paged else "every" if plan.groups else "plain")
        seconds = {"plain": 0.001, "every": 0.002, "paged": 0.003}[self.ran[-1]]
        return SimpleNamespace(result=lambda: SimpleNamespace(device_s=seconds))

    @contextmanager
    def attending(self, attention: AttentionConfig) -> Iterator[None]:
        assert attention == PAGED
        self._is_paged = True
        yield
        self._is_paged = False


def _result(ratio: float, num_groups: int, num_requests: int, paged_s: float = 0.020) -> SweepResult:
    step = replace(STEP, num_requests=num_requests)
    return SweepResult(step, num_groups, 0.002, 0.010, paged_s, 0.010 * ratio, 0.010 * ratio * 2, 7, None)


def test_the_slowest_step_holds_the_bar_or_not() -> None:
    found = [_result(1.0, 0, 4), _result(0.5, 4, 8), _result(1.04, 4, 16), _result(1.02, 4, 64)]
    told = list(summary(H200Bench(), found))
    assert told[0].value == pytest.approx(1.04)
    assert (told[0].n, told[0].bar, told[0].verdict) == (3, 1.03, "missed")
    assert told[0].floor == pytest.approx(0.2)
    assert told[0].ratio_to_floor == pytest.approx(1.04 / 0.2)
    assert told[0].note == "16 on 4 × 1024; plain: our kernels; groups chosen in 3 of 4 steps"
    named = {row.name: row for row in told}
    assert named["groups: next, 64 on 4 × 1024"].value == pytest.approx(1.02)
    assert named["groups: next, 64 on 4 × 1024"].verdict == "held"
    alone = named["groups: none chosen, the slowest"]
    assert (alone.value, alone.n, alone.verdict) == (1.0, 1, "held")
    assert named["groups: the fastest"].value == pytest.approx(0.5)
    assert named["groups: every group, the slowest"].value == pytest.approx(2.08)
    assert not any("next, 4 on" in row.name for row in told)
    (same, *others) = summary(TINY, found[:1])
    assert (same.value, same.bar) == (1.0, None)
    assert not any("none chosen" in row.name for row in others)


def test_the_faster_of_both_plain_ways_is_what_counts() -> None:
    """The plain kernels take 8 ms where ours take 10 without groups, and 9 with: a miss that ours alone would hide."""
    found = [_result(0.9, 4, 16, paged_s=0.008), _result(1.0, 0, 4, paged_s=0.009)]
    told = {row.name.removeprefix("groups: "): row for row in summary(H200Bench(), found)}
    slowest = told["step with groups ÷ the faster plain one, the slowest"]
    assert (slowest.value, slowest.verdict) == (pytest.approx(1.125), "missed")
    assert slowest.note == "16 on 4 × 1024; plain: paged kernels; groups chosen in 1 of 2 steps"
    assert slowest.floor == pytest.approx(0.25)
    alone = told["none chosen, the slowest"]
    assert (alone.value, alone.verdict) == (pytest.approx(10 / 9), "missed")
    assert alone.note == "4 on 4 × 1024; plain: paged kernels"
    assert told["÷ our kernels without, the slowest"].value == pytest.approx(0.9)
    assert told["÷ our kernels without, the slowest"].bar is None
