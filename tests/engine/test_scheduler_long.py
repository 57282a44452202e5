"""Prompts that no step holds whole: they are let in one by one, hold up nobody, and are not kept waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.composition import remaining
from p99lab.engine.request import Request, Status
from tests.engine.scheduler_bench import Bench

pytestmark = pytest.mark.light

STEP = 16  # tokens
WARM = [[100 * document + token for token in range(1, 41)] for document in range(3)]  # ten pages each


def cold(number: int, num_tokens: int = 80) -> list[int]:
    return [1000 * (number + 1) + token for token in range(num_tokens)]


def bench_of_warm_documents(num_pages: int, **config) -> Bench:
    bench = Bench(num_pages=num_pages, max_num_batched_tokens=STEP, **config)
    for document in WARM:
        bench.add(document, max_tokens=1)
        bench.run()
    return bench


def ask(bench: Bench, document: int, max_tokens: int = 2, **options) -> Request:
    return bench.add([*WARM[document], 9000 + len(bench.requests)], max_tokens, **options)


def is_read_in_pieces(bench: Bench, request: Request) -> bool:
    """Whether it holds pages, and more of it is left than a step and a partial page."""
    return request.num_pages > 0 and remaining(request) > STEP + bench.pool.page_size


def steps_to_finish(bench: Bench, awaited: list[Request], most: int) -> Iterator[int]:
    """Steps, by their numbers, until all of these have ended."""
    for number in range(most):
        if all(request.status is Status.FINISHED for request in awaited):
            return
        yield number
        bench.step()
    raise AssertionError(f"not finished after {most} steps")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_cold", [3, 6])
def test_cold_documents_stop_nobody_and_are_read_in_order(num_cold: int, overlap: bool) -> None:
    """The warm ones and two cold ones are more than the pool holds."""
    bench = bench_of_warm_documents(60, overlap=overlap)
    documents = [bench.add(cold(number), max_tokens=1) for number in range(num_cold)]
    questions: list[Request] = []
    asked_at, answered_at = {}, {}
    ended: list[Request] = []
    for step in steps_to_finish(bench, documents, 60):
        questions.append(ask(bench, step % 3, max_tokens=4))
        asked_at[questions[-1]] = step
        answered_at |= {one: step for one in questions if one.num_output_tokens and one not in answered_at}
        ended += [one for one in documents if one.status is Status.FINISHED and one not in ended]
        assert sum(is_read_in_pieces(bench, one) for one in documents) <= 1
    assert ended == documents[:-1]  # and the last one now
    assert len(answered_at) >= len(questions) - 3
    assert max(answered_at[one] - asked_at[one] for one in answered_at) <= 3
    assert {one.num_cached_tokens for one in questions[:-3]} == {len(WARM[0])}
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_of_short_prompts_keeps_no_pages_from_a_long_one(overlap: bool) -> None:
    """Which needs more pages than three documents leave, one of which is asked about in each step."""
    bench = bench_of_warm_documents(60, overlap=overlap)
    questions = [ask(bench, document, max_tokens=4) for document in range(3)]
    bench.step()
    long = bench.add(cold(0, 140), max_tokens=1)
    for step in steps_to_finish(bench, [long], 40):
        questions.append(ask(bench, step % 3, max_tokens=4))
    assert bench.scheduler.counters.num_page_waits > 0
    bench.run()
    bench.check_outputs()


def test_while_a_long_prompt_waits_for_pages_those_pass_that_leave_it_enough() -> None:
    """Someone who came before it holds two documents for long; beside the third one and its questions it would fit."""
    bench = bench_of_warm_documents(60)
    slow = [ask(bench, document, max_tokens=30) for document in (0, 1)]
    bench.step()
    long = bench.add(cold(0, 160), max_tokens=1)
    for _ in steps_to_finish(bench, slow, 40):
        question = ask(bench, 2)
        for _ in steps_to_finish(bench, [question], 3):
            assert long.status is Status.WAITING
        assert question.num_cached_tokens == len(WARM[2])
    stopped = [ask(bench, document) for document in (0, 1)]  # one more document is one too many
    for _ in steps_to_finish(bench, [long], 14):
        assert all(one.status is Status.WAITING for one in stopped) or long.num_pages
    bench.run()
    bench.check_outputs()


def test_who_asks_about_a_document_that_is_being_read_finds_it_afterwards() -> None:
    bench = Bench(num_pages=60, max_num_batched_tokens=STEP)
    asked = [bench.add([*cold(0, 100), 9000 + number], max_tokens=2) for number in range(5)]
    bench.run()
    bench.check_outputs()
    assert asked[0].num_cached_tokens == 0
    assert min(one.num_cached_tokens for one in asked[1:]) >= 100 - 2 * STEP


def test_a_question_passes_once_what_it_asks_about_has_been_read() -> None:
    bench = Bench(num_pages=120, max_num_batched_tokens=STEP)
    first, second = bench.add(cold(0, 200), max_tokens=1), bench.add(cold(1, 100), max_tokens=1)
    question = bench.add([*cold(0, 60), 9000], max_tokens=1)
    for _ in steps_to_finish(bench, [question], 6):
        assert second.status is Status.WAITING
    assert question.num_cached_tokens >= 60 - STEP
    assert remaining(first) > 200 / 2
    bench.run()
    bench.check_outputs()


def test_what_passes_long_prompts_keeps_its_document_from_them() -> None:
    """It waits for a seat behind more of them than are looked at, and its document is the least recently used one."""
    bench = bench_of_warm_documents(52, max_num_seqs=2)
    slow = ask(bench, 0, max_tokens=10)
    documents = [bench.add(cold(number), max_tokens=1) for number in range(6)]
    bench.step()
    question = ask(bench, 1)
    for _ in steps_to_finish(bench, [slow], 12):
        assert question.status is Status.WAITING
    assert documents[1].num_pages
    bench.run()
    bench.check_outputs()
    assert question.num_cached_tokens == len(WARM[1])


def test_a_long_prompt_waits_for_none_that_is_less_urgent_and_the_less_urgent_do_not_pass_it() -> None:
    bench = bench_of_warm_documents(90, policy="priority")
    bulk = bench.add(cold(0), max_tokens=1, priority=1)
    bench.step()
    urgent = bench.add(cold(1), max_tokens=1, priority=0)
    bench.step()
    assert urgent.num_computed_tokens == STEP
    behind, same, lower = (
        bench.add(cold(2), max_tokens=1, priority=0),
        ask(bench, 0, priority=0),
        ask(bench, 1, priority=1),
    )
    bench.step()
    assert [one.status for one in (behind, same, lower)] == [Status.WAITING, Status.RUNNING, Status.WAITING]
    ended = []
    for _ in steps_to_finish(bench, [bulk], 40):
        ended += [one for one in bench.requests[3:] if one.status is Status.FINISHED and one not in ended]
    assert ended == [same, urgent, behind, lower]
    bench.check_outputs()


def test_stock_keeps_its_order() -> None:
    """The baseline has no long prompts: whoever gets no pages stops everybody."""
    bench = Bench(num_pages=60, max_num_batched_tokens=STEP, composition="stock")
    bench.add(cold(0, 140), max_tokens=8)
    bench.step()
    refused, short = bench.add(cold(1, 120), max_tokens=1), bench.add([1], max_tokens=1)
    bench.step()
    assert [one.status for one in (refused, short)] == [Status.WAITING, Status.WAITING]
    bench.run()
    bench.check_outputs()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 2), st.integers(1, 6), st.integers(0, 3)), min_size=4, max_size=40
    ),
    st.integers(44, 80),
    st.booleans(),
    st.sampled_from(["fcfs", "priority"]),
    st.sampled_from([None, 1e-6, 0.1]),
    st.sampled_from([0.0, 1e9]),
)
def test_one_long_prompt_of_an_urgency_at_a_time_on_any_pool(
    asked: list[tuple[bool, int, int, int]],
    num_pages: int,
    overlap: bool,
    policy: str,
    max_step_s: float | None,
    max_hold_s: float,
) -> None:
    """Questions and cold documents arrive so many steps after each other, and all are finished."""
    bench = bench_of_warm_documents(
        num_pages, overlap=overlap, policy=policy, max_step_s=max_step_s, max_hold_s=max_hold_s
    )
    for number, (is_cold, document, max_tokens, num_steps) in enumerate(asked):
        priority = document if policy == "priority" else 0
        if is_cold:
            bench.add(cold(number), max_tokens, priority=priority)
        else:
            ask(bench, document, max_tokens, priority=number % 3 if policy == "priority" else 0)
        for _ in range(num_steps):
            bench.step()
            for urgency in range(3):
                assert sum(one.priority == urgency and is_read_in_pieces(bench, one) for one in bench.requests) <= 1
    bench.run()
    bench.check_outputs()
    assert all(request.status is Status.FINISHED for request in bench.requests)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=7),
    st.integers(20, 43),
    st.integers(44, 60),
    st.booleans(),
    st.sampled_from([0, 8]),
)
def test_no_stream_of_short_prompts_keeps_a_long_one_waiting(
    stream: list[tuple[int, int]], num_long_pages: int, num_pages: int, overlap: bool, reserve_tokens: int
) -> None:
    """The same questions over and over, one a step and more than can be answered."""
    bench = bench_of_warm_documents(num_pages, overlap=overlap, reserve_tokens=reserve_tokens)
    for document in range(3):
        ask(bench, document, max_tokens=6)
    bench.step()
    long = bench.add(cold(0, 4 * num_long_pages), max_tokens=1)
    for step in steps_to_finish(bench, [long], 120):
        ask(bench, *stream[step % len(stream)])
    assert long.num_output_tokens == 1
    bench.check_outputs()
