"""A step's attention as spans of keys, in index arrays: what the CUDA backend gives its kernels, planned in integers.

A span is a set of query tokens that all see the same run of consecutive pool slots, without a causal mask:

    shared    the pages of a prefix group, for all tokens of its rows
    private   what a row alone has computed before this step; for a row of one token, that token's own slot too

Page tables are cut where their pages are not consecutive. Three kernels share the spans, by how many tokens they have:

    spans          those with prompt tokens, or with many: a prefill kernel. Long ones are cut into segments
    decode spans   those of a few one-token rows: a decode kernel. All together are dealt to lanes of equal length
    private        of a one-token row the short rest, if it lies in one run of pages: the kernel that merges takes it

Each segment of a span, and each item of a decode span, computes a partial result for each of its tokens; the partial
results of a token are merged by log-sum-exp. What rows of several tokens see of their own new tokens is causal and
comes apart from that, straight from the step's keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from p99lab.engine.attention.lanes import Lanes, deal
from p99lab.engine.plan import StepPlan
from p99lab.engine.request import IntArray

MAX_PRIVATE_KEYS = 256  # that the merging kernel attends to itself; a longer part is worth a span

PARTIALS_PER_TOKEN = 4  # of spans, for which there is memory in a step of any size
LEAST_PARTIALS = 16384  # for which there always is

SegmentTokens = Callable[[Sequence[tuple[int, int]]], int]
"""From (query tokens, keys) of each span of a step, how many keys a segment of a span may have."""


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """Index arrays of one step of T tokens, all int32.

    Partial results are rows: first those of the spans, then those of the decode spans' items, M in all, then one for
    each of the step's tokens (M + t is the causal part of token t; only tokens of rows with several have one).
    """

    tokens: IntArray  # [M], the token that each partial row belongs to
    span_indptr: IntArray  # [B + 1], partial rows of each span, from 0 on
    key_starts: IntArray  # [B], slot of each span's first key
    num_keys: IntArray  # [B], at least 1
    items: IntArray  # [N, 4] of the decode spans, see `Lanes`
    lane_indptr: IntArray  # [L + 1]
    causal_indptr: IntArray  # [C + 1], tokens of each causal stretch, from 0 to at most T
    causal_lens: IntArray  # [C], keys of each: all its tokens, or 0 where rows of one token lie between
    private_starts: IntArray  # [T], slot of the first key that a token of a one-token row sees beside spans
    private_lens: IntArray  # [T], how many, consecutive; 0 where there are none
    merge_indptr: IntArray  # [T + 1]
    merge_rows: IntArray  # [M + number of causal tokens], each token's partial rows side by side

    @property
    def num_partials(self) -> int:
        return len(self.tokens)

    @property
    def num_span_partials(self) -> int:
        return int(self.span_indptr[-1])


class Span(NamedTuple):
    tokens: IntArray
    key_start: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class Split:
    """How spans are shared out and cut."""

    segment_tokens: SegmentTokens
    max_decode_tokens: int = 0  # one-token rows of a decode span at most
    num_lanes: int = 1


def max_partials(num_tokens: int) -> int:
    """Partial results of spans that a step of so many tokens has at most, see `plan_spans`."""
    return max(LEAST_PARTIALS, PARTIALS_PER_TOKEN * num_tokens)


def plan_spans(step: StepPlan, page_size: int, split: Split) -> SpanPlan | None:
    """The spans of a step. Groups and rows are as `StepPlan` has them.

    None: page tables lie in so many pieces that there would be more partial results than `max_partials`.
    """
    lengths = np.array([len(row.token_ids) for row in step.rows], np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    private, private_starts, private_lens = _private(step, page_size, ends)
    spans, decode_spans = _parted([*_shared(step, page_size, ends), *private], lengths, split.max_decode_tokens)
    spans = _cut(spans, split.segment_tokens([(len(span.tokens), span.num_keys) for span in spans]) if spans else 0)
    span_indptr = _indptr([len(span.tokens) for span in spans])
    num_partials = int(span_indptr[-1]) + sum(len(span.tokens) for span in decode_spans)  # lanes meet: a few more
    if num_partials > max_partials(int(lengths.sum())):
        return None
    lanes = _dealt(decode_spans, split.num_lanes, int(span_indptr[-1]))
    tokens = [*(span.tokens for span in spans), *(decode_spans[index].tokens for index in lanes.spans)]
    all_tokens = np.concatenate([np.empty(0, np.int32), *tokens])
    causal_indptr, causal_lens = _causal(lengths, ends)
    causal_tokens = np.flatnonzero(np.repeat(lengths > 1, lengths)).astype(np.int32)
    merge_indptr, merge_rows = _merge_lists(all_tokens, causal_tokens, int(lengths.sum()))
    return SpanPlan(
        tokens=all_tokens,
        span_indptr=span_indptr,
        key_starts=np.array([span.key_start for span in spans], np.int32),
        num_keys=np.array([span.num_keys for span in spans], np.int32),
        items=lanes.items,
        lane_indptr=lanes.indptr,
        causal_indptr=causal_indptr,
        causal_lens=causal_lens,
        private_starts=private_starts,
        private_lens=private_lens,
        merge_indptr=merge_indptr,
        merge_rows=merge_rows,
    )


def token_slots(step: StepPlan, page_size: int) -> IntArray:
    """Where each of the step's tokens stores its key and value, [T] int32."""
    slots = [_row_slots(row.page_table, row.num_computed_tokens, row.seq_len, page_size) for row in step.rows]
    return np.concatenate([np.empty(0, np.int32), *slots])


def _row_slots(page_table: IntArray, start: int, stop: int, page_size: int) -> IntArray:
    if stop - start == 1:
        return page_table[start // page_size : start // page_size + 1] * page_size + start % page_size
    positions = np.arange(start, stop, dtype=np.int32)
    slots: IntArray = page_table[positions // page_size] * page_size + positions % page_size
    return slots


def _shared(step: StepPlan, page_size: int, ends: IntArray) -> Iterator[Span]:
    for group in step.groups:
        rows = [step.rows[i] for i in group.rows]
        tokens = np.concatenate(
            [
                np.arange(ends[i] - len(row.token_ids), ends[i], dtype=np.int32)
                for i, row in zip(group.rows, rows, strict=True)
            ]
        )
        pages = rows[0].page_table[group.first_page : group.first_page + group.num_pages]
        yield from _runs(tokens, pages, group.num_pages * page_size, page_size)


def _private(step: StepPlan, page_size: int, ends: IntArray) -> tuple[list[Span], IntArray, IntArray]:
    """Spans of the rows' private parts; and where the short ones of one-token rows begin, and their lengths, [T]."""
    first_pages = [0] * len(step.rows)
    for group in step.groups:
        for i in group.rows:
            first_pages[i] = max(first_pages[i], group.first_page + group.num_pages)
    spans: list[Span] = []
    starts, lens = np.zeros((2, step.num_tokens), np.int32)
    for row, first_page, end in zip(step.rows, first_pages, ends.tolist(), strict=True):
        num_tokens = len(row.token_ids)
        num_seen = row.seq_len if num_tokens == 1 else row.num_computed_tokens
        num_keys = num_seen - first_page * page_size
        if num_keys:
            pages = row.page_table[first_page : first_page + -(-num_keys // page_size)]
            runs = list(_runs(np.arange(end - num_tokens, end, dtype=np.int32), pages, num_keys, page_size))
            if num_tokens == 1 and len(runs) == 1 and num_keys <= MAX_PRIVATE_KEYS:
                starts[end - 1], lens[end - 1] = runs[0].key_start, num_keys
            else:
                spans += runs
    return spans, starts, lens


def _runs(tokens: IntArray, pages: IntArray, num_keys: int, page_size: int) -> Iterator[Span]:
    """One span for each run of consecutive pages; the last page may be filled in part."""
    if int(pages[-1]) - int(pages[0]) == len(pages) - 1 and (len(pages) < 3 or bool((np.diff(pages) == 1).all())):
        yield Span(tokens, int(pages[0]) * page_size, num_keys)
        return
    edges = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    for first, last in pairwise(edges):
        yield Span(tokens, int(pages[first]) * page_size, min(last * page_size, num_keys) - first * page_size)


def _parted(spans: list[Span], lengths: IntArray, max_decode_tokens: int) -> tuple[list[Span], list[Span]]:
    """Spans that stay such, and decode spans."""
    is_decode = np.repeat(lengths == 1, lengths)
    few = [len(span.tokens) <= max_decode_tokens and bool(is_decode[span.tokens].all()) for span in spans]
    decode_spans = [span for span, is_few in zip(spans, few, strict=True) if is_few]
    return [span for span, is_few in zip(spans, few, strict=True) if not is_few], decode_spans


def _dealt(spans: list[Span], num_lanes: int, first_partial: int) -> Lanes:
    num_rows = np.array([len(span.tokens) for span in spans], np.int32)
    key_starts = np.array([span.key_start for span in spans], np.int32)
    num_keys = np.array([span.num_keys for span in spans], np.int32)
    return deal(num_rows, key_starts, num_keys, num_lanes, first_partial)


def _cut(spans: list[Span], segment: int) -> list[Span]:
    return [
        Span(span.tokens, span.key_start + at, min(segment, span.num_keys - at))
        for span in spans
        for at in range(0, span.num_keys, segment)
    ]


def _causal(lengths: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Stretches of tokens: a row of several, or all rows of one token between two such rows as one without keys."""
    indptr, lens = [0], []
    for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
        if length > 1:
            if end - length > indptr[-1]:
                indptr.append(end - length)
                lens.append(0)
            indptr.append(end)
            lens.append(length)
    return np.array(indptr, np.int32), np.array(lens, np.int32)


def _merge_lists(tokens: IntArray, causal_tokens: IntArray, num_tokens: int) -> tuple[IntArray, IntArray]:
    owners = np.concatenate([tokens, causal_tokens])
    rows = np.concatenate([np.arange(len(tokens), dtype=np.int32), causal_tokens + np.int32(len(tokens))])
    return _indptr(np.bincount(owners, minlength=num_tokens)), rows[np.argsort(owners, kind="stable")]


def _indptr(counts: Sequence[int] | np.ndarray) -> IntArray:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
