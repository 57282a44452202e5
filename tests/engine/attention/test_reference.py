"""Paged attention against attention over each row's tokens laid out in one piece."""

import numpy as np
import pytest
import torch

from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.attention.softmax import attend_plain
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import PrefixGroup, Row, StepPlan
from p99lab.engine.request import SamplingParams

PAGE_SIZE, NUM_PAGES, KV_HEADS, Q_HEADS, DIM = 4, 64, 2, 6, 8
GENERATOR = torch.Generator()


def _row(number: int, pages: list[int], computed: int, scheduled: int) -> Row:
    return Row(
        request_id=str(number),
        number=number,
        token_ids=np.zeros(scheduled, np.int32),
        num_computed_tokens=computed,
        page_table=np.array(pages, np.int32),
        samples=False,
        sampling=SamplingParams(),
        num_output_tokens=0,
    )


def _check(rows: list[Row], groups: tuple[PrefixGroup, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    shape = (1, NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM)
    pool = KVPool(torch.full(shape, torch.nan), torch.full(shape, torch.nan))  # what no row may see spoils its output
    for row in rows:
        for position in range(row.num_computed_tokens):
            page, offset = row.page_table[position // PAGE_SIZE], position % PAGE_SIZE
            for tensor in (pool.k, pool.v):
                tensor[0, page, offset] = torch.randn((KV_HEADS, DIM), generator=generator)
    total = sum(row.num_scheduled_tokens for row in rows)
    q = torch.randn(total, Q_HEADS, DIM, generator=generator)
    k, v = (torch.randn(total, KV_HEADS, DIM, generator=generator) for _ in range(2))
    attention = ReferenceAttention(pool)
    attention.plan(StepPlan(0, tuple(rows), groups))
    out = attention.run(0, q, k, v)
    end = 0
    for row in rows:
        start, end = end, end + row.num_scheduled_tokens
        table = torch.from_numpy(row.page_table).long()
        keys, values = (x[0, table].flatten(0, 1)[: row.seq_len] for x in (pool.k, pool.v))
        torch.testing.assert_close(keys[row.num_computed_tokens :], k[start:end])
        for offset in range(row.num_scheduled_tokens):
            seen = row.num_computed_tokens + offset + 1
            at = start + offset
            expected, _ = attend_plain(q[None, at : at + 1], keys[None, :seen], values[None, :seen])
            torch.testing.assert_close(out[at], expected[0, 0], msg=f"row {row.number} token {offset}")


@pytest.mark.parametrize(("computed", "scheduled"), [(0, 1), (0, 11), (8, 5), (7, 6), (15, 1), (30, 1)])
@pytest.mark.parametrize("scattered", [False, True])
def test_one_row(computed: int, scheduled: int, scattered: bool) -> None:
    num_pages = -(-(computed + scheduled) // PAGE_SIZE)
    pages = list(range(10, 10 + num_pages))
    _check([_row(0, pages[::-1] if scattered else pages, computed, scheduled)])


def test_prompts_and_decode_rows_of_all_lengths_in_one_step() -> None:
    _check(
        [
            _row(0, [5, 6], 0, 7),
            _row(1, [9, 3, 12], 9, 3),
            _row(2, [20], 2, 1),
            _row(3, [22, 21, 30, 31, 32, 33, 34], 25, 1),
            _row(4, [40, 41], 4, 1),
        ]
    )


def test_a_group_reads_its_prefix_once_for_prompt_and_decode_rows() -> None:
    shared = [1, 2, 3]
    rows = [_row(0, [*shared, 10], 12, 1), _row(1, [*shared, 12, 11], 14, 4), _row(2, [*shared, 20, 21], 12, 6)]
    _check(rows, (PrefixGroup((0, 1, 2), 0, 3),))


def test_nested_groups_scattered_rows_and_singletons() -> None:
    system, left, right = [1, 2], [7, 5, 6], [30, 31]
    rows = [
        _row(0, [*system, *left, 10], 21, 1),
        _row(1, [*system, *right, 12], 16, 3),
        _row(2, [50, 51, 52], 9, 1),
        _row(3, [*system, *left, 14, 15], 20, 7),
        _row(4, [*system, *right, 16], 17, 1),
        _row(5, [*system, 17], 8, 2),
    ]
    groups = (PrefixGroup((0, 1, 3, 4, 5), 0, 2), PrefixGroup((0, 3), 2, 3), PrefixGroup((1, 4), 2, 2))
    _check(rows, groups)
