"""The paged kernels' index arrays against rows walked token by token, and workspaces against FlashInfer's planners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.attention.page_tables import (
    FA3_MIN_TOKENS,
    Kernel,
    PagedRows,
    Workspaces,
    fa3_list_bytes,
    plan_paged,
)
from p99lab.engine.plan import PrefixGroup, Row, StepPlan
from p99lab.engine.request import SamplingParams

pytestmark = pytest.mark.light

NUM_PAGES = 4000
NEW_TOKENS = [1, 1, 1, 2, 7, 64, FA3_MIN_TOKENS - 1, FA3_MIN_TOKENS, FA3_MIN_TOKENS + 70]


def _row(number: int, num_computed: int, num_new: int, pages: list[int]) -> Row:
    ids, table = np.zeros(num_new, np.int32), np.array(pages, np.int32)
    return Row(str(number), number, ids, num_computed, table, True, SamplingParams(), 0)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """Rows of every kind in any order, over pages in any order; and the page size, so that last pages fill to any."""
    page_size = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for number in range(draw(st.integers(1, 7))):
        num_computed, num_new = draw(st.integers(0, 40)), draw(st.sampled_from(NEW_TOKENS))
        num_pages = -(-(num_computed + num_new) // page_size)
        rows.append(_row(number, num_computed, num_new, rng.permutation(NUM_PAGES)[:num_pages].tolist()))
    return StepPlan(0, tuple(rows)), page_size


def _seen(kernel: Kernel, rows: PagedRows, page_size: int) -> dict[int, list[int]]:
    """By token of the step, the slots it sees: as the kernels read page tables, masks aligned to the last key."""
    seen = {}
    for row, last_len in enumerate(rows.last_page_len.tolist()):
        pages = rows.kv_indices[rows.kv_indptr[row] : rows.kv_indptr[row + 1]].tolist()
        slots = [page * page_size + at for page in pages for at in range(page_size)]
        slots = slots[: (len(pages) - 1) * page_size + last_len]
        tokens = rows.tokens[rows.qo_indptr[row] : rows.qo_indptr[row + 1]].tolist()
        assert kernel != "decode" or len(tokens) == 1
        for place, token in enumerate(tokens):
            assert token not in seen
            seen[token] = slots[: len(slots) - (len(tokens) - 1 - place)]
    return seen


@given(drawn=_steps())
@settings(max_examples=80, deadline=None)
def test_every_token_sees_its_rows_keys_up_to_itself_through_one_kernel(drawn: tuple[StepPlan, int]) -> None:
    step, page_size = drawn
    expected: list[tuple[Kernel, list[int]]] = []
    for row in step.rows:
        kernel: Kernel = (
            "decode" if len(row.token_ids) == 1 else "fa2" if len(row.token_ids) < FA3_MIN_TOKENS else "fa3"
        )
        slots = [int(row.page_table[at // page_size]) * page_size + at % page_size for at in range(row.seq_len)]
        expected += [(kernel, slots[: at + 1]) for at in range(row.num_computed_tokens, row.seq_len)]
    found: dict[int, tuple[Kernel, list[int]]] = {}
    for kernel, rows in plan_paged(step, page_size).items():
        seen = _seen(kernel, rows, page_size)
        assert not found.keys() & seen.keys()
        found |= {token: (kernel, slots) for token, slots in seen.items()}
        assert (np.diff(rows.tokens) > 0).all()
        assert rows.last_page_len.min() >= 1
        assert rows.last_page_len.max() <= page_size
        assert all(getattr(rows, name).dtype == np.int32 for name in PagedRows.__slots__)
    assert [found[token] for token in range(step.num_tokens)] == expected


@pytest.mark.parametrize("fill", range(1, 5))
def test_a_single_row_and_a_last_page_of_each_fill(fill: int) -> None:
    (rows,) = plan_paged(StepPlan(0, (_row(0, 7 + fill, 1, [9, 3, 30]),)), 4).values()
    assert rows.tokens.tolist() == [0]
    assert rows.qo_indptr.tolist() == [0, 1]
    assert rows.kv_indptr.tolist() == [0, 3]
    assert rows.kv_indices.tolist() == [9, 3, 30]
    assert rows.last_page_len.tolist() == [fill]


def test_groups_change_nothing() -> None:
    rows = (_row(0, 8, 1, [1, 2, 3]), _row(1, 8, 3, [1, 2, 4]))
    alone, grouped = (plan_paged(StepPlan(0, rows, groups), 4) for groups in ((), (PrefixGroup((0, 1), 0, 2),)))
    assert alone.keys() == grouped.keys() == {"decode", "fa2"}
    for kernel, of_kernel in alone.items():
        for name in PagedRows.__slots__:
            np.testing.assert_array_equal(getattr(of_kernel, name), getattr(grouped[kernel], name))


def _aligned(*sizes: int) -> int:
    end = 0
    for size in sizes:
        end += -end % 16 + size
    return end


def _fa2_bytes(sizes: Workspaces, qo_lens: list[int], num_pages: list[int], page_size: int) -> tuple[int, int]:
    """What FlashInfer's `PrefillPlan` allots, floats and ints, as its scheduler.cuh reads outside CUDA graphs."""
    group = sizes.num_q_heads // sizes.num_kv_heads
    packed = [n * group for n in qo_lens]
    mean = sum(packed) // len(packed)
    tile = 128 if mean > 64 else 64 if mean > 16 else 16
    most = 2 * sizes.num_processors // sizes.num_kv_heads

    def num_items(chunk: int) -> int:
        return sum(-(-rows // tile) * -(-pages // chunk) for rows, pages in zip(packed, num_pages, strict=True))

    low, high = max(128 // page_size, 1), max(num_pages)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if num_items(middle) > most else (low, middle)
    items = num_items(low)
    ints = [items * 4] * 3 + [(len(packed) + 1) * 4, 4]
    if low >= max(num_pages):
        return 0, _aligned(*ints)
    num_rows = -(-items * tile // group)
    head_bytes = sizes.num_q_heads * num_rows * 4
    return _aligned(head_bytes * sizes.head_dim, head_bytes), _aligned(*ints, (sum(qo_lens) + 1) * 4)


def _fa3_bytes(sizes: Workspaces, qo_lens: list[int]) -> int:
    """What its `PrefillSM90Plan` allots."""
    tile = 192 if sizes.head_dim == 64 else 128
    heads = 1 if -(-sum(qo_lens) // tile) + len(qo_lens) - 1 > 4096 else sizes.num_q_heads
    items = heads * sum(-(-n // tile) for n in qo_lens)
    return _aligned(*[items * 4] * 6, (sizes.num_processors + 1) * 4, items * 4)


@given(
    num_kv_heads=st.sampled_from([1, 2, 8, 300]),
    group=st.sampled_from([1, 4, 7, 8, 16]),
    head_dim=st.sampled_from([64, 128]),
    qo_lens=st.one_of(
        st.lists(st.integers(1, 255), min_size=1, max_size=40),
        st.lists(st.integers(1, 400_000), min_size=1, max_size=3),
        st.builds(lambda n, count: [n] * count, st.integers(1, 40), st.integers(100, 400)),
    ),
    page_size=st.sampled_from([1, 16, 64]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_no_step_needs_more_workspace_than_there_is(
    num_kv_heads: int, group: int, head_dim: int, qo_lens: list[int], page_size: int, data: st.DataObject
) -> None:
    sizes = Workspaces(132, num_kv_heads * group, num_kv_heads, head_dim, len(qo_lens), sum(qo_lens))
    longest = data.draw(st.integers(0, 5000))
    num_pages = [-(-(n + longest * 64) // page_size) for n in qo_lens]
    floats, ints = _fa2_bytes(sizes, qo_lens, num_pages, page_size)
    assert floats <= sizes.float_bytes
    assert ints <= sizes.int_bytes("fa2") == sizes.int_bytes("decode")
    assert _fa3_bytes(sizes, qo_lens) <= sizes.int_bytes("fa3")


@given(
    num_heads=st.sampled_from([1, 8, 32]),
    head_dim=st.sampled_from([64, 128]),
    qo_lens=st.lists(st.integers(1, 3000), min_size=1, max_size=40) | st.just([4] * 5000),
    more=st.tuples(st.integers(0, 100), st.integers(0, 100)),
)
@settings(max_examples=100, deadline=None)
def test_no_list_of_spans_needs_more_than_its_bound(
    num_heads: int, head_dim: int, qo_lens: list[int], more: tuple[int, int]
) -> None:
    most = (len(qo_lens) + more[0], sum(qo_lens) + sum(more))
    num_bytes = fa3_list_bytes(*most, num_heads, head_dim, 132)
    assert _fa3_bytes(Workspaces(132, num_heads, 1, head_dim, *most), qo_lens) <= num_bytes
    tile = 192 if head_dim == 64 else 128
    num_tiles = -(-most[1] // tile) + most[0] - 1  # of a captured step: for the most there can be
    num_items = num_tiles * (1 if num_tiles > 4096 else num_heads)
    assert _aligned(*[num_items * 4] * 6, 133 * 4, num_items * 4) <= num_bytes


def test_workspaces_of_an_8b_model_on_an_h200_are_a_few_megabytes() -> None:
    sizes = Workspaces(132, 32, 8, 128, max_num_rows=4096, max_num_tokens=900_000)
    assert sizes.float_bytes < 18 << 20
    assert sizes.int_bytes("fa2") < 1 << 20
    assert sizes.int_bytes("fa3") < 4 << 20
