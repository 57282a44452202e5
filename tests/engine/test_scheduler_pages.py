"""What requests find in the prefix tree, where their pages lie, and who gives way when there are too few."""

from __future__ import annotations

import numpy as np
import pytest

from p99lab.engine.request import FinishReason
from tests.engine.scheduler_bench import Bench

pytestmark = pytest.mark.light


def test_a_document_is_found_again_to_the_token() -> None:
    bench = Bench(page_size=4)
    document = [0, 1, 2, 0, 1, 2, 1, 1, 0]
    bench.add([*document, 2])
    bench.run()
    request = bench.add([*document, 1])
    bench.run()
    assert request.num_cached_tokens == len(document)
    counters = bench.scheduler.counters
    assert (counters.num_queries, counters.num_hits) == (2, 1)
    assert (counters.num_queried_tokens, counters.num_cached_tokens) == (20, 9)
    bench.check_outputs()


def test_rows_over_one_document_form_a_group() -> None:
    bench = Bench(page_size=2)
    bench.add([0, 1, 2, 0, 1, 2])
    bench.run()
    bench.add([1, 1])
    first, second = bench.add([0, 1, 2, 0, 1, 0, 0]), bench.add([0, 1, 2, 0, 1, 1, 1])
    plan = bench.schedule()
    (group,) = plan.groups
    assert {plan.rows[i].request_id for i in group.rows} == {first.request_id, second.request_id}
    assert (group.first_page, group.num_pages) == (0, 2)


def test_equal_prompts_computed_side_by_side_end_up_on_the_same_pages() -> None:
    bench = Bench(page_size=2)
    first, second = bench.add([0, 1, 2, 0, 1]), bench.add([0, 1, 2, 0, 1])
    bench.step()
    assert first.pages[:2].tolist() == second.pages[:2].tolist()
    assert first.pages[2] != second.pages[2]
    bench.run()
    bench.check_outputs()


def test_a_long_prompt_gets_one_run_of_pages_though_cached_ones_lay_between() -> None:
    bench = Bench(num_pages=12, min_run_pages=4)
    kept = [[first, 2, 1, 2, 0] for first in (0, 1, 2)]
    for prompt in (kept[0], [2, 2, 0, 0, 1], kept[1], [2, 2, 1, 0, 1], kept[2]):
        bench.add(prompt, max_tokens=1)
        bench.run()
    for prompt in kept:
        bench.scheduler.tree.touch(np.array(prompt, np.int32))
    long = bench.add([1] * 20, max_tokens=1)
    plan = bench.schedule()
    assert plan is not None
    assert sum(len(moves.sources) for moves in plan.moves) > 0
    assert np.diff(long.pages).tolist() == [1] * 4
    bench.update()
    bench.scheduler.check()
    asked = [bench.add([*prompt, 0], max_tokens=1) for prompt in kept]
    bench.run()
    bench.check_outputs()
    assert [request.num_cached_tokens for request in asked] == [5] * 3  # found where they have been moved to


def test_pages_for_an_answer_lie_beside_its_prompts_as_far_as_they_can_be_had() -> None:
    bench = Bench(num_pages=12, reserve_tokens=12, max_num_batched_tokens=100)
    first, second = bench.add([0] * 4, max_tokens=17), bench.add([1] * 4, max_tokens=17)
    bench.step()
    assert [request.num_pages for request in (first, second)] == [4, 4]  # for 12 tokens more
    third = bench.add([2] * 11, max_tokens=9)
    bench.step()
    assert third.num_pages == 3  # for its answer there are none
    for request in (first, second, third):
        assert (np.diff(request.pages) == 1).all()
    bench.run()
    bench.check_outputs()
    assert bench.pool.num_active == 0


def test_when_pages_run_out_the_last_to_come_gives_way() -> None:
    bench = Bench(page_size=2, num_pages=6, prefix_cache=False)
    first, second = bench.add([0, 1, 2], max_tokens=8), bench.add([1, 1, 1], max_tokens=8)
    preempted = []
    while bench.step() is not None:
        preempted += bench.scheduler.outcome.preempted
    assert preempted
    assert set(preempted) == {second}
    assert bench.scheduler.counters.num_preemptions == len(preempted)
    assert bench.scheduler.counters.num_queries == 2
    assert first.finish_reason is FinishReason.LENGTH
    bench.check_outputs()


def test_the_least_urgent_gives_way_under_priority() -> None:
    bench = Bench(page_size=2, num_pages=6, policy="priority")
    first, second = bench.add([0, 1, 2], max_tokens=8, priority=1), bench.add([1, 1, 1], max_tokens=8, priority=0)
    victims = set()
    while bench.step() is not None:
        victims |= set(bench.scheduler.outcome.preempted)
    assert victims == {first}
    assert second.finish_reason is FinishReason.LENGTH
    bench.check_outputs()


def test_what_waits_next_is_evicted_last() -> None:
    bench = Bench(page_size=2, num_pages=10, max_num_seqs=1)
    for prompt in ([0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2]):
        bench.add(prompt, max_tokens=1)
    bench.run()
    bench.add([5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5], max_tokens=1)  # six pages where four are free
    next_one = bench.add([0, 0, 0, 0, 1], max_tokens=1)  # will find the least recently used
    bench.run()
    assert next_one.num_cached_tokens == 4


def test_a_scored_prompt_is_computed_whole_though_the_tree_holds_it_and_leaves_its_pages_there() -> None:
    bench = Bench(page_size=2, max_num_batched_tokens=3)
    prompt = [0, 1, 2, 0, 1, 2, 1]
    scored = [bench.add(prompt, prompt_logprobs=0)]
    bench.run()
    found = bench.add(prompt)
    bench.run()
    scored.append(bench.add(prompt, prompt_logprobs=0))
    num_computed = []
    while (plan := bench.step()) is not None:
        num_computed.append(plan.num_tokens)
    assert num_computed == [3, 3, 1, 1, 1, 1]
    assert [request.num_cached_tokens for request in (*scored, found)] == [0, 0, 6]
    assert bench.scheduler.counters.num_queries == 1
    bench.check_outputs()


def test_a_scored_prompt_that_gave_way_goes_on_from_what_it_has_scored() -> None:
    bench = Bench(page_size=2, num_pages=8, max_num_batched_tokens=2, policy="priority")
    bench.add([0, 1, 2], max_tokens=8, priority=0)
    scored = bench.add([1] * 9, max_tokens=1, priority=1, prompt_logprobs=0)
    preempted_at: list[int] = []
    starts: list[int] = []
    while (plan := bench.step()) is not None:
        preempted_at += [len(request.prompt_logprobs) - 1 for request in bench.scheduler.outcome.preempted]
        starts += [row.num_computed_tokens for row in plan.rows if row.request_id == scored.request_id]
    (num_scored,) = preempted_at
    assert 0 < num_scored < scored.num_prompt_tokens - 1
    assert starts == sorted(starts)  # what it has scored is found in the tree
    bench.check_outputs()
