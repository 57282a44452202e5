"""The pool: runs, reference counts, and every illegal step refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.caches.pages import PageCopy, PagePool
from p99lab.errors import AccountingError

pytestmark = pytest.mark.light


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def pool_with_free(free: list[int], num_pages: int) -> PagePool:
    """A pool of which exactly `free` are free."""
    pool = PagePool(num_pages, page_size=4)
    everything = pool.allocate(num_pages)
    pool.unpin(everything[np.isin(everything, free)])
    return pool


def num_runs(pages: np.ndarray) -> int:
    return 1 + int(np.count_nonzero(np.diff(pages) != 1))


def test_a_fresh_pool_gives_one_ascending_run() -> None:
    pool = PagePool(8, page_size=4)
    assert pool.allocate(5).tolist() == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_cached, pool.num_active) == (3, 0, 5)


def test_the_shortest_run_that_fits_is_taken() -> None:
    pool = pool_with_free([0, 1, 2, 3, 6, 7, 10, 11, 12], 14)
    assert pool.allocate(3).tolist() == [10, 11, 12]
    assert pool.allocate(1).tolist() in ([6], [7])


def test_without_a_fitting_run_the_fewest_in_ascending_order() -> None:
    pool = pool_with_free([0, 2, 3, 5, 8, 9, 10], 12)
    assert pool.allocate(5).tolist() == [2, 3, 8, 9, 10]
    assert pool.allocate(2).tolist() in ([0, 5],)
    assert pool.allocate(1) is None


def test_all_or_nothing() -> None:
    pool = pool_with_free([1, 3], 6)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.allocate(0).tolist() == []


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.sets(st.integers(0, 29)), st.integers(0, 30))
def test_allocation_is_minimal_in_runs(free: set[int], num_pages: int) -> None:
    pool = pool_with_free(sorted(free), 30)
    pages = pool.allocate(num_pages)
    if num_pages > len(free):
        assert pages is None
        return
    assert len(pages) == num_pages
    assert set(pages.tolist()) <= free
    assert (np.diff(pages) > 0).all()
    lengths = sorted(map(len, "".join("x" if page in free else " " for page in range(30)).split()), reverse=True)
    fewest = next(n for n in range(len(lengths) + 1) if sum(lengths[:n]) >= num_pages)
    assert num_pages == 0 or num_runs(pages) <= fewest
    pool.check([pages, ids(*(set(range(30)) - free))], ids())


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.sampled_from("fch"), min_size=1, max_size=30), st.data())
def test_a_run_is_cleared_by_moving_as_few_cached_pages_as_can_be(kinds: list[str], data: st.DataObject) -> None:
    free, cached, held = (np.flatnonzero(np.array(kinds) == kind).astype(np.int32) for kind in "fch")
    pool = pool_with_free(free.tolist(), len(kinds))
    pool.enter_tree(cached)
    pool.unpin(cached)
    num_pages = data.draw(st.integers(1, max(1, len(free))))
    if num_pages > len(free):
        return
    moves = pool.clear_run(num_pages)
    sources, targets = (ids(), ids()) if moves is None else (moves.sources, moves.targets)
    assert set(targets.tolist()) <= set(free.tolist())
    assert set(sources.tolist()) <= set(cached.tolist())
    tree = np.append(np.setdiff1d(cached, sources), targets)
    pool.check([held], tree)
    pages = pool.allocate(num_pages)
    pool.check([held, pages], tree)
    text = "".join(kinds)
    windows = [text[at : at + num_pages] for at in range(len(text) - num_pages + 1)]
    costs = [window.count("c") for window in windows if "h" not in window]
    if costs:
        assert num_runs(pages) == 1
        assert len(sources) == min(costs)
    else:
        loose = sorted(map(len, text.replace("f", "c").replace("h", " ").split()), reverse=True)
        assert num_runs(pages) <= next(n for n in range(1, len(loose) + 1) if sum(loose[:n]) >= num_pages)


def test_the_life_of_a_page() -> None:
    pool = PagePool(4, page_size=4)
    page = pool.allocate(1)
    pool.check([page], ids())
    pool.enter_tree(page)
    pool.pin(page)
    pool.check([page], page, [PageCopy(int(page[0]), 3, 2)])
    pool.unpin(page)
    pool.unpin(page)
    assert (pool.num_free, pool.num_cached, pool.num_active) == (3, 1, 0)
    pool.pin(page)
    assert pool.num_cached == 0
    pool.unpin(page)
    pool.leave_tree(page)
    assert (pool.num_free, pool.num_cached) == (4, 0)
    pool.check([], ids())


def test_illegal_steps_are_refused() -> None:
    pool = PagePool(4, page_size=4)
    page = pool.allocate(1)
    with pytest.raises(AccountingError):
        pool.pin(page)  # private
    with pytest.raises(AccountingError):
        pool.pin(ids(3))  # free
    with pytest.raises(AccountingError):
        pool.leave_tree(page)  # not in the tree
    with pytest.raises(AccountingError):
        pool.enter_tree(ids(3))  # free
    pool.enter_tree(page)
    with pytest.raises(AccountingError):
        pool.enter_tree(page)  # twice
    with pytest.raises(AccountingError):
        pool.leave_tree(page)  # held
    pool.unpin(page)
    with pytest.raises(AccountingError):
        pool.unpin(page)  # double free
    pool.check([], page)


@pytest.mark.parametrize(
    ("tables", "tree", "problem"),
    [
        ([], [0], "references"),  # page 1 belongs to nobody: lost
        ([[1], [1]], [0], "references"),  # two private owners
        ([[1]], [0, 0], "twice in the tree"),
        ([[1]], [], "in the tree or not"),
        ([[1, 1]], [0], "references"),
        ([[1], [2]], [0], "references"),  # a table points to a free page
    ],
)
def test_check_names_pages_with_wrong_owners(tables: list[list[int]], tree: list[int], problem: str) -> None:
    pool = PagePool(4, page_size=4)
    pages = pool.allocate(2)
    pool.enter_tree(pages[:1])
    pool.unpin(pages[:1])
    pool.check([ids(1)], ids(0))
    with pytest.raises(AccountingError, match=problem):
        pool.check([ids(*table) for table in tables], ids(*tree))
