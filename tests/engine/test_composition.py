"""Step compositions: what a step holds, how long it may take, and who may not be kept waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.composition import LONG_SHARE, MIN_CHUNK, Chunked, StepBound, Stock, remaining
from p99lab.engine.costs import H200, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.policy import URGENCIES
from p99lab.engine.request import Request, SamplingParams, Status

pytestmark = pytest.mark.light

COST = StepCost(H200, Geometry.named("llama-3.1-8b"), page_size=64)


def running(number: int, num_prompt_tokens: int, num_computed: int, priority: int = 0) -> Request:
    """A request that has computed so many of its prompt's tokens; all of them: it decodes its first token."""
    ids = np.ones(num_prompt_tokens, np.int32)
    request = Request.create(number, ids, SamplingParams(max_tokens=8), 0.0, 64, priority=priority)
    request.status = Status.RUNNING
    request.num_computed_tokens = min(num_computed, num_prompt_tokens)
    if num_computed >= num_prompt_tokens:
        request.add_placeholder()
    return request


def bound(max_step_s: float, decode_time_s: float) -> StepBound:
    """Decoding takes so long, and chunks come on top of it."""

    def step_time_s(shares: Sequence[tuple[Request, int]]) -> float:
        return decode_time_s + sum(COST.chunk_time_s(n, one.num_computed_tokens) for one, n in prompt_shares(shares))

    return StepBound(max_step_s, COST, step_time_s)


some_running = st.lists(
    st.builds(
        lambda num_prompt_tokens, computed: (num_prompt_tokens, int(num_prompt_tokens * computed)),
        st.one_of(st.integers(1, 300), st.integers(1, 131_072)),
        st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    ),
    min_size=1,
    max_size=64,
).map(lambda sizes: [running(number, *size) for number, size in enumerate(sizes)])


def prompt_shares(shares: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
    return [(request, size) for request, size in shares if request.num_computed_tokens < request.num_prompt_tokens]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(some_running, st.integers(1, 4096), st.sampled_from([None, 0.01, 0.045, 0.2]), st.floats(0.001, 0.03))
def test_chunked_keeps_its_limits_and_makes_progress(
    requests: list[Request], max_tokens: int, max_step_s: float | None, decode_s: float
) -> None:
    chunked = Chunked(max_tokens, None if max_step_s is None else bound(max_step_s, decode_s))
    shares = chunked.shares(requests)
    assert shares
    assert len({request.request_id for request, _ in shares}) == len(shares)
    assert all(0 < size <= remaining(request) for request, size in shares)
    assert sum(size for _, size in shares) <= max_tokens
    prompts = prompt_shares(shares)
    num_decoding = len(shares) - len(prompts)
    all_decoding = [r for r in requests if r.num_computed_tokens >= r.num_prompt_tokens]
    assert num_decoding == min(len(all_decoding), max_tokens)
    num_left = max_tokens - num_decoding
    asked = sum(remaining(r) for r in requests) - len(all_decoding)
    num_given = sum(size for _, size in prompts)
    assert num_given >= min(asked, num_left, MIN_CHUNK)
    if max_step_s is None or not all_decoding:
        assert num_given == min(asked, num_left)
    elif num_given > MIN_CHUNK + MIN_CHUNK * LONG_SHARE:
        chunks_s = sum(COST.chunk_time_s(size, request.num_computed_tokens) for request, size in prompts)
        floor_s = COST.chunk_time_s(MIN_CHUNK, 131_072)
        assert decode_s + chunks_s <= max_step_s + floor_s


@settings(deadline=None, derandomize=True, max_examples=100)
@given(some_running, st.integers(64, 4096), st.sampled_from([0.01, 0.045, 0.2]))
def test_the_first_long_prompt_always_gets_its_share(
    requests: list[Request], max_tokens: int, max_step_s: float
) -> None:
    shares = dict(Chunked(max_tokens, bound(max_step_s, 0.02)).shares(requests))
    num_left = max_tokens - sum(request.num_computed_tokens >= request.num_prompt_tokens for request in requests)
    first_long = next((request for request in requests if remaining(request) > num_left > 0), None)
    if first_long is not None:
        assert shares[first_long] >= min(num_left * LONG_SHARE, MIN_CHUNK * LONG_SHARE)


def test_questions_do_not_wait_for_a_document_nor_it_for_them() -> None:
    document = running(0, 131_072, 0)
    questions = [running(1 + i, 1064, 1000) for i in range(40)]
    shares = dict(Chunked(2048).shares([document, *questions]))
    assert [shares.get(question, 0) for question in questions[:28]] == [64] * 28  # seven eighths
    assert shares[document] == 2048 * LONG_SHARE
    shares = dict(Chunked(2048).shares([document, *questions[:2]]))
    assert shares[document] == 2048 - 2 * 64


def test_what_rides_along_with_decoding_leaves_time_for_more() -> None:
    decoding, questions = running(0, 1000, 1000), [running(1 + i, 131_072, 131_008) for i in range(20)]

    def step_time_s(shares: Sequence[tuple[Request, int]]) -> float:  # half of what chunks take passes beside decoding
        return 0.02 + sum(COST.chunk_time_s(n, one.num_computed_tokens) for one, n in prompt_shares(shares)) / 2

    shares = Chunked(2048, StepBound(0.045, COST, step_time_s)).shares([decoding, *questions])
    assert 0.045 * 0.95 < step_time_s(shares) <= 0.045 + COST.chunk_time_s(1, 131_072)
    assert [size for _, size in prompt_shares(shares)[:-1]] == [64] * (len(shares) - 2)


def test_room_counts_a_document_by_its_share() -> None:
    document, decoding = running(0, 131_072, 0), running(1, 100, 100)
    assert Chunked(2049).room([document, decoding]) == 2048 - 256
    assert Chunked(2049).room([decoding]) == 2048
    assert Chunked(2048).room([running(0, 2000, 0)]) == 48


def test_without_decode_rows_there_is_no_bound() -> None:
    assert Chunked(2048, bound(0.001, 1.0)).shares([running(0, 131_072, 0)])[0][1] == 2048


def test_a_long_prompt_yields_only_to_its_equals() -> None:
    urgent, other = running(0, 131_072, 0, priority=0), running(1, 64, 0, priority=1)
    shares = Chunked(256, None, URGENCIES["priority"]).shares([urgent, other])
    assert [(request.number, size) for request, size in shares] == [(0, 256)]
    shares = Chunked(256, None, URGENCIES["fcfs"]).shares([urgent, other])
    assert [(request.number, size) for request, size in shares] == [(1, 64), (0, 192)]


def test_stock_runs_prompts_whole_and_alone() -> None:
    decoding, prompts = running(0, 64, 64), [running(1, 100, 0), running(2, 100, 0), running(3, 100, 0)]
    assert [(r.number, size) for r, size in Stock(250).shares([decoding, *prompts])] == [(1, 100), (2, 100)]
    assert [(r.number, size) for r, size in Stock(50).shares([decoding, *prompts])] == [(1, 100)]
    assert [(r.number, size) for r, size in Stock(50).shares([decoding])] == [(0, 1)]
