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

STEPS: dict[str, tuple[list[tuple[int, list[int]]], float]] = {  # ms of a step, documents with decode rows and chunks
    "16 rows on each": ([(16, [])] * 4, 20.7),
    "13 rows on each": ([(13, [])] * 4, 20.7),
    "a tile on each, without decode rows": ([(0, [32])] * 4, 26.1),
    "a tile on each": ([(13, [19])] * 4, 27.4),
    "two tiles on each, without decode rows": ([(0, [64])] * 4, 39.5),
    "two tiles on each": ([(13, [51])] * 4, 40.5),
    "a question on each, three tiles": ([(13, [64])] * 4, 55.4),
    "three tiles on each": ([(13, [64, 19])] * 4, 56.7),
    "four tiles on each": ([(13, [64, 51])] * 4, 75.4),
    "two questions on each, five tiles": ([(13, [64, 64])] * 4, 97.9),
    "a question on three": ([(13, [64])] * 3 + [(13, [])], 51.6),
    "four tiles on two": ([(13, [64, 32])] * 2 + [(13, [])] * 2, 46.2),
    "seven tiles on one": ([(13, [64] * 3)] + [(13, [])] * 3, 48.8),
    "two tiles on one": ([(13, [51])] + [(13, [])] * 3, 26.4),
}


def row(num_computed_tokens: int, num_tokens: int = 1) -> Row:
    num_pages = -(-(num_computed_tokens + num_tokens) // 64)
    tokens, table = np.zeros(num_tokens, np.int32), np.zeros(num_pages, np.int32)
    return Row("r", 0, tokens, num_computed_tokens, table, True, SamplingParams(), 0)


def on_documents(documents: list[tuple[int, list[int]]]) -> tuple[list[Row], list[PrefixGroup]]:
    """So many decode rows on each document, and chunks of so many tokens of questions about it."""
    rows: list[Row] = []
    groups = []
    for num_decoding, chunks in documents:
        first = len(rows)
        rows += [row(DOCUMENT + 70)] * num_decoding + [row(DOCUMENT, size) for size in chunks]
        if len(rows) > first + 1:
            groups.append(PrefixGroup(tuple(range(first, len(rows))), 0, DOCUMENT // 64))
    return rows, groups


@pytest.mark.parametrize("name", STEPS)
def test_steps_as_measured_on_an_h200(name: str) -> None:
    """In the engine, one after the other, so at the power limit: docs/log.md, "Tiles"."""
    documents, measured_ms = STEPS[name]
    assert COST.step_time_s(*on_documents(documents)) * 1e3 == pytest.approx(measured_ms, rel=0.08)


@pytest.mark.parametrize(("num_tokens", "measured_ms"), [(1, 0.117), (64, 0.124), (1088, 0.64)])
def test_matrix_products_as_measured(num_tokens: int, measured_ms: float) -> None:
    """A layer's, from what a step of tokens without any past takes beyond its fixed times."""
    one_layer = StepCost(H200, LLAMA.model_copy(update={"num_layers": 1}), 64)
    two_layers = StepCost(H200, LLAMA.model_copy(update={"num_layers": 2}), 64)
    rows = [row(0)] * num_tokens
    attention_s = one_layer.attention_of_s(rows, ())
    layer_s = two_layers.step_time_s(rows, ()) - one_layer.step_time_s(rows, ()) - attention_s
    assert layer_s * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_one_request_and_whole_prompts_as_measured() -> None:
    """64 questions keep more keys in the L2 cache than the steps that the constants are fitted to."""
    assert COST.step_time_s([row(131_072)], ()) * 1e3 == pytest.approx(8.6, rel=0.04)
    assert COST.step_time_s(*on_documents([(0, [64] * 16)] * 4)) * 1e3 == pytest.approx(515, rel=0.1)
    chunks_s = sum(COST.step_time_s([row(start, 8192)], ()) for start in range(0, 131_072, 8192))
    assert chunks_s == pytest.approx(9.97, rel=0.08)


some_levels = st.lists(
    st.builds(Level, st.integers(1, 300), st.integers(1, 131_072), st.just(value=False)), min_size=1, max_size=64
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(some_levels)
def test_cutting_never_costs(levels: list[Level]) -> None:
    segment = COST.segment_tokens(levels)
    longest = max(level.num_keys for level in levels)
    assert segment % SEGMENT_STEP == 0
    assert segment < longest + SEGMENT_STEP
    assert COST.attention_s(levels) == COST.attention_s(levels, segment)
    assert COST.attention_s(levels, segment) <= COST.attention_s(levels, longest + SEGMENT_STEP) * 1.0001


@settings(deadline=None, derandomize=True, max_examples=30)
@given(some_levels)
def test_the_cut_is_near_the_best(levels: list[Level]) -> None:
    longest = max(level.num_keys for level in levels)
    segments = range(SEGMENT_STEP, longest + SEGMENT_STEP, SEGMENT_STEP)
    best_s = min(COST.attention_s(levels, segment) for segment in segments if longest / segment <= 64)
    assert COST.attention_s(levels) <= best_s * 1.2


def test_no_slot_idles_beside_long_documents() -> None:
    """Three tiles on each of four documents are 96 items for 132 slots: uncut they took 67 ms a step, cut 55."""
    segment = COST.segment_tokens([(77, DOCUMENT)] * 4)
    num_items = 96 * -(-DOCUMENT // segment)
    assert num_items / (132 * -(-num_items // 132)) > 0.95


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
@given(
    st.lists(st.builds(Level, st.integers(1, 64), st.integers(1, 20_000), st.just(value=False)), min_size=1, max_size=8)
)
def test_the_fullest_slot_is_that_of_longest_first(levels: list[Level]) -> None:
    """Where neither memory nor power binds, the prediction lies between the best schedule and 4/3 below Graham's."""
    free = 1e30  # bytes and operations a second: of all but a slot's products
    device = DeviceCosts(free, free, free, free, 6.3e12, num_slots=132, tile_rows=128)
    cost = StepCost(device, LLAMA, 64)
    key_s = 4 * 128 * 128 / 6.3e12
    items = [keys * key_s for tokens, keys, _ in levels for _ in range(-(-tokens * 4 // 128) * 8)]
    predicted, simulated = cost.attention_s(levels, 1 << 20), longest_first_s(items, 132)
    assert predicted <= simulated * 1.0001
    assert simulated <= 4 / 3 * max(predicted, sum(items) / 132)


@given(st.integers(64, 131_072), st.lists(st.integers(1, 64), min_size=2, max_size=16))
def test_a_group_that_pays_makes_a_busy_layer_faster(num_keys: int, readers: list[int]) -> None:
    """Beside enough other work that no slot is idle either way; whether memory binds there is not looked at."""
    busy = [Level(2048, 65_536)] * 4
    own, whole = ([Level(reader, size) for reader in readers] for size in (80, num_keys + 80))
    apart = COST.attention_s([*busy, Level(sum(readers), num_keys), *own], 1 << 20)
    alone = COST.attention_s([*busy, *whole], 1 << 20)
    if COST.group_pays(num_keys, readers):
        assert apart <= alone * 1.001


def test_groups_pay_for_decode_rows_on_a_document_and_not_for_a_page() -> None:
    assert COST.group_pays(DOCUMENT, [1, 1])
    assert not COST.group_pays(64, [1, 1])
    assert not COST.group_pays(DOCUMENT, [4096, 4096])  # full tiles either way


def test_levels_cover_what_rows_see_of_the_past() -> None:
    rows = [row(640), row(700, 30), row(0, 5), row(0)]
    groups = [PrefixGroup((0, 1), 0, 10)]
    assert levels_of(rows, groups, 64) == [(31, 640, False), (1, 1, True), (30, 60, False), (1, 1, True)]
    assert levels_of(rows, (), 64) == [(1, 641, True), (30, 700, False), (1, 1, True)]


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
