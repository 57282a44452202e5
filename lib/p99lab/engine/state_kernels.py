"""Attention states in Triton: queries folded for the shared level, and partial results merged by log-sum-exp.

A query's attention over a long range of keys is computed in parts: the prefix that its group shares, perhaps cut into
segments, and what is private. A part's result is its output and its log-sum-exp; from all of them follows the attention
over all keys, exactly (see `attention.softmax`). As in `kernels`, a function is one launch, computes in float32 and can
be captured by a CUDA graph; tensors are contiguous.

A shared prefix needs no causal mask, so all query heads of a kv head see the same keys. *Folded* means that they stand
as rows below each other: query head h * group + g of row m is head h of row m * group + g, where group is
q_heads / kv_heads. Attention is then one with kv_heads heads and reads a key once for the whole group.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch

from p99lab.engine.kernels import heads_of_a_program
from p99lab.engine.needs_triton import tl, triton


def gather_folded(
    q: torch.Tensor, rows: torch.Tensor, num_kv_heads: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out[m * group + g, h] = q[rows[m], h * group + g]: the queries of the shared level, folded.

    Args:
        q: [T, q_heads, dim], q_heads a multiple of num_kv_heads, dim a power of two >= 16.
        rows: [M] int32 or int64, tokens in any order, also repeated; a negative one leaves its rows of out as they are.
        out: [M * group, kv_heads, dim].

    Returns:
        `out`, or a new tensor of q's dtype.
    """
    _, num_q, dim = q.shape
    num_rows, group = len(rows), num_q // num_kv_heads
    assert q.is_contiguous()
    out = q.new_empty(num_rows * group, num_kv_heads, dim) if out is None else out
    if num_rows:
        block = heads_of_a_program(dim)
        _gather_folded[num_rows, -(-num_q // block)](q, rows, out, num_q, group, dim, block, num_warps=4)
    return out


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _gather_folded(
    q: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    num_q: tl.constexpr,
    group: tl.constexpr,
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
    folded = _folded(heads, num_q, group)
    tl.store(out + index * (num_q * dim) + folded * dim + dims, queries, mask=inside)


def merge_states(
    shared_out: torch.Tensor,
    shared_lse: torch.Tensor,
    private_out: torch.Tensor,
    private_lse: torch.Tensor,
    segment_indptr: torch.Tensor,
    segment_rows: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    base2: bool,
    folded: bool,
) -> torch.Tensor:
    """Attention of every token over all its keys, from partial results over disjoint ranges of them.

    A partial row is `shared` below the number M0 of shared rows, else row - M0 of `private`. One whose lse is -inf has
    seen no key and counts for nothing, whatever its out holds; a token with no other, or with none at all, gets zeros.

    FlashInfer's lse is in base 2, torch's is a natural logarithm: the wrong `base2` gives plausible, wrong output
    (flashinfer issue 2113).

    Args:
        shared_out: [M0, q_heads, dim], or folded [M0 * group, kv_heads, dim]; M0 may be 0.
        shared_lse: float32, like shared_out without dim.
        private_out: [rows, q_heads, dim], dim a power of two >= 16.
        private_lse: [rows, q_heads] float32.
        segment_indptr: [T + 1] int32 or int64.
        segment_rows: int32 or int64. Token t has the rows segment_rows[segment_indptr[t] : segment_indptr[t + 1]], in
            any order. What lies beyond segment_indptr[T] is not read.
        out: [T, q_heads, dim].
        base2: whether both lse are logarithms to base 2, as against natural.
        folded: whether shared_out and shared_lse are folded, as `gather_folded` folds queries.

    Returns:
        `out`, or a new tensor of private_out's dtype.
    """
    num_tokens, (_, num_q, dim) = len(segment_indptr) - 1, private_out.shape
    group = num_q // shared_out.shape[1] if folded else 1
    assert shared_out.is_contiguous()
    assert private_out.is_contiguous()
    assert shared_lse.shape == shared_out.shape[:2]
    assert private_lse.shape == private_out.shape[:2]
    out = private_out.new_empty(num_tokens, num_q, dim) if out is None else out
    if num_tokens:
        block = heads_of_a_program(dim)
        partials = (shared_out, shared_lse, private_out, private_lse, len(shared_out) // group)
        sizes = (num_q, group, dim, block)
        grid = (num_tokens, -(-num_q // block))
        _merge_states[grid](*partials, segment_indptr, segment_rows, out, base2, *sizes, num_warps=4)
    return out


@triton.jit(do_not_specialize=["num_shared"], do_not_specialize_on_alignment=["segment_indptr", "segment_rows"])
def _merge_states(
    shared_out: tl.tensor,
    shared_lse: tl.tensor,
    private_out: tl.tensor,
    private_lse: tl.tensor,
    num_shared: int,
    segment_indptr: tl.tensor,
    segment_rows: tl.tensor,
    out: tl.tensor,
    base2: tl.constexpr,
    num_q: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program a block of query heads of one token; `peak` is the largest lse so far, what is summed is relative."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * block + tl.arange(0, block)
    dims = tl.arange(0, dim)[None, :]
    inside = heads < num_q
    folded = _folded(heads, num_q, group)
    peak = tl.full([block], float("-inf"), tl.float32)
    total = tl.zeros([block], tl.float32)
    merged = tl.zeros([block, dim], tl.float32)
    index, end = tl.load(segment_indptr + token), tl.load(segment_indptr + token + 1)
    while index < end:
        row = tl.load(segment_rows + index).to(tl.int64)
        if row < num_shared:
            at = row * num_q + folded
            lse = tl.load(shared_lse + at, mask=inside, other=0.0)
            part = tl.load(shared_out + at[:, None] * dim + dims, mask=inside[:, None], other=0.0).to(tl.float32)
        else:
            at = (row - num_shared) * num_q + heads
            lse = tl.load(private_lse + at, mask=inside, other=0.0)
            part = tl.load(private_out + at[:, None] * dim + dims, mask=inside[:, None], other=0.0).to(tl.float32)
        if not base2:
            lse *= 1.4426950408889634  # log2(e)
        empty = lse == float("-inf")
        higher = tl.maximum(peak, lse)
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is nan
        kept, weight = tl.exp2(peak - origin), tl.exp2(lse - origin)
        total = total * kept + weight
        merged = merged * kept[:, None] + weight[:, None] * tl.where(empty[:, None], 0.0, part)
        peak = higher
        index += 1
    merged /= tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + token * (num_q * dim) + heads[:, None] * dim + dims
    tl.store(target, merged.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _folded(heads: tl.tensor, num_q: tl.constexpr, group: tl.constexpr) -> tl.tensor:
    """Where query heads of a row stand among the q_heads heads of its folded rows; the same place if group is 1."""
    return heads % group * (num_q // group) + heads // group
