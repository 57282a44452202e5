"""The prefix tree: computed pages found again by their tokens, exact to the token.

A path from the root spells a sequence of tokens; a node covers whole pages of it, and only a leaf may end in a partial
page. All children of a node therefore begin at a page boundary, and two of them may share up to `page_size - 1` first
tokens. With pages of 4 tokens, after entering `abcdefgh`, `abcdefxy` (final) and `abcdpqrs`:

    root ── [abcd] ─┬─ [efgh]
                    ├─ [efxy]          looking up `abcdefxz…` finds page [abcd], then copies 3 tokens of [efxy]:
                    └─ [pqrs]          a page of the tree is never written, not even its unused end

Children are sorted by the bytes of their first page's tokens. Among sorted byte strings the longest common prefix with
any given string is found at one of the two neighbours of its place, so a lookup is one bisection, however many
questions hang below a document. Byte order within a token does not matter for that, only equality does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from p99lab.caches.eviction import EvictionOrder, least_recently_used
from p99lab.caches.pages import IntArray, PageCopy, PageMoves, PagePool
from p99lab.errors import AccountingError

MIN_RUN_PAGES = 16  # fewer may lie apart: they cost a step little

NO_PAGES: IntArray = np.empty(0, np.int32)
NO_PAGES.setflags(write=False)


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens ([num_tokens] int32) and the pages that hold their keys and values ([num_pages] int32)."""

    tokens: IntArray
    pages: IntArray
    parent: Node | None
    last_used: int = 0  # on the tree's logical clock
    children: list[Node] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the children, sorted


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree holds of a sequence: `pages` whole pages, then `num_tail_tokens` first tokens of page `source`.

    `end`: the deepest node (or the root) of which whole pages match, and `num_end_pages` how many of its own. `last`:
    the node that holds the last of the tokens, in `source` or, without one, `end`.
    """

    pages: IntArray
    end: Node
    num_end_pages: int
    last: Node
    source: int | None = None
    num_tail_tokens: int = 0

    @property
    def held_pages(self) -> IntArray:
        """The matched pages and the source of the copy: what must not go while the match is in use."""
        return self.pages if self.source is None else np.append(self.pages, np.int32(self.source))


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages for a request: `pages` is its page table, of which `num_cached_tokens` tokens need no computing.

    Every page of the table carries one reference of the caller's. `moves` and `copy`, where there are any, must be
    executed before anything is computed: first the moves of all grants, in the order of these, then the copies. A
    copy's source is pinned until `PrefixTree.finish_copy`.
    """

    pages: IntArray
    num_cached_tokens: int
    copy: PageCopy | None = None
    moves: PageMoves | None = None


class PrefixTree:
    """The computed prefixes of `pool`. While `enabled` is off nothing is found and nothing new is kept.

    References of page tables and copies lie along paths from the root: whoever holds a page holds all pages before it
    on its path. So every cached page can be evicted, and `num_free + num_cached` pages can be had at any time.

    Whoever is granted `min_run_pages` or more gets them in one run of consecutive pages, as far as no page in use is in
    the way: cached pages are moved out of it. Eviction frees pages here and there, and kernels for long prefixes want
    them side by side; copying a page is cheap beside computing it.
    """

    def __init__(self, pool: PagePool, enabled: bool = True, min_run_pages: int = MIN_RUN_PAGES) -> None:
        self.pool = pool
        self.enabled = enabled
        self._min_run_pages = min_run_pages
        self._root = Node(NO_PAGES, NO_PAGES, None)
        self._order: EvictionOrder[Node] = EvictionOrder(least_recently_used)
        self._clock = 0

    def grant(
        self, token_ids: IntArray, num_tokens: int, max_cached_tokens: int | None = None, num_later_tokens: int = 0
    ) -> Grant | None:
        """Match, pin and allocate pages for the first `num_tokens` of `token_ids`, evicting as needed.

        No more than `max_cached_tokens` come from the tree (0: all are to be computed), and at least one token is left
        to compute. Pages for `num_later_tokens` more are granted too where they can be had, so that what comes later
        lies beside what is there. None when the pages cannot be had; then nothing at all has changed.
        """
        num_wanted = num_tokens - 1 if max_cached_tokens is None else min(num_tokens - 1, max_cached_tokens)
        match = self._match(token_ids[:num_wanted] if self.enabled else NO_PAGES)
        least, most = (self.pool.pages_for(num) for num in (num_tokens, num_tokens + num_later_tokens))
        grant = self._take(match, most)
        if grant is None and least < most:
            grant = self._take(match, least)
        if grant is None and match.source is not None:  # the source may be the very page that is missing
            grant = self._take(replace(match, source=None, num_tail_tokens=0), least)
        return grant

    def extend(self, num_pages: int) -> IntArray | None:
        """`num_pages` more private pages, evicting as needed, or None (and no change) when they cannot be had."""
        return self.pool.allocate(num_pages) if self._make_room(num_pages) else None

    def insert(
        self, token_ids: IntArray, pages: IntArray, final: bool = False, keep_replaced: bool = False
    ) -> IntArray:
        """Enter computed tokens, whole pages only, or with `final` the partial tail page too.

        The caller holds one reference on each of `pages`, which hold `token_ids` from the first on. Returned are the
        tree's pages for the entered tokens (with `final` all, else `len(token_ids) // page_size` pages): where the tree
        already held tokens under another page, that page replaces the caller's. After the call the caller holds one
        reference on each returned page and on those of `pages` beyond them, and none on the replaced ones, which are
        free; with `keep_replaced` it still holds these too, and gives them back with `release` when nothing reads them
        any more. It writes to none of the returned pages any more.
        """
        size = self.pool.page_size
        tokens = token_ids if final else token_ids[: len(token_ids) // size * size]
        pages = pages[: self.pool.pages_for(len(tokens))]
        if not self.enabled or len(tokens) == 0:
            return pages.copy()
        match = self._match(tokens, pages)
        num_whole = len(match.pages)
        if num_whole * size + match.num_tail_tokens == len(tokens):
            rest = NO_PAGES if match.source is None else np.array([match.source], np.int32)
            last = match.last
        else:
            rest = pages[num_whole:].copy()
            self.pool.enter_tree(rest)
            last = self._attach(match, tokens[num_whole * size :].copy(), rest)
        entered = np.concatenate([match.pages, rest])
        replaced = entered != pages
        self.pool.pin(entered[replaced])
        if not keep_replaced:
            self.pool.unpin(pages[replaced])
        self._use(last)
        return entered

    def release(self, pages: IntArray) -> None:
        """Give back one reference on each of `pages`; those of the tree stay there until evicted."""
        self.pool.unpin(pages)

    def finish_copy(self, copy: PageCopy) -> None:
        """The step that executed a granted copy has ended: its source is no longer held."""
        self.pool.unpin(np.array([copy.source], np.int32))

    def find(self, token_ids: IntArray) -> IntArray:
        """The whole pages that the tree holds of `token_ids`, [num_pages] int32. Changes nothing."""
        return self._match(token_ids if self.enabled else NO_PAGES).pages

    def touch(self, token_ids: IntArray) -> None:
        """Count the whole pages that the tree holds of `token_ids` as used now, so that they are evicted late."""
        self._use(self._match(token_ids).end)

    def forget_except(self, prefixes: Iterable[IntArray]) -> None:
        """Evict every cached page that holds none of `prefixes`' tokens: as if only these had been computed."""
        kept = [self._match(prefix) for prefix in prefixes]
        held = np.unique(np.concatenate([NO_PAGES, *(match.held_pages for match in kept)]))
        self.pool.pin(held)
        self.evict(self.pool.num_cached)
        self.pool.unpin(held)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` cached pages, least recently used leaves first, each from its tail; how many."""
        num_freed = 0
        kept: list[Node] = []  # leaves that are still leaves afterwards
        while num_freed < num_pages and (leaf := self._order.pop()) is not None:
            if leaf.children:
                continue  # no leaf any more; it enters again when its last child goes
            num_freed += self._trim(leaf, num_pages - num_freed)
            if leaf.parent is not None:
                kept.append(leaf)
        for leaf in kept:
            self._order.enter(leaf)
        return num_freed

    def pages(self) -> IntArray:
        """All pages of the tree, in no particular order."""
        return np.concatenate([NO_PAGES, *(node.pages for node in self._nodes())])

    def check(self, page_tables: Iterable[IntArray], copies: Iterable[PageCopy] = ()) -> None:
        """Prove the tree's structure and the pool's accounts against the owners given (see `PagePool.check`).

        Raises:
            AccountingError: anything that does not add up.
        """
        self.pool.check(page_tables, self.pages(), copies)
        for node in self._nodes():
            self._check_node(node)

    def _match(self, tokens: IntArray, held: IntArray = NO_PAGES) -> Match:
        """`held`: pages in which the caller has `tokens`; those of them that the tree has too need no comparing."""
        size = self.pool.page_size
        node, num_end_pages, at = self._root, 0, 0
        last = node
        pages: list[IntArray] = [NO_PAGES]
        source, num_tail_tokens = None, 0
        while at < len(tokens) and num_end_pages == len(node.pages):
            child, num_common = self._nearest_child(node, tokens[at:], held[at // size :])
            if child is None:
                break
            num_whole, num_tail_tokens = divmod(num_common, size)
            last = child
            if num_tail_tokens:
                source = int(child.pages[num_whole])
            if num_whole == 0:
                break
            pages.append(child.pages[:num_whole])
            node, num_end_pages, at = child, num_whole, at + num_common
        return Match(np.concatenate(pages), node, num_end_pages, last, source, num_tail_tokens)

    def _nearest_child(self, node: Node, tokens: IntArray, held: IntArray) -> tuple[Node | None, int]:
        """The child that shares the most first tokens with `tokens`, and how many; (None, 0) when none shares any."""
        key = tokens[: self.pool.page_size].tobytes()
        at = bisect_left(node.keys, key)
        nearest, num_common = None, 0
        for child in node.children[max(at - 1, 0) : at + 1]:
            num_known = common_len(child.pages, held) * self.pool.page_size
            shared = common_len(child.tokens, tokens, num_known)
            if shared > num_common:
                nearest, num_common = child, shared
        return nearest, num_common

    def _take(self, match: Match, num_pages: int) -> Grant | None:
        held = match.held_pages
        self.pool.pin(held)
        num_new = num_pages - len(match.pages)
        if not self._make_room(num_new):
            self.pool.unpin(held)
            return None
        moves = self._clear_run(num_new) if num_new >= self._min_run_pages else None
        new = self.pool.allocate(num_new)
        if new is None:
            raise AccountingError("the pages there was room for are gone")
        self._use(match.end)  # what is copied need not stay
        copy = None if match.source is None else PageCopy(match.source, int(new[0]), match.num_tail_tokens)
        num_cached_tokens = len(match.pages) * self.pool.page_size + match.num_tail_tokens
        return Grant(np.concatenate([match.pages, new]), num_cached_tokens, copy, moves)

    def _make_room(self, num_pages: int) -> bool:
        """Evict until so many pages are free; False, and no change, when they cannot be had."""
        missing = num_pages - self.pool.num_free
        if missing > self.pool.num_cached:
            return False
        if missing > 0 and self.evict(missing) != missing:
            raise AccountingError("cached pages cannot be evicted")
        return True

    def _clear_run(self, num_pages: int) -> PageMoves | None:
        moves = self.pool.clear_run(num_pages)
        if moves is not None:
            number = np.arange(self.pool.num_pages, dtype=np.int32)
            number[moves.sources] = moves.targets
            for node in self._nodes():
                node.pages = number[node.pages]
        return moves

    def _attach(self, match: Match, tokens: IntArray, pages: IntArray) -> Node:
        """Hang new tokens below the end of `match`: at the end of a leaf of whole pages, else as a child."""
        end = match.end
        if match.num_end_pages < len(end.pages):
            end = self._split(end, match.num_end_pages)
        if end is not self._root and not end.children:
            end.tokens = np.concatenate([end.tokens, tokens])
            end.pages = np.concatenate([end.pages, pages])
            return end
        child = Node(tokens, pages, end)
        self._adopt(end, child)
        self._order.enter(child)
        return child

    def _split(self, node: Node, num_pages: int) -> Node:
        """Part `node` after `num_pages`; it keeps the lower part, and its place in the eviction order."""
        at = num_pages * self.pool.page_size
        parent = self._parent(node)
        upper = Node(node.tokens[:at].copy(), node.pages[:num_pages].copy(), parent, node.last_used)
        place = bisect_left(parent.keys, self._key(node))
        parent.children[place] = upper
        node.tokens, node.pages, node.parent = node.tokens[at:].copy(), node.pages[num_pages:].copy(), upper
        self._adopt(upper, node)
        return upper

    def _adopt(self, parent: Node, child: Node) -> None:
        key = self._key(child)
        at = bisect_left(parent.keys, key)
        parent.keys.insert(at, key)
        parent.children.insert(at, child)

    def _remove(self, leaf: Node) -> None:
        parent = self._parent(leaf)
        at = bisect_left(parent.keys, self._key(leaf))
        del parent.children[at], parent.keys[at]
        leaf.parent = None
        if not parent.children and parent is not self._root:
            self._order.enter(parent)

    def _trim(self, leaf: Node, num_pages: int) -> int:
        """Free up to `num_pages` of a leaf's last pages, as far as nobody holds them, and an empty leaf; how many."""
        held = np.flatnonzero(self.pool.references[leaf.pages])
        num_loose = len(leaf.pages) - (int(held[-1]) + 1 if len(held) else 0)
        num_trimmed = min(num_loose, num_pages)
        num_left = len(leaf.pages) - num_trimmed
        if num_trimmed:
            self.pool.leave_tree(leaf.pages[num_left:])
        if num_left == 0:
            self._remove(leaf)
        leaf.pages = leaf.pages[:num_left]
        leaf.tokens = leaf.tokens[: num_left * self.pool.page_size]
        return num_trimmed

    def _use(self, node: Node | None) -> None:
        """A node, and all that lead to it, are used now."""
        self._clock += 1
        while node is not None:
            node.last_used = self._clock
            node = node.parent

    def _key(self, node: Node) -> bytes:
        return node.tokens[: self.pool.page_size].tobytes()

    def _parent(self, node: Node) -> Node:
        if node.parent is None:
            raise AccountingError("the root was split or removed")
        return node.parent

    def _nodes(self) -> Iterator[Node]:
        stack = [*self._root.children]
        while stack:
            node = stack.pop()
            stack += node.children
            yield node

    def _check_node(self, node: Node) -> None:
        size = self.pool.page_size
        before = self.pool.references[node.parent.pages[-1:]] if node.parent is not None else NO_PAGES
        held = np.concatenate([before, self.pool.references[node.pages]]) > 0
        for ok, problem in (
            (len(node.tokens) > 0, "an empty node"),
            (len(node.pages) == self.pool.pages_for(len(node.tokens)), "pages and tokens of different length"),
            (not node.children or len(node.tokens) % size == 0, "a partial page with children"),
            (bool(node.children) or node in self._order, "a leaf that can never be evicted"),
            (not (held[1:] & ~held[:-1]).any(), "a held page behind one that may be evicted"),
            (all(a < b for a, b in zip(node.keys, node.keys[1:], strict=False)), "children out of order"),
            (node.keys == [self._key(child) for child in node.children], "children under foreign keys"),
            (all(child.parent is node for child in node.children), "a child of two parents"),
        ):
            if not ok:
                raise AccountingError(f"prefix tree: {problem} at pages {node.pages.tolist()}")


def common_len(first: IntArray, second: IntArray, num_known: int = 0) -> int:
    """How many first tokens two sequences share, of which the first `num_known` are known to be equal.

    Compared as memory, in runs that grow: most neighbours differ soon.
    """
    limit = min(len(first), len(second))
    start, width = num_known, 64
    while start < limit:
        stop = min(start + width, limit)
        differs = first[start:stop] != second[start:stop]
        at = int(differs.argmax())
        if differs[at]:
            return start + at
        start, width = stop, width * 32
    return limit
