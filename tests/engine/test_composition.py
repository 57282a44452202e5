"""Step compositions: what a step holds, how long it may take, and who may not be kept waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p99lab.engine.composition import (
    BACKLOG,
    FEW_TILES,
    LEAST_LONG,
    LONG_SHARE,
    MIN_CHUNK,
    QUIET_SHARE,
    Chunked,
    StepBound,
    Stock,
    remaining,
)
from p99lab.engine.costs import H200, Level, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.policy import URGENCIES
from p99lab.engine.request import Request, SamplingParams, Status
from p99lab.engine.step_price import Reader, SharedKeys, StepPrice

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


TILE = COST.tile_tokens
QUESTION = 64
DOCUMENT = 130_816


def bound(max_step_s: float, num_documents: int = 0) -> StepBound:
    """Requests share nothing, or request i sees the document i modulo `num_documents` and what it has of its own."""

    def readers(requests: Sequence[Request]) -> list[Reader]:
        documents = [SharedKeys(DOCUMENT) for _ in range(num_documents)]
        if not documents:
            return [Reader([SharedKeys(one.num_computed_tokens)]) for one in requests]
        return [_on(documents[one.number % num_documents], one) for one in requests]

    return StepBound(max_step_s, COST, readers)


def _on(document: SharedKeys, request: Request) -> Reader:
    """Who has not computed as much as a document reads one of its own."""
    num_own = request.num_computed_tokens - DOCUMENT
    return (
        Reader([document, SharedKeys(num_own)]) if num_own >= 0 else Reader([SharedKeys(request.num_computed_tokens)])
    )


def price_of(shares: Sequence[tuple[Request, int]], bound: StepBound) -> float:
    """Seconds of a step of these."""
    price = StepPrice(COST)
    for (_, size), reader in zip(shares, bound.readers([request for request, _ in shares]), strict=True):
        price.add(reader, size)
    return price.seconds


def asks(number: int, num_left: int = QUESTION) -> Request:
    """A question about a document, of which so many tokens are left to compute."""
    return running(number, DOCUMENT + QUESTION, DOCUMENT + QUESTION - num_left)


def decodes(number: int) -> Request:
    return running(number, DOCUMENT + QUESTION, DOCUMENT + QUESTION)


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
@given(some_running, st.integers(1, 4096), st.sampled_from([None, 0.01, 0.045, 0.2]))
def test_chunked_keeps_its_limits_and_makes_progress(
    requests: list[Request], max_tokens: int, max_step_s: float | None
) -> None:
    limit = None if max_step_s is None else bound(max_step_s)
    shares = Chunked(max_tokens, limit).shares(requests)
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
    assert num_given >= min(asked, num_left, 1)
    if limit is None or not all_decoding:
        assert num_given == min(asked, num_left)
    elif num_given > MIN_CHUNK + TILE:
        open_s = COST.rest_s(len(shares) * TILE) - COST.rest_s(0)  # what the rest of paid tiles may cost
        assert price_of(shares, limit) <= limit.max_step_s + open_s


@settings(deadline=None, derandomize=True, max_examples=100)
@given(some_running, st.integers(64, 4096), st.sampled_from([0.01, 0.045, 0.2]))
def test_the_first_long_prompt_always_gets_its_share(
    requests: list[Request], max_tokens: int, max_step_s: float
) -> None:
    shares = dict(Chunked(max_tokens, bound(max_step_s)).shares(requests))
    num_left = max_tokens - sum(request.num_computed_tokens >= request.num_prompt_tokens for request in requests)
    first_long = next((i for i, request in enumerate(requests) if remaining(request) > num_left > 0), None)
    if first_long is not None:  # or one before it, which fits the tokens and not the time
        perhaps = [request for request in requests[: first_long + 1] if remaining(request) > min(num_left, LEAST_LONG)]
        assert max(shares.get(request, 0) for request in perhaps) >= min(num_left * LONG_SHARE, TILE)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 60), st.integers(0, 40), st.integers(1, 6), st.sampled_from([0.03, 0.046, 0.1]))
def test_tiles_that_are_paid_for_are_filled(
    num_decoding: int, num_asking: int, num_documents: int, max_step_s: float
) -> None:
    """Of each document whose step computes prompts: whole tiles, or all there is. And the bound is kept."""
    requests = [decodes(number) for number in range(num_decoding)]
    requests += [asks(num_decoding + i, 1 + (i * 37) % QUESTION) for i in range(num_asking)]
    limit = bound(max_step_s, num_documents)
    shares = Chunked(2048, limit).shares(requests)
    given = dict(shares)
    for document in range(num_documents):
        here = [one for one in requests if one.number % num_documents == document]
        num_tokens = sum(given.get(one, 0) for one in here)
        if any(given.get(one, 0) > 1 for one in here):
            assert num_tokens % TILE == 0 or num_tokens == sum(map(remaining, here))
    filled_s = COST.rest_s(num_documents * TILE) - COST.rest_s(0)
    least = [(one, 1) for one in requests[:num_decoding]] + [(asks(num_decoding), MIN_CHUNK + TILE)] * (num_asking > 0)
    assert price_of(shares, limit) <= max(max_step_s, price_of(least, limit)) + filled_s


def test_the_tiles_of_decode_rows_are_filled_first() -> None:
    """Of both documents, though the first question could take all the time that there is."""
    requests = [decodes(number) for number in range(20)] + [asks(20), asks(22), asks(24), asks(21)]
    limit = bound(0.031, num_documents=2)
    shares = dict(Chunked(2048, limit).shares(requests))
    assert shares[requests[-1]] == TILE - 10
    assert shares[requests[20]] > TILE
    assert sum(size for one, size in shares.items() if one.number % 2 == 0) % TILE == 0
    assert price_of([*shares.items()], limit) <= limit.step_s(4 * QUESTION)


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, QUESTION)), max_size=20),
    st.booleans(),
    st.sampled_from([0.001, 0.022, 0.025, 0.03, 0.044]),
    st.sampled_from([3, 8, 100, 2048]),
)
@example(1, [(0, 8)], True, 0.001, 8)  # few tokens, which the question could take whole
def test_the_first_in_line_always_gets_on(
    num_decoding: int, asking: list[tuple[int, int]], has_long: bool, max_step_s: float, num_tokens: int
) -> None:
    """The first short prompt and the first long one, however many others would fill the tiles of decode rows.

    And the bound is exceeded by what those two get where nothing of them fits, and by the rest of their tiles.
    """
    decoding = [decodes(10 * i + i % 4) for i in range(num_decoding)]  # on four documents of ten
    questions = [asks(1000 + 10 * i + document, left) for i, (document, left) in enumerate(asking)]
    long = [running(0, 260_000, DOCUMENT)] * has_long
    limit = bound(max_step_s, num_documents=10)
    shares = Chunked(num_decoding + num_tokens, limit).shares([*decoding, *long, *questions])
    given = dict(shares)
    short = [one for one in questions if remaining(one) <= num_tokens][:1]
    first_long = (long or [one for one in questions if remaining(one) > num_tokens])[:1]
    assert all(given.get(one, 0) > 0 for one in [*short, *first_long])
    assert len(given) > num_decoding or not (questions or long)
    rows = [(one, 1) for one in decoding]
    least = [(one, MIN_CHUNK + TILE) for one in short or first_long] + [(one, TILE) for one in first_long if short]
    least_s = price_of([*rows, *least], limit) - price_of(rows, limit)
    filled_s = COST.rest_s(10 * TILE) - COST.rest_s(0)
    assert price_of(shares, limit) <= max(max_step_s, price_of(rows, limit)) + least_s + filled_s


def test_pieces_of_a_few_tokens_are_no_tiles_each_beyond_the_bound() -> None:
    """Forty requests with a token left each, on as many documents, beside decode rows that take all the time."""
    requests = [decodes(0), *(asks(i, 1) for i in range(1, 41))]
    shares = Chunked(2048, bound(0.001, num_documents=41)).shares(requests)
    assert shares == [(requests[0], 1), (requests[1], 1)]


def test_a_step_takes_longer_the_more_waits() -> None:
    limit = bound(0.04)
    assert limit.step_s(0) == 0.04 * QUIET_SHARE
    assert limit.step_s(BACKLOG // 2) == pytest.approx(0.04 * (1 + QUIET_SHARE) / 2)
    assert limit.step_s(BACKLOG) == limit.step_s(131_072) == 0.04
    few, many = ([decodes(0), *(asks(1 + i) for i in range(count))] for count in (4, 40))
    times = [
        price_of(Chunked(2048, shared).shares(some), shared) for some in (few, many) for shared in [bound(0.04, 1)]
    ]
    assert times[0] <= limit.step_s(4 * QUESTION) < times[1] <= 0.04


def test_an_urgent_prompt_pays_for_no_other() -> None:
    """What fills the tiles of others would take time that the urgent one can use."""
    urgent = running(1, 131_072, 100_000, priority=0)
    others = [running(2 * number, DOCUMENT + QUESTION, DOCUMENT, priority=1) for number in range(3)]
    rows = [decodes(10), decodes(12)]
    limit = StepBound(0.04, COST, lambda requests: [*map(_alone, requests)])
    shares = dict(Chunked(4096, limit, URGENCIES["priority"]).shares([*rows, urgent, *others]))
    alone = dict(Chunked(4096, limit, URGENCIES["priority"]).shares([*rows, urgent]))
    assert shares[urgent] == alone[urgent] > TILE


def _alone(request: Request) -> Reader:
    return Reader([SharedKeys(request.num_computed_tokens)])


def test_questions_do_not_wait_for_a_document_nor_it_for_them() -> None:
    document = running(0, 131_072, 0)
    questions = [running(1 + i, 1064, 1000) for i in range(40)]
    shares = dict(Chunked(2048).shares([document, *questions]))
    assert [shares.get(question, 0) for question in questions[:28]] == [64] * 28  # seven eighths
    assert shares[document] == 2048 * LONG_SHARE
    shares = dict(Chunked(2048).shares([document, *questions[:2]]))
    assert shares[document] == 2048 - 2 * 64


def test_a_document_near_its_end_takes_no_more_than_before() -> None:
    """Its last 2 000 tokens fit the tokens of a step, but the time of many."""
    document = running(0, 131_072, 129_072)
    questions = [asks(2), asks(3)]
    shares = dict(Chunked(2048, bound(0.04)).shares([document, decodes(1), *questions]))
    assert [shares.get(question) for question in questions] == [QUESTION, QUESTION]
    assert TILE <= shares[document] < 512


NEW_DOCUMENT = running(0, 131_072, 64_000)
ON_FOUR = [decodes(number) for number in range(16, 36)]  # five rows on each of four documents
ROOM = TILE - 5  # of the tile that their rows have


def test_few_questions_ride_with_decode_rows_while_a_document_is_read() -> None:
    """But for the first, which gets a tile of its own as well."""
    first, second = asks(1), asks(2)
    shares = dict(Chunked(2048, bound(0.06, 4)).shares([*ON_FOUR, NEW_DOCUMENT, first, second]))
    assert shares[first] == ROOM + TILE
    assert shares[second] == ROOM
    beside = price_of([(request, size) for request, size in shares.items() if request is not NEW_DOCUMENT], bound(1, 4))
    assert price_of(list(shares.items()), bound(1, 4)) > 0.06 - 2 * COST.level_s(Level(TILE, 64_000))
    assert beside < 0.035


def test_questions_are_finished_first_where_they_cannot_ride() -> None:
    alone, second = asks(1), asks(2)
    without_rows_on_one = [request for request in ON_FOUR if request.number % 4 != 1]
    shares = dict(Chunked(2048, bound(0.04, 4)).shares([*without_rows_on_one, NEW_DOCUMENT, alone, second]))
    assert shares[alone] == QUESTION
    many = [asks(number) for number in range(1, 6)]
    assert 5 * (QUESTION - ROOM) > FEW_TILES * TILE  # what is left when the tiles of the rows are full
    shares = dict(Chunked(2048, bound(0.06, 4)).shares([*ON_FOUR, NEW_DOCUMENT, *many]))
    assert shares[many[1]] > ROOM


WITH_LITTLE_ROOM = {  # decode rows and questions by number, documents, and in how many steps they are to be through
    "one token's room on its document, and rows that take all the time": (
        [*range(11, 321, 10), *(10 * i + place for place in range(2, 10) for i in range(3))],
        [1001],
        10,
        1,
    ),
    "tiles that are full": ([*range(2, 66)], [1000, 1001], 2, 1),
    "two on one document": ([*range(4, 56)], [1001, 1005], 4, 4),
    "two on two documents": ([*range(4, 56)], [1001, 1002], 4, 4),
}


@pytest.mark.parametrize("name", WITH_LITTLE_ROOM)
def test_questions_are_through_soon_while_a_document_is_read(name: str) -> None:
    rows, asking, num_documents, most_steps = WITH_LITTLE_ROOM[name]
    decoding, questions = [decodes(number) for number in rows], [asks(number) for number in asking]
    document, num_steps = running(0, 131_072, 64_000), 0
    while waiting := [question for question in questions if question.is_prefill]:
        for request, size in Chunked(2048, bound(0.0385, num_documents)).shares([*decoding, document, *waiting]):
            request.num_computed_tokens += size if request.is_prefill else 0
        num_steps += 1
        assert num_steps <= most_steps
    assert document.num_computed_tokens >= 64_000 + num_steps * TILE


def test_urgent_questions_do_not_ride() -> None:
    urgent, second = (asks(number) for number in (1, 2))
    document = running(0, 131_072, 64_000, priority=1)
    by_priority = Chunked(2048, bound(0.06, 4), URGENCIES["priority"])
    shares = dict(by_priority.shares([*ON_FOUR, urgent, second, document]))
    assert shares[second] > ROOM


def test_room_counts_a_document_by_its_share() -> None:
    document, decoding = running(0, 131_072, 0), running(1, 100, 100)
    assert Chunked(2049).room([document, decoding]) == 2048 - 256
    assert Chunked(2049).room([decoding]) == 2048
    assert Chunked(2048).room([running(0, 2000, 0)]) == 48


def test_a_step_holds_what_decode_rows_leave() -> None:
    requests = [running(0, 131_072, 0), running(1, 100, 100)]
    assert Chunked(2049).step_tokens(requests) == 2048
    assert Chunked(1).step_tokens([*requests, running(2, 100, 100)]) == 0
    assert Stock(2049).step_tokens(requests) == math.inf


def test_without_decode_rows_there_is_no_bound() -> None:
    assert Chunked(2048, bound(0.001)).shares([running(0, 131_072, 0)])[0][1] == 2048


def test_a_long_prompt_yields_only_to_its_equals() -> None:
    urgent, other = running(0, 131_072, 0, priority=0), running(1, 64, 0, priority=1)
    shares = Chunked(256, None, URGENCIES["priority"]).shares([urgent, other])
    assert [(request.number, size) for request, size in shares] == [(0, 256)]
    shares = Chunked(256, None, URGENCIES["fcfs"]).shares([urgent, other])
    assert [(request.number, size) for request, size in shares] == [(0, 192), (1, 64)]


def test_stock_runs_prompts_whole_and_alone() -> None:
    decoding, prompts = running(0, 64, 64), [running(1, 100, 0), running(2, 100, 0), running(3, 100, 0)]
    assert [(r.number, size) for r, size in Stock(250).shares([decoding, *prompts])] == [(1, 100), (2, 100)]
    assert [(r.number, size) for r, size in Stock(50).shares([decoding, *prompts])] == [(1, 100)]
    assert [(r.number, size) for r, size in Stock(50).shares([decoding])] == [(0, 1)]
