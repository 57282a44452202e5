"""The CUDA planner's index arrays against what every token must see, and against attention computed through them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.attention.softmax import attend_plain, merge
from p99lab.engine.attention.spans import MAX_PRIVATE_KEYS, SpanPlan, plan_spans, token_slots
from p99lab.engine.grouping import group_rows
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import SamplingParams

PAGE_SIZE, NUM_PAGES = 4, 200


def _whole(levels: Sequence[tuple[int, int]]) -> int:
    return max(keys for _, keys in levels)


def _segments_of_6(levels: Sequence[tuple[int, int]]) -> int:
    return 6


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
    span_of_row = np.repeat(np.arange(len(plan.num_keys)), np.diff(plan.span_indptr))
    seen: list[list[int]] = []
    for token in range(num_tokens):
        keys: list[int] = []
        for row in plan.merge_rows[plan.merge_indptr[token] : plan.merge_indptr[token + 1]]:
            if row < plan.num_partials:
                assert plan.tokens[row] == token
                span = span_of_row[row]
                keys += range(plan.key_starts[span], plan.key_starts[span] + plan.num_keys[span])
            else:
                assert row == plan.num_partials + token
                keys += causal[token]
        start = plan.private_starts[token]
        keys += range(start, start + plan.private_lens[token])
        seen.append(keys)
    return seen


@pytest.mark.light
@pytest.mark.parametrize("segment", [_whole, _segments_of_6])
@given(step=_steps())
@settings(max_examples=60, deadline=None)
def test_every_token_sees_each_slot_up_to_itself_once(segment: object, step: StepPlan) -> None:
    plan = plan_spans(step, PAGE_SIZE, segment)  # type: ignore[arg-type]
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
    plan = plan_spans(StepPlan(0, rows), PAGE_SIZE, _whole)
    assert plan.private_starts.tolist() == [0, 0, 0, 0]
    assert plan.private_lens.tolist() == [MAX_PRIVATE_KEYS, 0, 0, 0]
    assert plan.num_keys.tolist() == [MAX_PRIVATE_KEYS + 1, 9]


@pytest.mark.light
@given(step=_steps())
@settings(max_examples=30, deadline=None)
def test_a_shared_prefix_is_one_span_a_run_and_segments_have_their_length(step: StepPlan) -> None:
    whole, cut = (plan_spans(step, PAGE_SIZE, segment) for segment in (_whole, _segments_of_6))
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


def test_attention_through_the_arrays_is_the_reference_backends() -> None:
    kv_heads, q_heads, dim = 2, 4, 8
    rows = []
    for number, (table, computed, new) in enumerate(
        [([0, 1, 2, 3, 9], 17, 1), ([0, 1, 2, 3, 12, 30, 31], 18, 7), ([0, 1, 40, 41], 9, 5), ([50, 51], 0, 6)]
    ):
        ids, pages = np.zeros(new, np.int32), np.array(table, np.int32)
        rows.append(Row(str(number), number, ids, computed, pages, True, SamplingParams(), 0))
    step = StepPlan(0, tuple(rows), group_rows(rows, PAGE_SIZE, 1))
    assert len(step.groups) == 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shape = (1, NUM_PAGES, PAGE_SIZE, kv_heads, dim)
    pool = KVPool(random(*shape), random(*shape))
    q, k, v = random(step.num_tokens, q_heads, dim), *(random(step.num_tokens, kv_heads, dim) for _ in range(2))
    reference = ReferenceAttention(pool)
    reference.plan(step)
    expected = reference.run(0, q, k, v)

    plan = plan_spans(step, PAGE_SIZE, _segments_of_6)
    keys, values = (pool_of[0].flatten(0, 1) for pool_of in (pool.k, pool.v))
    partials = []
    for span, tokens in enumerate(np.split(plan.tokens, plan.span_indptr[1:-1])):
        at = slice(int(plan.key_starts[span]), int(plan.key_starts[span] + plan.num_keys[span]))
        out, lse = attend_plain(q[None, tokens], keys[None, at], values[None, at])
        partials += list(zip(out[0], lse[0], strict=True))
    empty = (torch.zeros(q_heads, dim), torch.full((q_heads,), -torch.inf))
    causal = [empty] * step.num_tokens
    for start, stop, num_keys in zip(plan.causal_indptr, plan.causal_indptr[1:], plan.causal_lens, strict=False):
        if num_keys:
            out, lse = attend_plain(*(x[None, start:stop] for x in (q, k, v)), causal=True)
            causal[start:stop] = list(zip(out[0], lse[0], strict=True))
    for token in range(step.num_tokens):
        total = empty
        for row in plan.merge_rows[plan.merge_indptr[token] : plan.merge_indptr[token + 1]]:
            total = merge(*total, *(partials + causal)[row])
        if plan.private_lens[token]:
            at = slice(int(plan.private_starts[token]), int(plan.private_starts[token] + plan.private_lens[token]))
            out, lse = attend_plain(q[None, token : token + 1], keys[None, at], values[None, at])
            total = merge(*total, out[0, 0], lse[0, 0])
        torch.testing.assert_close(total[0], expected[token])
