"""The order of admission: bounded, complete, and fond of company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.admission import LOOKAHEAD, Admission
from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.plan import StepResult
from p99lab.engine.policy import POLICIES, URGENCIES
from p99lab.engine.request import Request, SamplingParams, Status
from p99lab.engine.scheduler import Scheduler

pytestmark = pytest.mark.light

PAGE = 4
DOCUMENTS = [[100 + i] * 12 for i in range(5)]  # three pages each


def tree_of_documents(num_pages: int = 4096) -> PrefixTree:
    tree = PrefixTree(PagePool(num_pages, PAGE))
    for document in DOCUMENTS:
        ids = np.array(document, np.int32)
        tree.release(tree.insert(ids, tree.grant(ids, len(ids)).pages, final=True))
    return tree


def question(
    number: int, document: int | None, arrival_s: float = 0.0, priority: int = 0, deadline_s: float | None = None
) -> Request:
    """About a cached document, or (None) about nothing that anybody knows."""
    about = [1000 + number] * 12 if document is None else DOCUMENTS[document]
    ids = np.array([*about, 5000 + number, 1, 2], np.int32)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    return Request.create(number, ids, sampling, arrival_s, PAGE, priority=priority, deadline_s=deadline_s)


def run_as(tree: PrefixTree, request: Request) -> Request:
    grant = tree.grant(request.token_ids, request.num_tokens)
    request.num_pages, request.num_computed_tokens = len(grant.pages), grant.num_cached_tokens
    request.page_table[: request.num_pages] = grant.pages
    return request


def admission(tree: PrefixTree, max_hold_s: float, min_shared_tokens: int = PAGE, policy: str = "fcfs") -> Admission:
    return Admission(tree, max_hold_s, min_shared_tokens, URGENCIES[policy])


def numbers(requests: list[Request]) -> list[int]:
    return [request.number for request in requests]


def test_off_is_the_policys_order() -> None:
    waiting = [question(i, i % 2) for i in range(6)]
    assert admission(tree_of_documents(), 0.0).order(waiting, [], 0.0) == waiting


def test_company_comes_first_and_keeps_its_order() -> None:
    waiting = [question(0, 0), question(1, None), question(2, 1), question(3, 1), question(4, 2), question(5, 1)]
    assert numbers(admission(tree_of_documents(), 1.0).order(waiting, [], 0.5)) == [2, 3, 5, 0, 1, 4]


def test_what_runs_is_company() -> None:
    tree = tree_of_documents()
    running = [run_as(tree, question(10, 2)), run_as(tree, question(11, 2))]
    waiting = [question(0, 0), question(1, 2), question(2, 1), question(3, 1)]
    assert numbers(admission(tree, 1.0).order(waiting, running, 0.5)) == [1, 2, 3, 0]


def test_short_prefixes_are_no_company() -> None:
    waiting = [question(0, 0), question(1, 1), question(2, 1)]
    assert admission(tree_of_documents(), 1.0, 13).order(waiting, [], 0.5) == waiting


def test_nobody_is_passed_for_longer() -> None:
    waiting = [question(0, 0, 0.0), question(1, 1, 0.2), question(2, 2, 0.9), question(3, 1, 0.9), question(4, 1, 0.9)]
    bounded = admission(tree_of_documents(), 1.0)
    assert numbers(bounded.order(waiting, [], 0.95)) == [1, 3, 4, 0, 2]
    assert numbers(bounded.order(waiting, [], 1.1)) == [0, 1, 3, 4, 2]
    assert bounded.order(waiting, [], 2.0) == waiting


def test_only_equals_pass_each_other() -> None:
    """Neither for company nor after their hold do the less urgent pass the others."""
    waiting = [question(i, document, priority=p) for i, (document, p) in enumerate([(0, 0), (1, 0), (1, 0), (2, 1)])]
    waiting += [question(4, 3, priority=1), question(5, 3, priority=1), question(6, 3, priority=1)]
    urgent_first = admission(tree_of_documents(), 1.0, policy="priority")
    assert numbers(urgent_first.order(waiting, [], 0.5)) == [1, 2, 0, 4, 5, 6, 3]
    late = [question(7, 2, 0.9, priority=-1), *waiting]
    assert numbers(urgent_first.order(late, [], 1.0)) == [7, *range(7)]


def cold(number: int, num_tokens: int, arrival_s: float = 0.0, priority: int = 0) -> Request:
    ids = np.arange(num_tokens, dtype=np.int32) + 1000 * (number + 1)
    return Request.create(number, ids, SamplingParams(max_tokens=3), arrival_s, PAGE, priority=priority)


def candidates(
    some: Admission, waiting: list[Request], running: list[Request], step_tokens: int = 16, num_planned: int = 0
) -> list[int]:
    """All are refused pages."""
    return numbers([*some.candidates(waiting, running, 9.0, step_tokens, num_planned)])


def test_behind_a_long_prompt_only_short_ones_of_its_urgency_are_candidates() -> None:
    tree = tree_of_documents()
    waiting = [cold(0, 50), question(1, 1), cold(2, 50), question(3, None), question(4, 1, priority=1)]
    one_by_one = admission(tree, 0.0, policy="priority")
    assert candidates(one_by_one, waiting, []) == [0, 1]  # a short one that is refused stops those behind it
    reading = run_as(tree, cold(5, 50))
    assert candidates(one_by_one, waiting, [reading]) == [1]
    reading.num_computed_tokens = 50 - 16
    assert candidates(one_by_one, waiting, [reading]) == [0, 1]
    reading = run_as(tree, cold(6, 50, priority=1))
    assert candidates(one_by_one, waiting, [reading]) == [0, 1]
    assert candidates(one_by_one, waiting[-1:], [reading]) == [4]


@pytest.mark.parametrize(("document", "num_pages"), [(1, 20), (3, 23), (None, 23)])
def test_who_passes_a_long_prompt_that_lacks_pages_leaves_them_to_it(document: int | None, num_pages: int) -> None:
    """Twelve it needs. Who came later has four and may take one more. Three are the document, unless it is the same,
    and the candidate's own are two, and one to copy from."""
    for spare, passing in ((0, [1]), (-1, [])):
        tree = tree_of_documents(num_pages + spare)
        earlier, later = run_as(tree, question(2, 2)), run_as(tree, question(3, 1, 2.0))
        less_urgent = run_as(tree, question(4, 4, 2.0, priority=1))
        waiting = [cold(0, 48, 1.0), question(1, document, 3.0)]
        some = admission(tree, 0.0, policy="priority")
        assert candidates(some, waiting, [earlier, later, less_urgent]) == [0, *passing]


def test_what_is_known_to_be_long_is_not_looked_up_before_it_can_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of_documents()
    waiting, reading, looked_up = [cold(0, 51)], run_as(tree, cold(1, 900)), []
    find = tree.find
    monkeypatch.setattr(tree, "find", lambda ids: (looked_up.append(len(ids)), find(ids))[1])
    some = admission(tree, 0.0)
    for num_planned in range(0, 40, 4):
        assert candidates(some, waiting, [reading], num_planned=100 + num_planned) == []
    assert len(looked_up) == 2  # 48 tokens at least are missing; after 32 more a step may hold the rest
    ids = waiting[0].token_ids[:-1]
    tree.release(tree.insert(ids, tree.grant(ids, len(ids)).pages, final=True))
    assert candidates(some, waiting, [reading], num_planned=164) == [0]


def test_a_prompt_that_may_find_a_partial_page_is_not_long_for_its_tokens() -> None:
    tree = tree_of_documents()
    ids = np.arange(14, dtype=np.int32)
    tree.release(tree.insert(ids, tree.grant(ids, len(ids)).pages, final=True))
    prompt = np.array([*ids, 7, 8, 9], np.int32)
    found, scored = (
        Request.create(number, prompt, SamplingParams(prompt_logprobs=scores), 0.0, PAGE)
        for number, scores in enumerate((None, 0))
    )
    reading = run_as(tree, cold(2, 50))
    for step_tokens in (3, 15):
        assert candidates(admission(tree, 0.0), [scored, found], [reading], step_tokens) == [found.number]


def test_the_next_ones_are_the_first_and_those_that_may_pass_them() -> None:
    tree = tree_of_documents()
    some, reading = admission(tree, 0.0), run_as(tree, cold(9, 50))
    waiting = [cold(0, 50), cold(1, 50), question(2, 1), cold(3, 50), question(4, 1), question(5, 1)]
    assert numbers(some.next_ones(waiting, 2)) == [0, 1]  # nothing is known of them
    asked = some.candidates(waiting, [reading], 0.0, 16, 0)
    for _ in range(2):
        next(asked).status = Status.RUNNING
    assert numbers(some.next_ones(waiting, 2)) == [0, 1, 2, 4]
    assert numbers(some.next_ones(waiting, 3)) == [0, 1, 2, 4, 5]


def test_an_evicted_document_is_looked_up_again() -> None:
    tree = tree_of_documents()
    fond = admission(tree, 1.0)
    waiting = [question(0, 0), question(1, 1), question(2, 1)]
    assert numbers(fond.order(waiting, [], 0.0)) == [1, 2, 0]
    tree.evict(tree.pool.num_cached)
    assert fond.order(waiting, [], 0.0) == waiting


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.integers(0, 30), st.integers(0, 2)), max_size=50),
    st.lists(st.integers(0, 4), max_size=6),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.sampled_from(sorted(POLICIES)),
)
def test_order_is_complete_and_bounded(
    asked: list[tuple[int | None, int, int]], running_on: list[int], max_hold_s: float, policy: str
) -> None:
    tree, now = tree_of_documents(), 3.0
    running = [run_as(tree, question(100 + i, document)) for i, document in enumerate(running_on)]
    waiting = [
        question(i, document, tenths / 10, urgency, float(urgency) if urgency else None)
        for i, (document, tenths, urgency) in enumerate(asked)
    ]
    waiting.sort(key=lambda request: POLICIES[policy](request, now))
    ordered = admission(tree, max_hold_s, policy=policy).order(waiting, running, now)
    assert sorted(numbers(ordered)) == sorted(numbers(waiting))
    place = {request.number: at for at, request in enumerate(ordered)}
    for first, request in enumerate(waiting):
        for other in waiting[first + 1 :]:
            if place[other.number] < place[request.number]:
                assert URGENCIES[policy](other) == URGENCIES[policy](request)
                assert now - request.timeline.arrival_s < max_hold_s
    assert ordered[LOOKAHEAD:] == waiting[LOOKAHEAD:]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(4, 20),
    st.sampled_from([0.0, 2.0, 1e9]),
)
def test_everybody_is_served_and_no_step_is_idle(
    asked: list[tuple[int | None, int]], max_tokens: int, max_hold_s: float
) -> None:
    """One second a step; requests arrive so many seconds after the one before. Everlasting holds starve nobody here:
    what waits is finite, and whoever is left is company enough for a device that has nothing else."""
    config = SchedulerConfig(max_num_batched_tokens=max_tokens, max_num_seqs=4, max_hold_s=max_hold_s)
    scheduler = Scheduler(config, GroupingConfig(min_shared_tokens=PAGE), tree_of_documents())
    arrivals, at = [], 0.0
    for number, (document, gap) in enumerate(asked):
        at += gap
        arrivals.append(question(number, document, at))
    now, admitted = 0.0, {}
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0].timeline.arrival_s <= now:
            scheduler.add(arrivals.pop(0))
        plan = scheduler.schedule(now)
        assert (plan is None) == (not scheduler.running and not scheduler.waiting)
        if plan is not None:
            admitted |= {request.number: now for request in scheduler.outcome.admitted}
            sampled = tuple(7 if row.samples else None for row in plan.rows)
            scheduler.update(StepResult(plan.epoch, sampled, (None,) * len(plan.rows)))
            scheduler.check()
        now += 1.0
        assert now < 5000
    assert sorted(admitted) == list(range(len(asked)))
