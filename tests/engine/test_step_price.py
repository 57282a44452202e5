"""A step priced request by request against the step as a whole, and what fits into a time against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.costs import H200, TWO_CORES, DeviceCosts, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.step_price import Reader, SharedKeys, StepPrice
from tests.engine.test_costs import DOCUMENT, STEPS, on_documents

pytestmark = pytest.mark.light

LLAMA = Geometry.named("llama-3.1-8b")
COST = StepCost(H200, LLAMA, page_size=64)
TILE = COST.tile_tokens
OWN = 100

some_devices = st.sampled_from([H200, TWO_CORES])


def beside(num_decoding: int, num_keys: int = DOCUMENT, costs: StepCost = COST) -> tuple[StepPrice, Reader]:
    """A step of so many decode rows, and a request that shares their keys."""
    price, shared = StepPrice(costs), SharedKeys(num_keys)
    for _ in range(num_decoding):
        price.add(Reader([shared, SharedKeys(OWN)]), 1)
    return price, Reader([shared, SharedKeys(OWN)])


@pytest.mark.parametrize("name", STEPS)
def test_the_sum_is_the_step(name: str) -> None:
    """Less the beginnings and ends of items, and all samples but one."""
    rows, groups = on_documents(STEPS[name][0])
    price = StepPrice(COST)
    for group in groups:
        shared = SharedKeys(DOCUMENT)
        for row in (rows[i] for i in group.rows):
            price.add(Reader([shared, SharedKeys(row.num_computed_tokens - DOCUMENT)]), len(row.token_ids))
    for row in (row for i, row in enumerate(rows) if not any(i in group.rows for group in groups)):
        price.add(Reader([SharedKeys(row.num_computed_tokens)]), len(row.token_ids))
    whole_s = COST.step_time_s(rows, groups)
    assert 0.93 * whole_s <= price.seconds <= whole_s + COST.launches_s / 2  # some steps launch one kernel only


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 40), st.lists(st.one_of(st.just(1), st.integers(2, 80)), min_size=2, max_size=5), some_devices)
def test_pieces_of_a_request_cost_what_they_do_at_once(
    num_decoding: int, pieces: list[int], device: DeviceCosts
) -> None:
    costs = StepCost(device, LLAMA, 64)
    (apart, reader), (whole, other) = beside(num_decoding, costs=costs), beside(num_decoding, costs=costs)
    added_s = sum([apart.add(reader, piece) for piece in pieces])
    assert added_s == pytest.approx(whole.add(other, sum(pieces)))
    assert apart.seconds == pytest.approx(whole.seconds)


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 70), st.integers(1, 300), st.floats(0, 0.1), some_devices)
def test_what_fits_is_the_most_that_ends_with_a_tile(
    num_decoding: int, num_left: int, seconds: float, device: DeviceCosts
) -> None:
    costs = StepCost(device, LLAMA, 64)
    price, reader = beside(num_decoding, costs=costs)
    ends = [0, *range(price.open_tokens(reader), num_left + 1, costs.tile_tokens)]
    num_over = num_left - ends[-1]
    if (
        num_decoding == 0
        or 2 * num_over >= costs.tile_tokens
        or num_left < price.open_tokens(reader) + costs.tile_tokens
    ):
        ends.append(num_left)
    fitting = [end for end in ends if price.added_s(reader, end) <= seconds]
    assert price.tokens_within(reader, seconds, num_left) == max(fitting, default=0)


def test_less_than_half_a_tile_waits_for_the_tile_of_others() -> None:
    price, reader = beside(num_decoding=13)
    assert price.open_tokens(reader) == TILE - 13
    assert price.tokens_within(reader, 1.0, TILE - 13 + TILE + 15) == TILE - 13 + TILE
    assert price.tokens_within(reader, 1.0, TILE - 13 + TILE + 16) == TILE - 13 + TILE + 16
    assert price.tokens_within(reader, 1.0, 5) == 5


def test_nothing_waits_for_a_tile_that_nobody_else_has() -> None:
    """Of keys of its own, or none at all: the next step would read them all again for a few tokens."""
    price, _ = beside(num_decoding=13)
    for keys in ([], [SharedKeys(DOCUMENT)]):
        assert price.tokens_within(Reader(keys), 1.0, 2 * TILE + 1) == 2 * TILE + 1


def test_tiles_of_a_prompt_are_free_for_others_and_those_of_decode_rows_are_not() -> None:
    price, reader = beside(num_decoding=13)
    assert price.free_tokens(reader) == 0
    price.add(reader, 10)
    other = Reader([reader.keys[0], SharedKeys(OWN)])
    assert price.free_tokens(other) == TILE - 13 - 10
    assert price.added_s(other, TILE - 13 - 10) < 0.1 * price.added_s(other, TILE)
