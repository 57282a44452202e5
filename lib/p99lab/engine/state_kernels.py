"""Attention states in Triton: queries folded for the shared level, and partial results merged by log-sum-exp.

A query's attention over a long range of keys is computed in parts: the prefix that its group shares, perhaps cut into
segments, and what is private. A part's result is its output and its log-sum-exp; from all of them follows the attention
over all keys, exactly (see `attention.softmax`). Short private parts are computed where the others are merged. As in
`kernels`, a function is one launch, sums in float32 and can be captured by a CUDA graph; tensors are contiguous.

What a kernel keeps while it goes through keys is FlashAttention's (arXiv 2205.14135): `m_i`, the largest logarithm of a
weight so far, here to base 2; and relative to it `l_i`, the sum of the weights, and `acc`, that of the weighted values.

A shared prefix needs no causal mask, so all query heads of a kv head see the same keys. *Folded* means that they stand
as rows below each other: query head h * gqa_ratio + g of row m is head h of row m * gqa_ratio + g, where gqa_ratio is
q_heads / kv_heads. Attention is then one with kv_heads heads and reads a key once for all of them.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch

from p99lab.engine.kernels import heads_of_a_program
from p99lab.engine.needs_triton import tl, triton

KEYS_AT_ONCE = 32
STAGES = 4  # three blocks of keys are on their way at a time; with 48 KiB of them four programs fit a multiprocessor
FEW_ROWS = 4  # partial rows at a time of a token that has no more
MANY_ROWS = 16  # of any other: all loads of the usual ones are on their way together
TILE_ELEMENTS = 8192  # of a block of partial rows: 64 a thread


def gather_folded(
    q: torch.Tensor, rows: torch.Tensor, num_kv_heads: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out[m * gqa_ratio + g, h] = q[rows[m], h * gqa_ratio + g]: the queries of the shared level, folded.

    Args:
        q: [T, q_heads, dim], q_heads a multiple of num_kv_heads, dim a power of two >= 16.
        rows: [M] int32 or int64, tokens in any order, also repeated; a negative one leaves its rows of out as they are.
        out: [M * gqa_ratio, kv_heads, dim].

    Returns:
        `out`, or a new tensor of q's dtype.
    """
    _, num_q, dim = q.shape
    num_rows, gqa_ratio = len(rows), num_q // num_kv_heads
    assert q.is_contiguous()
    out = q.new_empty(num_rows * gqa_ratio, num_kv_heads, dim) if out is None else out
    if num_rows:
        block = heads_of_a_program(dim)
        _gather_folded[num_rows, -(-num_q // block)](q, rows, out, num_q, gqa_ratio, dim, block, num_warps=4)
    return out


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _gather_folded(
    q: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    num_q: tl.constexpr,
    gqa_ratio: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program a block of query heads of one row."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.load(rows + index).to(tl.int64)
    heads = tl.program_id(1) * block + tl.arange(0, block)[:, None]
    dims = tl.arange(0, dim)[None, :]
    inside = (heads < num_q) & (token >= 0)
    queries = tl.load(q + token * (num_q * dim) + heads * dim + dims, mask=inside)
    folded = _folded(heads, num_q, gqa_ratio)
    tl.store(out + index * (num_q * dim) + folded * dim + dims, queries, mask=inside)


def finish_states(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    private_starts: torch.Tensor,
    private_lens: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    causal_out: torch.Tensor,
    causal_lse: torch.Tensor,
    merge_indptr: torch.Tensor,
    merge_rows: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every token over all its keys: over its private ones here, merged with partial results over others.

    Of the rows listed, those below M0 are rows of `partial`, the others row - M0 of `causal`. One whose lse is -inf has
    seen no key and counts for nothing, whatever its out holds; a token that has neither keys nor rows gets zeros.

    Both lse are in base 2, as FlashInfer gives them: natural logarithms would give plausible, wrong output (flashinfer
    issue 2113). Scores and sums are float32; weights of private values are rounded to their dtype, as in FA3. With
    float32 that product leaves the tensor cores and is slow.

    Args:
        q: [T, q_heads, dim], dim a power of two >= 16.
        k_pool, v_pool: [num_slots, kv_heads, dim], q_heads a multiple of kv_heads.
        private_starts, private_lens: [T] int32 or int64. Token t sees the private_lens[t] slots from private_starts[t]
            on; 0: none, wherever they start. Any length is right, a few hundred at most are fast.
        partial_out: [M0 * gqa_ratio, kv_heads, dim], folded as `gather_folded` folds queries; M0 may be 0.
        partial_lse: [M0 * gqa_ratio, kv_heads] float32.
        causal_out: [rows, q_heads, dim]; rows may be 0.
        causal_lse: [rows, q_heads] float32.
        merge_indptr: [T + 1] int32 or int64.
        merge_rows: int32 or int64. Token t has the rows merge_rows[merge_indptr[t] : merge_indptr[t + 1]], in
            any order. What lies beyond merge_indptr[T] is not read.
        scale: of scores, dim ** -0.5 as a rule; another value compiles another kernel.
        out: [T, q_heads, dim].

    Returns:
        `out`, or a new tensor like q.
    """
    num_tokens, num_q, dim = q.shape
    num_kv = k_pool.shape[1]
    gqa_ratio = num_q // num_kv
    assert all(tensor.is_contiguous() for tensor in (q, k_pool, v_pool, partial_out, causal_out))
    assert q.dtype == k_pool.dtype == v_pool.dtype
    assert partial_out.dtype == causal_out.dtype
    assert partial_out.shape[1:] == k_pool.shape[1:] == v_pool.shape[1:]
    assert partial_lse.shape == partial_out.shape[:2]
    assert causal_lse.shape == causal_out.shape[:2]
    out = torch.empty_like(q) if out is None else out
    if num_tokens:
        padded = triton.next_power_of_2(gqa_ratio)
        many = max(FEW_ROWS, min(MANY_ROWS, TILE_ELEMENTS // (padded * dim)))
        private = (k_pool, v_pool, private_starts, private_lens)
        partials = (partial_out, partial_lse, causal_out, causal_lse, len(partial_out) // gqa_ratio)
        sizes = (num_kv, gqa_ratio, padded, dim, KEYS_AT_ONCE, FEW_ROWS, many)
        _finish_states[(num_tokens * num_kv,)](
            q, *private, *partials, merge_indptr, merge_rows, out, scale, *sizes, num_warps=4, num_stages=STAGES
        )
    return out


@triton.jit(
    do_not_specialize=["num_partials"],
    do_not_specialize_on_alignment=["private_starts", "private_lens", "merge_indptr", "merge_rows"],
)
def _finish_states(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    private_starts: tl.tensor,
    private_lens: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    causal_out: tl.tensor,
    causal_lse: tl.tensor,
    num_partials: int,
    merge_indptr: tl.tensor,
    merge_rows: tl.tensor,
    out: tl.tensor,
    scale: tl.constexpr,
    num_kv: tl.constexpr,
    gqa_ratio: tl.constexpr,
    padded: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    few: tl.constexpr,
    many: tl.constexpr,
) -> None:
    """One program a kv head of a token, with the query heads that are folded for it."""
    token = (tl.program_id(0) // num_kv).to(tl.int64)
    kv_head = tl.program_id(0) % num_kv
    start, num_keys = tl.load(private_starts + token).to(tl.int64), tl.load(private_lens + token)
    index, end = tl.load(merge_indptr + token), tl.load(merge_indptr + token + 1)
    heads = tl.arange(0, padded)[:, None]
    own = (token * num_kv + kv_head) * (gqa_ratio * dim) + heads * dim + tl.arange(0, dim)[None, :]
    m_i = tl.full([padded], float("-inf"), tl.float32)
    l_i = tl.zeros([padded], tl.float32)
    acc = tl.zeros([padded, dim], tl.float32)
    if num_keys > 0:
        queries = tl.load(q + own, mask=heads < gqa_ratio, other=0.0)
        at = (start * num_kv + kv_head) * dim
        log2_scale: tl.constexpr = scale * 1.4426950408889634  # log2(e)
        m_i, l_i, acc = _attended(queries, k_pool + at, v_pool + at, num_keys, log2_scale, num_kv * dim, block)
    while index < end:
        rows, left = merge_rows + index, end - index
        partial, causal = (partial_out, partial_lse, num_partials), (causal_out, causal_lse)
        if left <= few:
            m_i, l_i, acc = _merged(m_i, l_i, acc, rows, left, partial, causal, kv_head, num_kv, gqa_ratio, few)
        else:
            m_i, l_i, acc = _merged(m_i, l_i, acc, rows, left, partial, causal, kv_head, num_kv, gqa_ratio, many)
        index += many
    acc /= tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    tl.store(out + own, acc.to(out.dtype.element_ty), mask=heads < gqa_ratio)


@triton.jit
def _attended(
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    num_keys: tl.tensor,
    log2_scale: tl.constexpr,
    stride: tl.constexpr,
    block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state of `queries` [heads, dim] over at least one key; the next one's elements begin `stride` further."""
    num_heads: tl.constexpr = queries.shape[0]
    dim: tl.constexpr = queries.shape[1]
    m_i = tl.full([num_heads], float("-inf"), tl.float32)
    l_i = tl.zeros([num_heads, block], tl.float32)  # summed once at the end: a sum over keys crosses warps
    acc = tl.zeros([num_heads, dim], tl.float32)
    for first in range(0, num_keys, block):
        keys = first + tl.arange(0, block)
        seen = keys < num_keys
        at = keys.to(tl.int64)[:, None] * stride + tl.arange(0, dim)[None, :]
        some_k = tl.load(k + at, mask=seen[:, None], other=0.0)
        some_v = tl.load(v + at, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(some_k), input_precision="ieee") * log2_scale  # [heads, block]
        scores = tl.where(seen[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, axis=1))
        kept, weights = tl.exp2(m_i - m_new)[:, None], tl.exp2(scores - m_new[:, None])
        l_i = l_i * kept + weights
        acc = tl.dot(weights.to(some_v.dtype), some_v, acc * kept, input_precision="ieee")
        m_i = m_new
    return m_i, tl.sum(l_i, axis=1), acc


@triton.jit
def _merged(
    m_i: tl.tensor,
    l_i: tl.tensor,
    acc: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    partial: tl.tuple,
    causal: tl.tuple,
    kv_head: tl.tensor,
    num_kv: tl.constexpr,
    gqa_ratio: tl.constexpr,
    block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state, and with it up to `block` partial rows of the `num_rows` listed at `rows`."""
    partial_out, partial_lse, num_partials = partial
    causal_out, causal_lse = causal
    padded: tl.constexpr = acc.shape[0]
    dim: tl.constexpr = acc.shape[1]
    heads, each = tl.arange(0, padded)[:, None], tl.arange(0, block)[None, :]
    inside = (heads < gqa_ratio) & (each < num_rows)
    row = tl.load(rows + each, mask=each < num_rows, other=0)
    is_partial = row < num_partials
    head = tl.where(is_partial, heads * num_kv + kv_head, kv_head * gqa_ratio + heads)  # folded, or not
    at = tl.where(is_partial, row, row - num_partials).to(tl.int64) * (num_kv * gqa_ratio) + head  # [padded, block]
    lse = tl.load(tl.where(is_partial, partial_lse, causal_lse) + at, mask=inside, other=float("-inf"))
    places = tl.where(is_partial[:, :, None], partial_out, causal_out) + at[:, :, None] * dim
    parts = tl.load(places + tl.arange(0, dim)[None, None, :], mask=inside[:, :, None], other=0.0).to(tl.float32)
    m_new = tl.maximum(m_i, tl.max(lse, axis=1))
    origin = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is nan
    kept, weights = tl.exp2(m_i - origin), tl.exp2(lse - origin[:, None])
    parts = tl.where((lse == float("-inf"))[:, :, None], 0.0, parts)
    acc = acc * kept[:, None] + tl.sum(weights[:, :, None] * parts, axis=1)
    return m_new, l_i * kept + tl.sum(weights, axis=1), acc


def merge_states(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    causal_out: torch.Tensor,
    causal_lse: torch.Tensor,
    merge_indptr: torch.Tensor,
    merge_rows: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`finish_states` where no token has private keys: a third of its time for the thousands of tokens of a prompt."""
    num_tokens, (_, num_q, dim) = len(merge_indptr) - 1, causal_out.shape
    gqa_ratio = num_q // partial_out.shape[1]
    assert partial_out.is_contiguous()
    assert causal_out.is_contiguous()
    assert partial_lse.shape == partial_out.shape[:2]
    assert causal_lse.shape == causal_out.shape[:2]
    out = causal_out.new_empty(num_tokens, num_q, dim) if out is None else out
    if num_tokens:
        block = heads_of_a_program(dim)
        partials = (partial_out, partial_lse, causal_out, causal_lse, len(partial_out) // gqa_ratio)
        sizes = (num_q, gqa_ratio, dim, block)
        grid = (num_tokens, -(-num_q // block))
        _merge_states[grid](*partials, merge_indptr, merge_rows, out, *sizes, num_warps=4)
    return out


@triton.jit(do_not_specialize=["num_partials"], do_not_specialize_on_alignment=["merge_indptr", "merge_rows"])
def _merge_states(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    causal_out: tl.tensor,
    causal_lse: tl.tensor,
    num_partials: int,
    merge_indptr: tl.tensor,
    merge_rows: tl.tensor,
    out: tl.tensor,
    num_q: tl.constexpr,
    gqa_ratio: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program a block of query heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * block + tl.arange(0, block)
    dims = tl.arange(0, dim)[None, :]
    inside = heads < num_q
    folded = _folded(heads, num_q, gqa_ratio)
    m_i = tl.full([block], float("-inf"), tl.float32)
    l_i = tl.zeros([block], tl.float32)
    acc = tl.zeros([block, dim], tl.float32)
    index, end = tl.load(merge_indptr + token), tl.load(merge_indptr + token + 1)
    while index < end:
        row = tl.load(merge_rows + index).to(tl.int64)
        if row < num_partials:
            at = row * num_q + folded
            lse = tl.load(partial_lse + at, mask=inside, other=0.0)
            part = tl.load(partial_out + at[:, None] * dim + dims, mask=inside[:, None], other=0.0).to(tl.float32)
        else:
            at = (row - num_partials) * num_q + heads
            lse = tl.load(causal_lse + at, mask=inside, other=0.0)
            part = tl.load(causal_out + at[:, None] * dim + dims, mask=inside[:, None], other=0.0).to(tl.float32)
        empty = lse == float("-inf")
        m_new = tl.maximum(m_i, lse)
        origin = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is nan
        kept, weight = tl.exp2(m_i - origin), tl.exp2(lse - origin)
        l_i = l_i * kept + weight
        acc = acc * kept[:, None] + weight[:, None] * tl.where(empty[:, None], 0.0, part)
        m_i = m_new
        index += 1
    acc /= tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    target = out + token * (num_q * dim) + heads[:, None] * dim + dims
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _folded(heads: tl.tensor, num_q: tl.constexpr, gqa_ratio: tl.constexpr) -> tl.tensor:
    """Where query heads of a row stand among the q_heads heads of its folded rows; the same place if gqa_ratio is 1."""
    return heads % gqa_ratio * (num_q // gqa_ratio) + heads // gqa_ratio
