"""The CUDA planner's index arrays against what every token must see."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.attention.lists import Room, lists_of, padded
from p99lab.engine.attention.shape import GraphShape
from p99lab.engine.attention.spans import MAX_PRIVATE_KEYS, SpanPlan, Split, plan_spans, token_slots
from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import SamplingParams
from tests.engine.grouped import group_rows

PAGE_SIZE, NUM_PAGES = 4, 200


def _whole(levels: Sequence[tuple[int, int]]) -> int:
    return max(keys for _, keys in levels)


def _segments_of_6(levels: Sequence[tuple[int, int]]) -> int:
    return 6


SPLITS = [Split(_whole), Split(_segments_of_6), Split(_whole, 2, 3), Split(_segments_of_6, 100, 7)]


@st.composite
def _steps(draw: st.DrawFn) -> StepPlan:
    """Rows over a few documents, some of them nested, whose pages lie in runs of any length."""
    free = draw(st.permutations(range(NUM_PAGES))) if draw(st.booleans()) else list(range(NUM_PAGES))
    taken = 0

    def take(num_pages: int) -> list[int]:
        nonlocal taken
        taken += num_pages
        return free[taken - num_pages : taken]

    prefixes = [take(draw(st.integers(0, 5))) for _ in range(3)]
    prefixes.append(prefixes[0] + take(draw(st.integers(0, 3))))
    rows = []
    for number in range(draw(st.integers(1, 8))):
        pages = prefixes[draw(st.integers(0, len(prefixes) - 1))]
        num_computed = len(pages) * PAGE_SIZE + draw(st.integers(0, 9))
        num_new = draw(st.sampled_from([1, 1, 1, 2, 5, 9]))
        num_private = -(-(num_computed + num_new) // PAGE_SIZE) - len(pages)
        table = np.array([*pages, *take(num_private)], np.int32)
        sampling = SamplingParams()
        rows.append(Row(str(number), number, np.zeros(num_new, np.int32), num_computed, table, True, sampling, 0))
    groups = group_rows(rows, PAGE_SIZE, 1) if draw(st.booleans()) else ()
    return StepPlan(0, tuple(rows), groups)


def _seen_through(plan: SpanPlan, slots: np.ndarray, num_tokens: int) -> list[list[int]]:
    """Slots that each token sees, key by key, as the kernels would read the arrays."""
    causal: dict[int, list[int]] = {}
    for start, stop, num_keys in zip(plan.causal_indptr, plan.causal_indptr[1:], plan.causal_lens, strict=False):
        for token in range(start, stop):
            causal[token] = slots[start : token + 1].tolist() if num_keys else []
            assert num_keys in (0, stop - start)
    keys_of_row = [
        range(start, start + num_keys)
        for first, stop, start, num_keys in zip(
            plan.span_indptr, plan.span_indptr[1:], plan.key_starts, plan.num_keys, strict=False
        )
        for _ in range(first, stop)
    ]
    assert plan.lane_indptr[0] == 0
    for first, stop in zip(plan.lane_indptr, plan.lane_indptr[1:], strict=False):
        for first_row, num_rows, start, num_keys in plan.items[first:stop]:
            assert first_row == len(keys_of_row)
            keys_of_row += [range(start, start + num_keys)] * num_rows
    assert len(keys_of_row) == plan.num_partials
    seen: list[list[int]] = []
    for token in range(num_tokens):
        keys: list[int] = []
        for row in plan.merge_rows[plan.merge_indptr[token] : plan.merge_indptr[token + 1]]:
            if row < plan.num_partials:
                assert plan.tokens[row] == token
                keys += keys_of_row[row]
            else:
                assert row == plan.num_partials + token
                keys += causal[token]
        start = plan.private_starts[token]
        keys += range(start, start + plan.private_lens[token])
        seen.append(keys)
    return seen


@pytest.mark.light
@pytest.mark.parametrize("split", SPLITS)
@given(step=_steps())
@settings(max_examples=50, deadline=None)
def test_every_token_sees_each_slot_up_to_itself_once(split: Split, step: StepPlan) -> None:
    plan = plan_spans(step, PAGE_SIZE, split)
    slots = token_slots(step, PAGE_SIZE)
    expected = []
    for row in step.rows:
        of_row = [int(row.page_table[at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE for at in range(row.seq_len)]
        expected += [of_row[: at + 1] for at in range(row.num_computed_tokens, row.seq_len)]
    assert slots.tolist() == [seen[-1] for seen in expected]
    assert [sorted(seen) for seen in _seen_through(plan, slots, step.num_tokens)] == [sorted(e) for e in expected]
    assert all(array.dtype == np.int32 for array in (slots, *(getattr(plan, name) for name in SpanPlan.__slots__)))
    assert len(plan.merge_rows) == plan.merge_indptr[-1]


@pytest.mark.light
def test_short_private_parts_of_one_token_rows_are_no_spans() -> None:
    def row(number: int, first_page: int, computed: int, new: int) -> Row:
        pages = np.arange(first_page, first_page + -(-(computed + new) // PAGE_SIZE), dtype=np.int32)
        return Row(str(number), number, np.zeros(new, np.int32), computed, pages, True, SamplingParams(), 0)

    rows = (row(0, 0, MAX_PRIVATE_KEYS - 1, 1), row(1, 70, MAX_PRIVATE_KEYS, 1), row(2, 140, 9, 2))
    plan = plan_spans(StepPlan(0, rows), PAGE_SIZE, SPLITS[0])
    assert plan.private_starts.tolist() == [0, 0, 0, 0]
    assert plan.private_lens.tolist() == [MAX_PRIVATE_KEYS, 0, 0, 0]
    assert plan.num_keys.tolist() == [MAX_PRIVATE_KEYS + 1, 9]


@pytest.mark.light
@given(step=_steps())
@settings(max_examples=30, deadline=None)
def test_decode_spans_are_of_a_few_one_token_rows(step: StepPlan) -> None:
    plan = plan_spans(step, PAGE_SIZE, SPLITS[2])
    is_decode = np.concatenate([np.full(len(row.token_ids), len(row.token_ids) == 1) for row in step.rows])
    of_spans, of_decode_spans = np.split(plan.tokens, [plan.num_span_partials])
    assert is_decode[of_decode_spans].all()
    assert (plan.items[:, 1] <= 2).all()
    for tokens in np.split(of_spans, plan.span_indptr[1:-1]):
        assert len(tokens) == 0 or len(tokens) > 2 or not is_decode[tokens].all()


@pytest.mark.light
@given(step=_steps())
@settings(max_examples=30, deadline=None)
def test_a_shared_prefix_is_one_span_a_run_and_segments_have_their_length(step: StepPlan) -> None:
    whole, cut = (plan_spans(step, PAGE_SIZE, split) for split in SPLITS[:2])
    assert cut.num_keys.max(initial=0) <= 6
    assert whole.num_keys.sum() == cut.num_keys.sum()
    assert whole.private_lens.tolist() == cut.private_lens.tolist()
    num_runs = 0
    for group in step.groups:
        pages = step.rows[group.rows[0]].page_table[group.first_page : group.first_page + group.num_pages]
        num_runs += 1 + int((np.diff(pages) != 1).sum())
        num_tokens = sum(len(step.rows[i].token_ids) for i in group.rows)
        assert num_tokens in np.diff(whole.span_indptr)
    assert len(whole.num_keys) >= num_runs


@pytest.mark.light
@pytest.mark.parametrize("split", SPLITS)
@given(step=_steps())
@settings(max_examples=30, deadline=None)
def test_lists_of_a_captured_step_say_the_same_at_fixed_places(split: Split, step: StepPlan) -> None:
    plan = plan_spans(step, PAGE_SIZE, split)
    exact = lists_of(step, plan, PAGE_SIZE)
    shape = GraphShape(step.num_tokens + 3, 500, 50, 100, step.num_tokens, 10)
    room = Room.of(shape, split)
    assert room.holds(plan)
    fixed = padded(exact, plan, room)
    assert [len(part) for part in fixed] == list(room.sizes)
    assert all(part.dtype == np.int32 for part in fixed)

    num_tokens, num_spans = step.num_tokens, plan.num_span_partials
    assert fixed.slots.tolist() == [*exact.slots, -1, -1, -1]
    assert fixed.private_lens[num_tokens:].tolist() == [0, 0, 0]
    assert fixed.merge_indptr[num_tokens:].tolist() == [exact.merge_indptr[-1]] * 4
    places = [*range(num_spans), *range(500, 500 + plan.num_partials - num_spans)]  # of the partial rows
    assert fixed.tokens[places].tolist() == plan.tokens.tolist()
    assert (np.delete(fixed.tokens, places) == -1).all()
    places += [room.num_span_partials + room.num_decode_partials + token for token in range(num_tokens)]
    assert fixed.merge_rows[: len(exact.merge_rows)].tolist() == [places[row] for row in exact.merge_rows]
    items = fixed.items.reshape(-1, 4)[: len(plan.items)]
    assert items[:, 0].tolist() == [places[row] for row in plan.items[:, 0]]
    assert (items[:, 1:] == plan.items[:, 1:]).all()


@pytest.mark.light
def test_a_captured_step_refuses_what_it_has_no_room_for() -> None:
    pages = np.arange(500, dtype=np.int32)
    rows = tuple(Row(str(i), i, np.zeros(1, np.int32), 1999, pages, True, SamplingParams(), 0) for i in range(3))
    step = StepPlan(0, rows, group_rows(rows, PAGE_SIZE, 1))
    as_span, as_decode_span = (
        plan_spans(step, PAGE_SIZE, split) for split in (Split(_whole, 2, 3), Split(_whole, 3, 3))
    )
    cut = Split(_whole, 3, 3)
    assert Room.of(GraphShape(3, 0, 1, 3, 0, 3), cut).holds(as_decode_span)
    assert not Room.of(GraphShape(3, 0, 1, 3, 0, 3), cut).holds(as_span)
    assert Room.of(GraphShape(3, 3, 1, 3, 0, 3), cut).holds(as_span)
    assert not Room.of(GraphShape(3, 3, 1, 2, 0, 3), cut).holds(as_decode_span)
    assert len(as_decode_span.items) == 3


@pytest.mark.light
def test_tables_in_too_many_pieces_are_not_planned() -> None:
    """A question of 64 tokens over a document in 900 pieces would leave 57 600 partial results."""

    def step(num_pieces: int) -> StepPlan:
        pages = np.arange(0, 2 * num_pieces, 2, dtype=np.int32)
        ids = np.zeros(64, np.int32)
        row = Row("0", 0, ids, PAGE_SIZE * num_pieces - 64, pages, True, SamplingParams(), 0)
        return StepPlan(0, (row,))

    assert plan_spans(step(900), PAGE_SIZE, SPLITS[0]) is None
    assert plan_spans(step(200), PAGE_SIZE, SPLITS[0]) is not None
