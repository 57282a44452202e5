"""The page pool: who may use which page of the KV cache, counted per page.

Two facts say all about a page: `references`, how many page tables hold it and pending copies read it, and `in_tree`,
whether the prefix tree keeps it. These pairs occur, and no others:

| references | in_tree | state                                                                     |
|------------|---------|---------------------------------------------------------------------------|
| 0          | False   | free: may be allocated                                                    |
| 1          | False   | active, private: one page table holds it, its request may write it        |
| 0          | True    | cached: the tree alone keeps it, may be evicted                           |
| >= 1       | True    | active, shared: page tables or copies read it, nobody writes or evicts it |

Only pages of the tree are ever shared, so a private page has exactly one reference. The tiers will add a third
fact, a transfer that is under way; the pairs above are those of a page without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p99lab.errors import AccountingError

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy the first `num_tokens` slots of page `source` to page `target`, in every layer, before the step runs."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Copy pages `sources` to pages `targets` ([N] int32, all distinct), in every layer, before the step's copies."""

    sources: IntArray
    targets: IntArray


class PagePool:
    """`num_pages` pages of `page_size` tokens each: pure bookkeeping, no memory behind it.

    `references` ([num_pages] int32) and `in_tree` ([num_pages] bool) are for others to read; only the pool's methods
    write them. The pages given to one call are distinct.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.references: IntArray = np.zeros(num_pages, np.int32)
        self.in_tree = np.zeros(num_pages, np.bool_)
        self.num_free = num_pages
        self.num_cached = 0
        self._is_free = np.ones(num_pages + 2, np.bool_)  # a page at index page + 1, between two guards
        self._is_free[[0, -1]] = False

    @property
    def num_active(self) -> int:
        return self.num_pages - self.num_free - self.num_cached

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> IntArray | None:
        """`num_pages` free pages, now private with one reference each, or None when fewer are free.

        One contiguous ascending run where there is one (the shortest that fits), else the fewest runs, in ascending
        order.
        """
        if num_pages > self.num_free:
            return None
        pages = self._choose(num_pages)
        self.references[pages] = 1
        self._is_free[pages + 1] = False
        self.num_free -= num_pages
        return pages

    def clear_run(self, num_pages: int) -> PageMoves | None:
        """Move cached pages to free ones so that `num_pages`, of which so many are free, can be allocated as one run.

        The run with the fewest pages to move is taken; where pages in use leave room for none, the fewest runs.
        Whoever keeps the cached pages must call them by their new numbers. None: there is nothing to move.
        """
        if num_pages <= _runs_of(self._is_free)[1].max(initial=0):
            return None
        cleared = self._clearest(num_pages)
        sources = cleared[self.in_tree[cleared]]
        if len(sources) == 0:
            return None
        is_target = self._is_free[1:-1].copy()
        is_target[cleared] = False
        targets = np.flatnonzero(is_target)[: len(sources)].astype(np.int32)
        self.in_tree[sources], self.in_tree[targets] = False, True
        self._is_free[sources + 1], self._is_free[targets + 1] = True, False
        return PageMoves(sources, targets)

    def pin(self, pages: IntArray) -> None:
        """One more reference on each of `pages`, all of them in the tree."""
        index = pages.astype(np.intp)  # once, where numpy would convert at every use
        if not self.in_tree[index].all():
            raise AccountingError(f"pin of pages outside the tree: {pages[~self.in_tree[index]].tolist()}")
        before = self.references[index]
        self.references[index] = before + 1
        self.num_cached -= len(before) - int(np.count_nonzero(before))

    def unpin(self, pages: IntArray) -> None:
        """One reference less on each of `pages`; a page without any is then cached if in the tree, else free."""
        index = pages.astype(np.intp)
        left = self.references[index] - 1
        if (left < 0).any():
            raise AccountingError(f"unpin of pages without a reference: {pages[left < 0].tolist()}")
        self.references[index] = left
        released = index[left == 0]
        cached = self.in_tree[released]
        self.num_cached += int(np.count_nonzero(cached))
        self._free(released[~cached])

    def enter_tree(self, pages: IntArray) -> None:
        """Private pages become the tree's; their holder keeps its reference and must not write them any more."""
        if self.in_tree[pages].any() or (self.references[pages] != 1).any():
            raise AccountingError(f"pages {pages.tolist()} enter the tree, but not all are private")
        self.in_tree[pages] = True

    def leave_tree(self, pages: IntArray) -> None:
        """Cached pages become free."""
        if not self.in_tree[pages].all() or self.references[pages].any():
            raise AccountingError(f"pages {pages.tolist()} leave the tree, but not all are cached")
        self.in_tree[pages] = False
        self.num_cached -= len(pages)
        self._free(pages)

    def check(self, page_tables: Iterable[IntArray], tree_pages: IntArray, copies: Iterable[PageCopy] = ()) -> None:
        """Prove that every page has exactly the owners it is said to have.

        `page_tables`: those of all live requests, each [num_pages of the request]. `tree_pages`: all pages of the tree.
        `copies`: those granted whose step has not ended.

        Raises:
            AccountingError: a page owned twice where it must not be, lost, or counted wrongly.
        """
        sources = np.array([copy.source for copy in copies], np.int32)
        tables = [*page_tables]
        expected = np.bincount(np.concatenate([sources, *tables]), minlength=self.num_pages)
        in_tree = np.bincount(tree_pages, minlength=self.num_pages)
        is_free = (expected == 0) & (in_tree == 0)
        self._require((in_tree <= 1), "twice in the tree")
        self._require(self.in_tree == (in_tree == 1), "in the tree or not, against the tree")
        self._require(self.references == expected, "references other than tables and copies hold")
        self._require((expected <= 1) | (in_tree == 1), "shared outside the tree")
        self._require(self._is_free[1:-1] == is_free, "free or not, against its owners")
        for table in tables:
            self._require(np.bincount(table, minlength=self.num_pages) <= 1, "twice in one page table")
        if self.num_free != is_free.sum() or self.num_cached != ((expected == 0) & (in_tree == 1)).sum():
            raise AccountingError(f"num_free {self.num_free} or num_cached {self.num_cached} is counted wrongly")

    def _choose(self, num_pages: int) -> IntArray:
        if num_pages == 0:
            return np.empty(0, np.int32)
        starts, lengths = _runs_of(self._is_free)
        fitting = np.flatnonzero(lengths >= num_pages)
        if len(fitting):
            start = starts[fitting[lengths[fitting].argmin()]]
            return np.arange(start, start + num_pages, dtype=np.int32)
        return self._gather(starts, lengths, num_pages)

    def _clearest(self, num_pages: int) -> IntArray:
        """Pages nobody holds, in one run with as few of the tree as can be, or in the fewest runs; ascending."""
        held = np.concatenate([[1], self.references, [1]]) > 0
        starts, lengths = _runs_of(~held)
        if lengths.max(initial=0) < num_pages:
            return self._gather(starts, lengths, num_pages)
        num_held, num_kept = (np.append(0, np.cumsum(one)) for one in (held[1:-1], self.in_tree))
        window_held, window_kept = (total[num_pages:] - total[:-num_pages] for total in (num_held, num_kept))
        start = np.where(window_held == 0, window_kept, self.num_pages + 1).argmin()
        return np.arange(start, start + num_pages, dtype=np.int32)

    @staticmethod
    def _gather(starts: NDArray[np.intp], lengths: NDArray[np.intp], num_pages: int) -> IntArray:
        """`num_pages` from the fewest of these runs, none of which suffices: the longest, then one for the rest."""
        longest_first = np.argsort(-lengths)
        num_whole = int(np.searchsorted(np.cumsum(lengths[longest_first]), num_pages))
        whole, others = longest_first[:num_whole], longest_first[num_whole:]
        rest = num_pages - lengths[whole].sum()
        shortest_for_rest = others[np.count_nonzero(lengths[others] >= rest) - 1]
        chosen = np.append(whole, shortest_for_rest)
        taken = np.append(lengths[whole], rest)
        order = np.argsort(starts[chosen])
        starts, taken = starts[chosen][order], taken[order]
        offsets = np.cumsum(taken) - taken  # where each run begins in the result
        return (np.repeat(starts - offsets, taken) + np.arange(num_pages)).astype(np.int32)

    def _free(self, pages: NDArray[np.integer[Any]]) -> None:
        self._is_free[pages + 1] = True
        self.num_free += len(pages)

    @staticmethod
    def _require(ok: NDArray[np.bool_], problem: str) -> None:
        if not ok.all():
            raise AccountingError(f"pages {np.flatnonzero(~ok).tolist()}: {problem}")


def _runs_of(flags: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First page and length of each run of set flags; a page's flag is at index page + 1, between two that are not."""
    edges = np.flatnonzero(flags[1:] != flags[:-1])
    return edges[0::2], edges[1::2] - edges[0::2]
