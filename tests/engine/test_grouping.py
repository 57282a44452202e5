"""Prefix groups against their contract, checked by brute force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.costs import H200, TWO_CORES, DeviceCosts, StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.grouping import arrange
from p99lab.engine.plan import PrefixGroup, Row
from p99lab.engine.request import SamplingParams
from tests.engine.grouped import group_rows

pytestmark = pytest.mark.light


def row(pages: Sequence[int], num_computed_tokens: int) -> Row:
    """A row that computes one token."""
    token = np.ones(1, np.int32)
    return Row("r", 0, token, num_computed_tokens, np.array(pages, np.int32), True, SamplingParams(), 0)


def full(*pages: int) -> Row:
    """A row over `pages` full pages of 4 tokens and a private one."""
    return row([*pages, 1000], 4 * len(pages))


def assert_contract(rows: Sequence[Row], groups: Sequence[PrefixGroup], page_size: int, min_shared: int) -> None:
    for group in groups:
        assert len(group.rows) >= 2
        assert list(group.rows) == sorted(set(group.rows))
        assert group.num_pages * page_size >= min_shared
        stop = group.first_page + group.num_pages
        shared = {tuple(rows[i].page_table[:stop].tolist()) for i in group.rows}
        assert len(shared) == 1
        assert all(rows[i].num_computed_tokens >= stop * page_size for i in group.rows)
    for index in range(len(rows)):
        covered = sorted((g.first_page, g.num_pages) for g in groups if index in g.rows)
        assert [first for first, _ in covered] == [sum(n for _, n in covered[:i]) for i in range(len(covered))]


def shared_pages(a: Row, b: Row, page_size: int) -> int:
    num_pages = min(a.num_computed_tokens, b.num_computed_tokens) // page_size
    same = [x == y for x, y in zip(a.page_table[:num_pages].tolist(), b.page_table[:num_pages].tolist(), strict=True)]
    return same.index(False) if False in same else num_pages


def covered_pages(groups: Sequence[PrefixGroup], index: int) -> int:
    return sum(group.num_pages for group in groups if index in group.rows)


def test_levels_nest() -> None:
    rows = [full(1, 2, 3, 4), full(1, 2, 8), full(1, 2, 3, 5), full(1, 9), full(7)]
    assert group_rows(rows, 4, 4) == (
        PrefixGroup((0, 1, 2, 3), 0, 1),
        PrefixGroup((0, 1, 2), 1, 1),
        PrefixGroup((0, 2), 2, 1),
    )


def test_a_short_level_belongs_to_the_groups_below_it() -> None:
    rows = [full(1, 2, 3, 4), full(1, 2, 3, 5), full(1, 6, 7), full(1, 6, 7), full(1, 9)]
    assert group_rows(rows, 4, 8) == (PrefixGroup((0, 1), 0, 3), PrefixGroup((2, 3), 0, 3))


def test_pages_still_being_computed_are_not_shared() -> None:
    assert group_rows([row([1, 2], 7), row([1, 2], 7)], 4, 1) == (PrefixGroup((0, 1), 0, 1),)
    assert group_rows([row([1], 3), row([1], 3)], 4, 1) == ()


def test_nothing_to_share() -> None:
    assert group_rows([], 4, 1) == ()
    assert group_rows([full(1)], 4, 1) == ()
    assert group_rows([full(1), full(2)], 4, 1) == ()


@st.composite
def some_rows(draw: st.DrawFn) -> tuple[list[Row], int]:
    """Rows whose tables come from one tree: equal pages at an index mean equal pages before it."""
    page_size = draw(st.sampled_from([1, 2, 4]))
    pages: dict[tuple[int, ...], int] = {}
    rows = []
    for path in draw(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=9)):
        table = [pages.setdefault(tuple(path[: i + 1]), len(pages)) for i in range(len(path))]
        num_computed = draw(st.integers(max(0, (len(path) - 1) * page_size), len(path) * page_size))
        rows.append(row([*table, 1000 + len(rows)], num_computed))
    return rows, page_size


@settings(deadline=None, derandomize=True, max_examples=300)
@given(some_rows(), st.integers(1, 8))
def test_contract_and_completeness(case: tuple[list[Row], int], min_shared: int) -> None:
    rows, page_size = case
    groups = group_rows(rows, page_size, min_shared)
    assert_contract(rows, groups, page_size, min_shared)
    for i, mine in enumerate(rows):
        most = max((shared_pages(mine, other, page_size) for j, other in enumerate(rows) if i != j), default=0)
        assert covered_pages(groups, i) <= most
        if min_shared <= page_size:  # no level is too short: all that is shared is in a group
            assert covered_pages(groups, i) == most
        assert covered_pages(groups, i) > 0 or most * page_size < min_shared or most == 0


@settings(deadline=None, derandomize=True, max_examples=100)
@given(some_rows())
def test_in_prefix_order_groups_are_contiguous(case: tuple[list[Row], int]) -> None:
    rows, page_size = case
    order, groups = arrange(rows, page_size, 1)
    assert sorted(order) == list(range(len(rows)))
    ordered = [rows[i] for i in order]
    assert_contract(ordered, groups, page_size, 1)
    assert set(groups) == set(group_rows(ordered, page_size, 1))
    for group in groups:
        assert list(group.rows) == list(range(group.rows[0], group.rows[-1] + 1))


LLAMA = Geometry.named("llama-3.1-8b")
COST = StepCost(H200, LLAMA, page_size=64)


def page_run(number: int, num_tokens: int) -> list[int]:
    """Pages that only one prefix has, however long the others are."""
    return list(range(number * 10_000, number * 10_000 + num_tokens // 64))


def asking(*prefixes: list[int], num_tokens: int = 1, number: int = 0) -> Row:
    """A row over `prefixes` and a page and a half of its own, that computes `num_tokens`."""
    shared = [page for prefix in prefixes for page in prefix]
    own = [-1 - 40 * number - i for i in range(2 + num_tokens // 64)]
    token_ids = np.ones(num_tokens, np.int32)
    table = np.array(shared + own, np.int32)
    return Row("r", number, token_ids, len(shared) * 64 + 32, table, True, SamplingParams(), 0)


@st.composite
def mixtures(draw: st.DrawFn) -> list[Row]:
    """1 to 64 requests on 1 to 64 documents of any length, skewed, below a system prompt and above turns or not."""
    lengths = st.one_of(st.integers(256, 4096), st.integers(256, 131_072))
    system = page_run(1, draw(st.sampled_from([0, 64, 256, 2048, 16_384])))
    documents = [page_run(10 + i, n) for i, n in enumerate(draw(st.lists(lengths, min_size=1, max_size=64)))]
    turns = [page_run(100 + i, draw(st.sampled_from([0, 64, 640, 8192]))) for i in range(4)]
    num_rows = draw(st.integers(1, 64))
    skew = draw(st.sampled_from([0.3, 1.0, 3.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = []
    for number in range(num_rows):
        document = int(len(documents) * rng.random() ** skew)
        turn = [[page + 1000 * document for page in turns[i]] for i in rng.integers(0, 4, rng.integers(0, 2))]
        num_tokens = int(rng.choice([1, 1, 1, 17, 64, 512]))
        rows.append(asking(system, documents[document], *turn, num_tokens=num_tokens, number=number))
    return rows


@pytest.mark.parametrize("device", [H200, TWO_CORES])
@settings(deadline=None, derandomize=True, max_examples=120)
@given(mixtures(), st.sampled_from([64, 256]))
def test_groups_by_cost_are_valid_and_never_slower(device: DeviceCosts, rows: list[Row], min_shared: int) -> None:
    costs = StepCost(device, LLAMA, 64)
    order, groups = arrange(rows, 64, min_shared, costs)
    ordered = [rows[i] for i in order]
    assert sorted(order) == list(range(len(rows)))
    assert_contract(ordered, groups, 64, min_shared)
    plain_s = costs.step_time_s(ordered, ())
    assert costs.step_time_s(ordered, groups) <= plain_s
    by_length = arrange(rows, 64, min_shared)[1]
    assert costs.step_time_s(ordered, groups) <= 1.03 * min(plain_s, costs.step_time_s(ordered, by_length))


def test_a_document_pays_and_its_singletons_stay_alone() -> None:
    documents = [page_run(2 + i, 130_816) for i in range(3)]
    rows = [asking(documents[i], number=n) for n, i in enumerate((0, 0, 0, 1, 2, 2))]
    order, groups = arrange(rows, 64, 256, COST)
    assert [tuple(order[i] for i in group.rows) for group in groups] == [(0, 1, 2), (4, 5)]


def test_a_system_prompt_pays_for_many_and_is_read_by_two_documents_themselves() -> None:
    system = page_run(1, 512)
    many = [asking(system, page_run(2 + i, 8192), number=8 * i + j) for i in range(8) for j in range(8)]
    assert [len(group.rows) for group in arrange(many, 64, 256, COST)[1]] == [64] + [8] * 8
    two = [asking(system, page_run(2 + i, 8192), number=20 * i + j) for i in range(2) for j in range(20)]
    groups = arrange(two, 64, 256, COST)[1]  # 160 folded rows are two tiles together, and two apart
    assert [(group.first_page, group.num_pages, len(group.rows)) for group in groups] == [(0, 136, 20), (0, 136, 20)]


def test_prompts_that_fill_their_tiles_have_no_use_for_a_group() -> None:
    rows = [asking(page_run(1, 8192), num_tokens=2048, number=i) for i in range(2)]
    assert arrange(rows, 64, 256)[1] != ()
    assert arrange(rows, 64, 256, COST)[1] == ()
