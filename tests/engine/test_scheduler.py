"""What steps are made of, who is let in, and how requests end."""

from __future__ import annotations

import numpy as np
import pytest

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.plan import StepResult
from p99lab.engine.request import FinishReason, Logprobs, Status
from p99lab.engine.scheduler import RequestTooLargeError, Scheduler
from p99lab.errors import AccountingError, BadParameterError, QueueFullError
from tests.engine.scheduler_bench import Bench

pytestmark = pytest.mark.light


def test_one_request_from_prompt_to_end() -> None:
    bench = Bench()
    request = bench.add([0, 1, 2, 0, 1], max_tokens=3)
    assert bench.run() == 3
    assert (request.status, request.finish_reason) == (Status.FINISHED, FinishReason.LENGTH)
    bench.check_outputs()
    assert bench.pool.num_active == 0
    assert not bench.scheduler.has_work


def test_rows_are_copies() -> None:
    bench = Bench()
    request = bench.add([0, 1, 2, 0, 1])
    plan = bench.schedule()
    assert not np.shares_memory(plan.rows[0].token_ids, request.tokens)
    assert not np.shares_memory(plan.rows[0].page_table, request.page_table)


def test_chunks_fill_what_decode_rows_leave() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.add([0, 1], max_tokens=8)
    bench.step()
    bench.add([2] * 7)
    assert sorted(row.num_scheduled_tokens for row in bench.step().rows) == [1, 3]
    assert sorted(row.num_scheduled_tokens for row in bench.step().rows) == [1, 3]
    plan = bench.step()
    assert [row.num_scheduled_tokens for row in plan.rows] == [1, 1]
    assert all(row.samples for row in plan.rows)


def test_steps_are_bounded_only_where_their_time_is_known() -> None:
    with pytest.raises(BadParameterError, match="max_step_s"):
        Scheduler(SchedulerConfig(max_step_s=0.1), GroupingConfig(), PrefixTree(PagePool(8, 4)))


def test_while_somebody_decodes_prompts_get_what_the_bound_leaves() -> None:
    bench = Bench(max_num_batched_tokens=512, max_step_s=0.25, num_pages=400)
    bench.add([0, 1], max_tokens=30)
    bench.step()
    bench.add([2] * 1000)
    chunks = [max(row.num_scheduled_tokens for row in bench.step().rows) for _ in range(4)]
    assert 64 < min(chunks) <= max(chunks) < 200


def test_a_document_being_read_does_not_keep_questions_waiting() -> None:
    bench = Bench(max_num_batched_tokens=16, num_pages=200)
    document = bench.add([2] * 400)
    bench.step()
    questions = [bench.add([0, 1, 0], max_tokens=2) for _ in range(3)]
    before = document.num_computed_tokens
    bench.step()
    assert all(question.num_output_tokens == 1 for question in questions)
    assert document.num_computed_tokens == before + 16 - 9


def test_decode_rows_come_before_even_the_most_urgent_prompt() -> None:
    bench = Bench(max_num_batched_tokens=4, policy="priority")
    decoding = bench.add([0, 1], max_tokens=8, priority=1)
    bench.step()
    bench.add([2] * 12, priority=0)
    for num_tokens in range(2, 5):
        bench.step()
        assert decoding.num_output_tokens == num_tokens


def test_stock_decodes_only_when_no_prompt_waits() -> None:
    bench = Bench(composition="stock", max_num_batched_tokens=8)
    bench.add([0, 1], max_tokens=8)
    bench.step()
    for prompt in ([0] * 5, [1] * 5, [2] * 12):
        bench.add(prompt)
    steps = [bench.step() for _ in range(4)]
    assert [plan.num_tokens for plan in steps] == [5, 5, 12, 4]
    assert [len(plan.rows) for plan in steps] == [1, 1, 1, 4]


def test_a_request_that_can_never_fit_is_refused() -> None:
    bench = Bench(page_size=2, num_pages=4)
    bench.add([0] * 6, max_tokens=3)
    with pytest.raises(RequestTooLargeError, match="needs 5 pages of 2 tokens, the pool has 4"):
        bench.add([0] * 6, max_tokens=4)
    bench.run()
    bench.check_outputs()


def test_two_live_requests_cannot_have_one_id() -> None:
    bench = Bench()
    bench.add([0], request_id="a")
    with pytest.raises(BadParameterError):
        bench.add([1], request_id="a")


def test_cancel_while_waiting() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add([0, 1])
    waiting = bench.add([1, 1])
    bench.schedule()
    bench.scheduler.cancel(waiting.request_id)
    assert waiting.status is Status.FINISHED
    bench.update()
    bench.run()


def test_finish_ends_a_request_between_steps() -> None:
    bench = Bench()
    request = bench.add([0, 1], max_tokens=9)
    bench.step()
    bench.scheduler.finish(request, FinishReason.STOP)
    bench.scheduler.finish(request, FinishReason.CANCELLED)
    assert (request.finish_reason, request.num_output_tokens) == (FinishReason.STOP, 1)
    assert bench.schedule() is None


def test_scores_that_were_not_asked_for_are_no_result() -> None:
    for num_scores in (0, 2, 4):
        bench = Bench()
        bench.add([0, 1, 2, 0], prompt_logprobs=0)
        plan = bench.schedule()
        with pytest.raises(AccountingError, match=f"{num_scores} scores"):
            bench.scheduler.update(StepResult(plan.epoch, (0,), (None,), {0: (Logprobs(0.0),) * num_scores}))


def test_newcomers_are_refused_while_as_many_wait_as_may() -> None:
    bench = Bench(max_num_waiting=2, max_num_seqs=1)
    first, second = bench.add([0, 1]), bench.add([1, 1])
    with pytest.raises(QueueFullError, match="the queue is full: 2 requests wait already"):
        bench.add([2])
    assert (bench.scheduler.waiting, bench.scheduler.running) == ([first, second], [])
    bench.step()
    third = bench.add([2])  # one runs, one waits
    with pytest.raises(QueueFullError):
        bench.add([2, 1])
    assert bench.scheduler.cancel(second.request_id)
    bench.add([2, 1])
    bench.run()
    assert third.finish_reason is FinishReason.LENGTH
    bench.check_outputs()


def test_what_can_never_be_served_is_told_so_even_by_a_full_queue() -> None:
    bench = Bench(page_size=2, num_pages=4, max_num_waiting=1)
    bench.add([0], request_id="a")
    with pytest.raises(RequestTooLargeError):
        bench.add([0] * 9)
    with pytest.raises(BadParameterError, match="in use"):
        bench.add([0], request_id="a")


def test_those_that_gave_way_keep_their_place_and_take_none_of_a_newcomers() -> None:
    bench = Bench(page_size=2, num_pages=6, prefix_cache=False, max_num_waiting=1)
    bench.add([0, 1, 2], max_tokens=8)
    bench.step()
    second = bench.add([1, 1, 1], max_tokens=8)
    while second not in bench.scheduler.outcome.preempted:
        assert bench.step() is not None
    assert bench.scheduler.waiting == [second]
    newcomer = bench.add([2], max_tokens=2)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        bench.add([2])
    bench.run()
    assert newcomer.finish_reason is second.finish_reason is FinishReason.LENGTH
    bench.check_outputs()
