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
from p99lab.engine.request import Request, SamplingParams
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
