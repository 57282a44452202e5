"""The cost model against what was measured, and the answers it gives against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.costs import H200, SEGMENT_STEP, TWO_CORES, DeviceCosts, Level, StepCost, device_costs, levels_of
from p99lab.engine.geometry import Geometry
from p99lab.engine.plan import PrefixGroup, Row
from p99lab.engine.request import SamplingParams

pytestmark = pytest.mark.light

LLAMA = Geometry.named("llama-3.1-8b")
COST = StepCost(H200, LLAMA, page_size=64)
DOCUMENT = 130_816

ALONE: dict[str, tuple[list[Level], int, float]] = {  # levels, segments, ms of FA3 alone: docs/log.md, 2026-11-30
    "one row": ([(1, 131_072)], 16, 0.129),
    "one row in 8 segments": ([(1, 131_072)], 8, 0.184),
    "a question on each": ([(64, DOCUMENT)] * 4, 4, 0.806),
    "a question on each, whole": ([(64, DOCUMENT)] * 4, 1, 1.37),
    "four questions on each": ([(256, DOCUMENT)] * 4, 1, 3.27),
    "sixteen questions on each": ([(1024, DOCUMENT)] * 4, 1, 13.2),
    "four questions and 15 rows on each": ([(271, DOCUMENT)] * 4, 8, 3.71),
    "a question and 15 rows on each": ([(79, DOCUMENT)] * 4, 1, 1.40),
    "8 192 tokens after 122 880": ([(8192, 122_880)], 1, 24.9),
    "64 rows of 1 024 tokens": ([(1, 1024)] * 64, 1, 0.085),
}
IN_THE_ENGINE: dict[str, tuple[list[Level], float]] = {  # levels, ms of the decode kernel and merging, in whole steps
    "one row": ([(1, 131_072)], 0.123),
    "16 rows on each of 4 documents": ([(16, DOCUMENT)] * 4 + [(1, 80)] * 64, 0.655),
}


def row(num_computed_tokens: int, num_tokens: int = 1) -> Row:
    num_pages = -(-(num_computed_tokens + num_tokens) // 64)
    tokens, table = np.zeros(num_tokens, np.int32), np.zeros(num_pages, np.int32)
    return Row("r", 0, tokens, num_computed_tokens, table, True, SamplingParams(), 0)


def on_documents(rows: list[Row]) -> tuple[list[Row], list[PrefixGroup]]:
    """`rows` on each of four documents."""
    num_pages, size = DOCUMENT // 64, len(rows)
    groups = [PrefixGroup(tuple(range(i * size, (i + 1) * size)), 0, num_pages) for i in range(4)]
    return rows * 4, groups


@pytest.mark.parametrize("name", ALONE)
def test_attention_as_measured_alone(name: str) -> None:
    levels, num_segments, measured_ms = ALONE[name]
    segment = -(-max(num_keys for _, num_keys in levels) // num_segments)
    assert COST.attention_s(levels, segment) * 1e3 == pytest.approx(measured_ms, rel=0.15)


@pytest.mark.parametrize("name", IN_THE_ENGINE)
def test_attention_as_measured_in_the_engine(name: str) -> None:
    levels, measured_ms = IN_THE_ENGINE[name]
    assert COST.attention_s(levels) * 1e3 == pytest.approx(measured_ms, rel=0.06)


@pytest.mark.parametrize(("num_tokens", "measured_ms"), [(1, 0.117), (64, 0.124), (1088, 0.64)])
def test_matrix_products_as_measured(num_tokens: int, measured_ms: float) -> None:
    """A layer's, from what a step of tokens without any past takes beyond its fixed times."""
    one_layer = StepCost(H200, LLAMA.model_copy(update={"num_layers": 1}), 64)
    two_layers = StepCost(H200, LLAMA.model_copy(update={"num_layers": 2}), 64)
    rows = [row(0)] * num_tokens
    attention_s = one_layer.attention_of_s(rows, ())
    layer_s = two_layers.step_time_s(rows, ()) - one_layer.step_time_s(rows, ()) - attention_s
    assert layer_s * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_decode_steps_as_measured_in_the_engine() -> None:
    """The second on two machines, at 24.1 and at 26.8 ms."""
    assert COST.step_time_s([row(131_072)], ()) * 1e3 == pytest.approx(8.88, rel=0.05)
    rows, groups = on_documents([row(DOCUMENT + 80)] * 16)
    assert COST.step_time_s(rows, groups) * 1e3 == pytest.approx((24.1 + 26.8) / 2, rel=0.05)


def test_whole_steps() -> None:
    """Against what `docs/log.md` adds up from measurements of the parts alone; in the engine 523 ms and 9.97 s."""
    rows, groups = on_documents([row(DOCUMENT, 64)] * 16)
    assert COST.step_time_s(rows, groups) * 1e3 == pytest.approx(515, rel=0.05)
    chunks_s = sum(COST.step_time_s([row(start, 8192)], ()) for start in range(0, 131_072, 8192))
    assert chunks_s == pytest.approx(9.6, rel=0.05)


def test_a_chunk_costs_what_it_adds_to_a_step() -> None:
    rows, groups = on_documents([row(DOCUMENT + 80)] * 12 + [row(DOCUMENT, 64)] * 4)
    decode_rows, decode_groups = on_documents([row(DOCUMENT + 80)] * 12)
    added_s = COST.step_time_s(rows, groups) - COST.step_time_s(decode_rows, decode_groups)
    assert 16 * COST.chunk_time_s(64, DOCUMENT) == pytest.approx(added_s, rel=0.15)


@given(st.floats(0, 1.0), st.integers(0, 200_000))
def test_chunk_tokens_is_the_most_that_fits(seconds: float, num_computed: int) -> None:
    num_tokens = COST.chunk_tokens(seconds, num_computed)
    assert COST.chunk_time_s(num_tokens, num_computed) <= seconds * (1 + 1e-9)
    assert COST.chunk_time_s(num_tokens + 1, num_computed) > seconds * (1 - 1e-9)
    assert COST.chunk_tokens(-seconds, num_computed) == 0


some_levels = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 131_072)), min_size=1, max_size=64)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(some_levels)
def test_cutting_never_costs(levels: list[Level]) -> None:
    segment = COST.segment_tokens(levels)
    longest = max(num_keys for _, num_keys in levels)
    assert segment % SEGMENT_STEP == 0
    assert segment < longest + SEGMENT_STEP
    assert COST.attention_s(levels) == COST.attention_s(levels, segment)
    assert COST.attention_s(levels, segment) <= COST.attention_s(levels, longest + SEGMENT_STEP) * 1.0001


@settings(deadline=None, derandomize=True, max_examples=30)
@given(some_levels)
def test_the_cut_is_near_the_best(levels: list[Level]) -> None:
    longest = max(num_keys for _, num_keys in levels)
    segments = range(SEGMENT_STEP, longest + SEGMENT_STEP, SEGMENT_STEP)
    best_s = min(COST.attention_s(levels, segment) for segment in segments if longest / segment <= 64)
    assert COST.attention_s(levels) <= best_s * 1.2


def test_long_prefixes_of_few_tokens_are_cut_and_full_devices_are_not() -> None:
    assert -(-131_072 // COST.segment_tokens([(1, 131_072)])) == 16
    assert COST.segment_tokens([(1024, DOCUMENT)] * 4) >= DOCUMENT
    assert StepCost(TWO_CORES, LLAMA, 64).segment_tokens([(1, 131_072)]) >= 131_072


def longest_first_s(items: list[float], num_slots: int) -> float:
    slots = [0.0] * num_slots
    for item in sorted(items, reverse=True):
        slots[slots.index(min(slots))] += item
    return max(slots)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 20_000)), min_size=1, max_size=8))
def test_the_fullest_slot_is_that_of_longest_first(levels: list[Level]) -> None:
    """Where neither memory nor power binds, the prediction lies between the best schedule and 4/3 below Graham's."""
    free = 1e30  # bytes and operations a second: of all but a slot's products
    device = DeviceCosts(free, free, free, free, 6.3e12, num_slots=132, tile_rows=128)
    cost = StepCost(device, LLAMA, 64)
    key_s = 4 * 128 * 128 / 6.3e12
    items = [keys * key_s for tokens, keys in levels for _ in range(-(-tokens * 4 // 128) * 8)]
    predicted, simulated = cost.attention_s(levels, 1 << 20), longest_first_s(items, 132)
    assert predicted <= simulated * 1.0001
    assert simulated <= 4 / 3 * max(predicted, sum(items) / 132)


@given(st.integers(64, 131_072), st.lists(st.integers(1, 64), min_size=2, max_size=16))
def test_a_group_that_pays_makes_a_busy_layer_faster(num_keys: int, readers: list[int]) -> None:
    """Beside enough other work that no slot is idle either way; whether memory binds there is not looked at."""
    busy = [(2048, 65_536)] * 4
    apart = COST.attention_s([*busy, (sum(readers), num_keys), *((reader, 80) for reader in readers)], 1 << 20)
    alone = COST.attention_s([*busy, *((reader, num_keys + 80) for reader in readers)], 1 << 20)
    if COST.group_pays(num_keys, readers):
        assert apart <= alone * 1.001


def test_groups_pay_for_decode_rows_on_a_document_and_not_for_a_page() -> None:
    assert COST.group_pays(DOCUMENT, [1, 1])
    assert not COST.group_pays(64, [1, 1])
    assert not COST.group_pays(DOCUMENT, [4096, 4096])  # full tiles either way


def test_levels_cover_what_rows_see_of_the_past() -> None:
    rows = [row(640), row(700, 30), row(0, 5), row(0)]
    groups = [PrefixGroup((0, 1), 0, 10)]
    assert levels_of(rows, groups, 64) == [(31, 640), (1, 1), (30, 60), (1, 1)]
    assert levels_of(rows, (), 64) == [(1, 641), (30, 700), (1, 1)]


def test_only_what_was_measured_has_costs() -> None:
    assert device_costs("cpu") is TWO_CORES
    assert device_costs("NVIDIA H200") is H200
    assert device_costs("NVIDIA A100-SXM4-80GB") is None


@pytest.mark.parametrize("device", [H200, TWO_CORES])
def test_more_work_takes_no_less(device: DeviceCosts) -> None:
    cost = StepCost(device, LLAMA, 64)
    for num_rows, num_tokens, num_computed in itertools.product((1, 16, 64), (1, 64), (0, 4096, 131_008)):
        here = cost.step_time_s([row(num_computed, num_tokens)] * num_rows, ())
        assert here > 0
        assert cost.step_time_s([row(num_computed, num_tokens)] * (num_rows + 1), ()) >= here
        assert cost.step_time_s([row(num_computed + 64, num_tokens)] * num_rows, ()) >= here * 0.98
