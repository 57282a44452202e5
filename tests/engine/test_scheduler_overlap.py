"""Steps planned while others are in flight: what follows what, and what is held until a step has ended."""

from __future__ import annotations

import pytest

from p99lab.engine.plan import StepResult
from p99lab.engine.request import FinishReason, Status
from p99lab.errors import AccountingError
from tests.engine.scheduler_bench import Bench, next_token

pytestmark = pytest.mark.light


def test_cancel_while_a_step_is_in_flight_keeps_the_pages_until_it_ends() -> None:
    bench = Bench(page_size=2)
    request = bench.add([0, 1, 2])
    bench.schedule()
    assert bench.scheduler.cancel(request.request_id)
    assert request.finish_reason is FinishReason.CANCELLED
    assert bench.pool.num_active == 2
    assert bench.update() == []  # nobody wants what it has sampled
    assert request.num_output_tokens == 0
    assert bench.pool.num_active == 0
    assert not bench.scheduler.cancel(request.request_id)


def test_results_come_in_the_order_of_their_steps_two_at_most() -> None:
    bench = Bench()
    bench.add([0, 1])
    with pytest.raises(AccountingError):
        bench.scheduler.update(StepResult(1, (0,), (None,)))
    plan, behind = bench.schedule(), bench.schedule()
    with pytest.raises(AccountingError, match="while 2 steps are in flight"):
        bench.scheduler.schedule(0.0)
    with pytest.raises(AccountingError, match="not that of the oldest"):
        bench.scheduler.update(StepResult(behind.epoch, (0,), (None,)))
    assert (plan.epoch, behind.epoch) == (1, 2)


def test_a_row_follows_the_one_that_samples_its_token() -> None:
    bench = Bench(overlap=True, grouping=False)
    bench.add([1] * 5, max_tokens=8)
    first = bench.schedule()
    second = bench.add([2, 2, 2, 1], max_tokens=8)
    behind = bench.schedule()
    assert [row.follows for row in first.rows] == [None]
    assert [(row.follows, row.num_computed_tokens, row.num_output_tokens) for row in behind.rows] == [
        (0, 5, 1),
        (None, 0, 0),
    ]
    assert behind.rows[0].token_ids.tolist() == [0]
    assert [one.request.number for one in bench.update()] == [0]
    third = bench.schedule()
    assert [(row.number, row.follows) for row in third.rows] == [(0, 0), (second.number, 1)]
    bench.run()
    bench.check_outputs()


def test_a_request_whose_last_token_is_in_flight_has_no_more_rows_and_leaves_its_seat() -> None:
    bench = Bench(overlap=True, max_num_seqs=1)
    bench.add([0, 1], max_tokens=3)
    next_one = bench.add([1, 1], max_tokens=1)
    planned = [[row.number for row in bench.step().rows] for _ in range(4)]
    assert planned == [[0], [0], [0], [next_one.number]]
    assert bench.schedule() is None
    assert bench.scheduler.has_work
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("how", ["stop id", "cancelled", "finished"])
def test_a_request_that_ends_while_the_next_step_has_a_row_of_it_keeps_its_pages_until_then(how: str) -> None:
    bench = Bench(page_size=2, overlap=True)
    prompt = next([0, 1, token] for token in range(9) if next_token([0, 1, token]) in (1, 2))
    stop = next_token(prompt)
    request = bench.add(prompt, max_tokens=9, stop_token_ids=(stop,) if how == "stop id" else ())
    bench.schedule()
    bench.schedule()
    if how == "cancelled":
        assert bench.scheduler.cancel(request.request_id)
    sampled = bench.update()
    if how == "finished":
        bench.scheduler.finish(request, FinishReason.STOP)
    assert [one.token_id for one in sampled] == ([] if how == "cancelled" else [stop])
    assert (request.status, bench.pool.num_active) == (Status.FINISHED, 2)
    bench.scheduler.check()
    twin = bench.add([5], request_id=request.request_id)  # its id is free at once
    bench.schedule()
    assert bench.update() == []
    assert bench.pool.num_active == 1
    bench.run()
    assert bench.executor.tokens[twin.number][: twin.num_tokens] == tuple(twin.token_ids.tolist())
    found = bench.add([*prompt, 0 if how == "cancelled" else stop, 7], max_tokens=1)
    bench.run()
    assert found.num_cached_tokens == (3 if how == "cancelled" else 4)  # a placeholder is no token


def test_a_page_replaced_by_the_trees_is_free_when_the_step_that_reads_it_has_ended() -> None:
    bench = Bench(page_size=2, overlap=True)
    first, second = bench.add([0, 1, 2, 0, 1]), bench.add([0, 1, 2, 0, 1])
    bench.schedule()
    bench.schedule()
    assert bench.pool.num_active == 6
    bench.update()
    assert first.pages[:2].tolist() == second.pages[:2].tolist()
    assert bench.pool.num_active == 6
    bench.update()
    assert bench.pool.num_active == 3  # the third page is full by now, and the tree's too
    bench.run()
    bench.check_outputs()


def test_nobody_gives_way_while_a_step_is_in_flight() -> None:
    bench = Bench(page_size=2, num_pages=6, prefix_cache=False, overlap=True)
    first, second = bench.add([0, 1, 2], max_tokens=8), bench.add([1, 1, 1], max_tokens=8)
    num_planned = 0
    while bench.step() is not None:
        num_planned += 1
    assert (len(bench.in_flight), bench.scheduler.running) == (0, [first, second])
    assert first.num_output_tokens == second.num_output_tokens == num_planned
    assert bench.step() is not None
    assert bench.scheduler.outcome.preempted == (second,)
    bench.run()
    assert (first.finish_reason, second.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    bench.check_outputs()


def test_one_that_was_let_in_keeps_its_pages_until_its_copy_is_done_though_it_has_no_row() -> None:
    bench = Bench(composition="stock", max_num_batched_tokens=8)
    document = [0, 1, 2, 0, 1, 2]
    bench.add(document, max_tokens=1)
    bench.run()
    bench.add([1] * 5)
    second = bench.add([*document, *[2] * 5])
    plan = bench.schedule()
    assert (len(plan.rows), len(plan.copies)) == (1, 1)
    assert bench.scheduler.cancel(second.request_id)
    bench.check_fence()
    bench.scheduler.check()
    bench.update()
    bench.run()
    assert bench.pool.num_active == 0
