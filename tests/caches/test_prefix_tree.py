"""The tree against a naive model: a dictionary that knows, for every page of the tree, the tokens up to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p99lab.caches.pages import PageCopy, PageMoves, PagePool
from p99lab.caches.prefix_tree import Grant, PrefixTree, common_len

pytestmark = pytest.mark.light


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def filled(tree: PrefixTree, *sequences: np.ndarray) -> None:
    """Each sequence computed, entered with its tail and let go."""
    for tokens in sequences:
        grant = tree.grant(tokens, len(tokens))
        if grant.copy is not None:
            tree.finish_copy(grant.copy)
        tree.release(tree.insert(tokens, grant.pages, final=True))


def num_found(tree: PrefixTree, tokens: np.ndarray) -> int:
    """Tokens found of a sequence and one more token."""
    grant = tree.grant(np.append(tokens, np.int32(-1)), len(tokens) + 1)
    if grant.copy is not None:
        tree.finish_copy(grant.copy)
    tree.release(grant.pages)
    return grant.num_cached_tokens


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_common_len(num_first: int, num_second: int, differ_at: int) -> None:
    first, second = np.zeros(num_first, np.int32), np.zeros(num_second, np.int32)
    second[differ_at:] = 1
    assert common_len(first, second) == min(num_first, num_second, differ_at)


def test_one_token_is_always_left_to_compute() -> None:
    tree = PrefixTree(PagePool(16, page_size=4))
    tokens = np.arange(8, dtype=np.int32)
    filled(tree, tokens)
    grant = tree.grant(tokens, 8)
    assert grant.num_cached_tokens == 7
    assert grant.copy == PageCopy(source=1, target=int(grant.pages[1]), num_tokens=3)
    assert grant.pages[0] == 0


def test_children_may_share_all_but_the_last_token_of_a_page() -> None:
    tree = PrefixTree(PagePool(16, page_size=4))
    filled(tree, ids(1, 2, 3, 4, 5, 6, 7, 8), ids(1, 2, 3, 4, 5, 6, 7, 9))
    assert num_found(tree, ids(1, 2, 3, 4, 5, 6, 7, 8)) == 8
    assert num_found(tree, ids(1, 2, 3, 4, 5, 6, 7, 9)) == 8
    assert num_found(tree, ids(1, 2, 3, 4, 5, 6, 9)) == 6
    tree.check([])


def test_a_page_larger_than_the_prompt_is_found() -> None:
    tree = PrefixTree(PagePool(4, page_size=64))
    filled(tree, ids(1, 2, 3))
    assert num_found(tree, ids(1, 2, 3)) == 3
    assert num_found(tree, ids(1, 2)) == 2


def test_a_second_computation_is_replaced_by_the_first() -> None:
    pool = PagePool(16, page_size=2)
    tree = PrefixTree(pool)
    tokens = ids(1, 2, 3, 4, 5)
    first, second = tree.grant(tokens, 5), tree.grant(tokens, 5)
    entered = tree.insert(tokens, first.pages)
    assert entered.tolist() == first.pages[:2].tolist()
    replaced = tree.insert(tokens, second.pages)
    assert replaced.tolist() == entered.tolist()
    assert pool.references[replaced].tolist() == [2, 2]
    assert pool.references[second.pages].tolist() == [0, 0, 1]
    tree.check([first.pages, np.append(replaced, second.pages[2])])


def test_replaced_pages_may_be_kept_while_somebody_still_reads_them() -> None:
    pool = PagePool(16, page_size=2)
    tree = PrefixTree(pool)
    tokens = ids(1, 2, 3, 4, 5)
    first, second = tree.grant(tokens, 5), tree.grant(tokens, 5)
    entered = tree.insert(tokens, first.pages)
    assert tree.insert(tokens, second.pages, keep_replaced=True).tolist() == entered.tolist()
    tree.check([first.pages, np.append(entered, second.pages[2]), second.pages[:2]])
    tree.release(second.pages[:2])
    assert pool.num_free == 16 - 4
    tree.check([first.pages, np.append(entered, second.pages[2])])


def test_a_grant_that_cannot_be_had_changes_nothing() -> None:
    pool = PagePool(6, page_size=2)
    tree = PrefixTree(pool)
    filled(tree, ids(1, 2, 3, 4), ids(7, 8))
    held = tree.extend(2)
    before = (pool.references.copy(), pool.in_tree.copy(), sorted(tree.pages().tolist()))
    assert tree.grant(ids(1, 2, 3, 4, *range(10, 18)), 12) is None  # 4 new pages; 1 free, 1 to evict, 2 matched
    assert (pool.references == before[0]).all()
    assert (pool.in_tree == before[1]).all()
    assert sorted(tree.pages().tolist()) == before[2]
    tree.check([held])


def test_what_is_matched_is_not_evicted_to_make_room_for_it() -> None:
    tree = PrefixTree(PagePool(5, page_size=2))
    filled(tree, ids(1, 2, 3, 4), ids(7, 8))  # the match is the least recently used
    grant = tree.grant(ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 9), 10)
    assert grant.num_cached_tokens == 4
    assert sorted(tree.pages().tolist()) == grant.pages[:2].tolist()


def test_the_copy_is_given_up_when_its_source_is_the_page_that_is_missing() -> None:
    tree = PrefixTree(PagePool(2, page_size=4))
    filled(tree, ids(1, 2, 3, 4, 5, 6))
    grant = tree.grant(ids(1, 2, 3, 4, 5, 7, 8, 9), 8)
    assert (grant.num_cached_tokens, grant.copy) == (4, None)
    tree.check([grant.pages])


def test_the_source_of_a_copy_stays_until_the_copy_is_done() -> None:
    pool = PagePool(4, page_size=4)
    tree = PrefixTree(pool)
    filled(tree, ids(1, 2, 3))
    grant = tree.grant(ids(1, 2, 9), 3)
    assert grant.copy is not None
    tree.check([grant.pages], [grant.copy])
    assert tree.evict(4) == 0
    tree.finish_copy(grant.copy)
    assert tree.evict(4) == 1
    tree.check([grant.pages])


def test_least_recently_used_leaves_go_first_and_from_their_tail() -> None:
    tree = PrefixTree(PagePool(16, page_size=2))
    document = ids(1, 2, 3, 4)
    filled(tree, np.append(document, ids(10, 11)), np.append(document, ids(20, 21)), ids(30, 31, 32, 33))
    tree.touch(np.append(document, ids(10, 11)))
    assert tree.evict(1) == 1
    assert num_found(tree, np.append(document, ids(20, 21))) == 4
    assert tree.evict(1) == 1
    assert num_found(tree, ids(30, 31, 32, 33)) == 2
    assert tree.evict(16) == 4
    assert num_found(tree, document) == 0
    tree.check([])


def test_what_a_tail_is_copied_from_counts_as_no_use() -> None:
    tree = PrefixTree(PagePool(4, page_size=4))
    filled(tree, ids(1, 2, 3, 4, 5, 6), ids(1, 2, 3, 4, 8, 8))
    grant = tree.grant(ids(1, 2, 3, 4, 5, 9), 6)
    assert grant is not None
    assert grant.copy is not None
    tree.finish_copy(grant.copy)
    tree.release(grant.pages)
    tree.evict(1)
    assert num_found(tree, ids(1, 2, 3, 4, 5, 6)) == 4
    assert num_found(tree, ids(1, 2, 3, 4, 8, 8)) == 6


def test_a_grant_counts_as_a_use() -> None:
    tree = PrefixTree(PagePool(16, page_size=2))
    filled(tree, ids(1, 2), ids(3, 4))
    assert num_found(tree, ids(1, 2)) == 2
    tree.evict(1)
    assert num_found(tree, ids(3, 4)) == 0
    assert num_found(tree, ids(1, 2)) == 2


def test_forget_all_but_some() -> None:
    tree = PrefixTree(PagePool(16, page_size=2))
    filled(tree, ids(1, 2, 3, 4, 5), ids(1, 2, 7, 8), ids(9, 9, 9))
    tree.forget_except([ids(1, 2, 3, 4)])
    assert len(tree.pages()) == 2
    assert num_found(tree, ids(1, 2, 3, 4)) == 4
    tree.check([])
    tree.forget_except([])
    assert len(tree.pages()) == 0


def test_disabled_later_what_is_kept_is_not_found() -> None:
    tree = PrefixTree(PagePool(8, page_size=2))
    filled(tree, ids(1, 2, 3, 4))
    tree.enabled = False
    assert num_found(tree, ids(1, 2, 3, 4)) == 0
    tree.enabled = True
    assert num_found(tree, ids(1, 2, 3, 4)) == 4


def test_a_leaf_is_trimmed_down_to_what_is_held() -> None:
    tree = PrefixTree(PagePool(8, page_size=2))
    filled(tree, ids(1, 2, 3, 4, 5, 6, 7, 8))
    grant = tree.grant(ids(1, 2, 3, 4, 99), 5)
    assert tree.evict(8) == 2
    tree.check([grant.pages])
    tree.release(grant.pages)
    assert tree.evict(8) == 2


def test_thousands_of_questions_below_one_document() -> None:
    rng = np.random.default_rng(0)
    tree = PrefixTree(PagePool(4096, page_size=4))
    document = np.arange(8, dtype=np.int32)
    questions = [rng.integers(0, 30, rng.integers(1, 8)).astype(np.int32) for _ in range(1000)]
    filled(tree, *(np.append(document, question) for question in questions))
    tree.check([])
    for question in questions:
        assert num_found(tree, np.append(document, question)) == 8 + len(question)


def test_disabled_nothing_is_found_and_nothing_kept() -> None:
    pool = PagePool(8, page_size=2)
    tree = PrefixTree(pool, enabled=False)
    tokens = ids(1, 2, 3, 4)
    filled(tree, tokens)
    assert num_found(tree, tokens) == 0
    assert pool.num_free == 8


@dataclass
class Holder:
    """Someone with a page table over `tokens`, all of them computed."""

    tokens: tuple[int, ...]
    pages: np.ndarray
    copies: list[PageCopy] = field(default_factory=list)


class Tree(RuleBasedStateMachine):
    """Grants, insertions, evictions in any order; the model says what must be found, and when a grant must fail."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]), num_pages=st.integers(2, 24), min_run_pages=st.sampled_from([1, 3, 16])
    )
    def start(self, page_size: int, num_pages: int, min_run_pages: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.tree = PrefixTree(self.pool, min_run_pages=min_run_pages)
        self.holders: list[Holder] = []
        self.known: dict[int, tuple[int, ...]] = {}  # page of the tree → all tokens up to its last valid one

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple),
        max_cached_tokens=st.none() | st.integers(0, 14),
    )
    def grant(self, tokens: tuple[int, ...], max_cached_tokens: int | None) -> None:
        num_whole, num_tail = divmod(self.longest(tokens[:-1][:max_cached_tokens]), self.pool.page_size)
        before = (self.pool.references.copy(), self.pool.in_tree.copy(), self.known.copy())
        grant = self.tree.grant(np.array(tokens, np.int32), len(tokens), max_cached_tokens)
        needed = self.pool.pages_for(len(tokens)) - num_whole
        matched = [page for page, known in before[2].items() if known == tokens[: len(known)]]
        matched = [page for page in matched if len(before[2][page]) % self.pool.page_size == 0][:num_whole]
        available = int((before[0] == 0).sum() - (before[0][matched] == 0).sum())
        assert (grant is not None) == (needed <= available)
        if grant is None:
            assert (self.pool.references == before[0]).all()
            assert (self.pool.in_tree == before[1]).all()
        else:
            self.rename(grant.moves)
            self.check_grant(grant, tokens, num_whole, num_tail, spare=available - needed)

    def rename(self, moves: PageMoves | None) -> None:
        if moves is not None:
            renamed = dict(zip(moves.sources.tolist(), moves.targets.tolist(), strict=True))
            freed = set(renamed.values())  # some by eviction, in this grant
            self.known = {renamed.get(page, page): known for page, known in self.known.items() if page not in freed}

    def check_grant(self, grant: Grant, tokens: tuple[int, ...], num_whole: int, num_tail: int, spare: int) -> None:
        size = self.pool.page_size
        if grant.copy is None:
            assert num_tail == 0 or spare == 0
            assert grant.num_cached_tokens == num_whole * size
        else:
            assert grant.copy.num_tokens == num_tail
            assert grant.copy.target == grant.pages[num_whole]
            assert grant.num_cached_tokens == num_whole * size + num_tail
            assert self.known[grant.copy.source][: grant.num_cached_tokens] == tokens[: grant.num_cached_tokens]
        for index, page in enumerate(grant.pages[:num_whole].tolist()):
            assert self.known[page] == tokens[: (index + 1) * size]
        copies = [] if grant.copy is None else [grant.copy]
        self.holders.append(Holder(tokens, grant.pages, copies))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), final=st.booleans())
    def insert(self, data: st.DataObject, final: bool) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        size = self.pool.page_size
        entered = self.tree.insert(np.array(holder.tokens, np.int32), holder.pages, final)
        assert len(entered) == (self.pool.pages_for(len(holder.tokens)) if final else len(holder.tokens) // size)
        for index, page in enumerate(entered.tolist()):
            prefix = holder.tokens[: (index + 1) * size]
            assert self.known.setdefault(page, prefix)[: len(prefix)] == prefix
        holder.pages = np.append(entered, holder.pages[len(entered) :])
        if final:
            self.let_go(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.let_go(data.draw(st.sampled_from(self.holders)))

    def let_go(self, holder: Holder) -> None:
        for copy in holder.copies:
            self.tree.finish_copy(copy)
        self.tree.release(holder.pages)
        self.holders = [other for other in self.holders if other is not holder]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish_copies(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for copy in holder.copies:
            self.tree.finish_copy(copy)
        holder.copies = []

    @rule(num_pages=st.integers(1, 6))
    def evict(self, num_pages: int) -> None:
        expected = min(num_pages, self.pool.num_cached)
        assert self.tree.evict(num_pages) == expected

    @rule(num_pages=st.integers(1, 3))
    def extend(self, num_pages: int) -> None:
        available = self.pool.num_free + self.pool.num_cached
        pages = self.tree.extend(num_pages)
        assert (pages is not None) == (num_pages <= available)
        if pages is not None:
            self.tree.release(pages)

    @rule(tokens=st.lists(st.integers(0, 2), max_size=14))
    def touch(self, tokens: list[int]) -> None:
        self.tree.touch(np.array(tokens, np.int32))

    @invariant()
    def sound(self) -> None:
        copies = [copy for holder in self.holders for copy in holder.copies]
        self.tree.check([holder.pages for holder in self.holders], copies)
        self.known = {page: known for page, known in self.known.items() if self.pool.in_tree[page]}
        assert sorted(self.known) == sorted(self.tree.pages().tolist())

    def longest(self, tokens: tuple[int, ...]) -> int:
        """The most first tokens of `tokens` that any page of the tree ends in or passes."""
        shared = (zip(known, tokens, strict=False) for known in self.known.values())
        return max((sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) for pairs in shared), default=0)


TestTree = Tree.TestCase
TestTree.settings = settings(deadline=None, derandomize=True, max_examples=150, stateful_step_count=40)
