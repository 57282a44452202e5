"""Attention of few rows over long spans of keys on CUDA, in Triton: bound by reading keys and values once.

A decode step's tokens that share a prefix see the same keys, so their query heads of one kv head are the rows of one
small matrix, folded as in `state_kernels`. 16 to 64 of them do not fill the tile of a prefill kernel, which computes
two to eight times as much as there is, and lowers the clock by the power that this takes. Here a tile has as many rows
as there are, and what is left is to keep memory busy. Spans are cut into items and these dealt to a fixed number of
lanes (`attention.lanes`). A lane is one program for each kv head: neighbouring programs read heads of the same keys,
which lie side by side in memory.

As in `kernels`, a function is one launch, sums in float32 and can be captured by a CUDA graph: which items there are is
read from the device.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch

from p99lab.engine.needs_triton import tl, triton

BLOCK_ROWS = (16, 32, 64)
TAIL_KEYS = 16  # at a time, of what fills no block: the least that tensor cores take, and few registers


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program reads: `block_keys` keys at a time, `num_stages` of such blocks on their way or in use.

    Blocks come by asynchronous copies of 16 bytes.
    """

    block_keys: int
    num_stages: int
    num_warps: int


def attend_decode_spans(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tokens: torch.Tensor,
    items: torch.Tensor,
    lane_indptr: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    block_rows: int,
    tiling: Tiling,
) -> None:
    """Partial results of tokens over spans of consecutive slots that they see whole.

    Args:
        q: [T, q_heads, dim] in bf16 or fp16, dim a power of two >= 16.
        k_pool, v_pool: [num_slots, kv_heads, dim], q_heads a multiple of kv_heads.
        tokens: [M] int32, the token of each partial row.
        items: [N, 4] int32: first partial row, number of rows, first slot, number of keys. There are keys, and rows
            times gqa_ratio are at most block_rows, gqa_ratio being q_heads / kv_heads.
        lane_indptr: [L + 1] int32. Lane i has the items from lane_indptr[i] to lane_indptr[i + 1]; others are not read.
        out: [M * gqa_ratio, kv_heads, dim], folded as `state_kernels.gather_folded` folds queries. Rows of no item
            stay.
        lse: [M * gqa_ratio, kv_heads] float32, in base 2.
        scale: of scores, positive; another value compiles another kernel.
        block_rows: rows of the tile, one of BLOCK_ROWS.
        tiling: how keys and values are read.
    """
    _, num_q, dim = q.shape
    num_kv = k_pool.shape[1]
    assert all(tensor.is_contiguous() for tensor in (q, k_pool, v_pool, items, out, lse))
    assert q.dtype == k_pool.dtype == v_pool.dtype
    assert out.shape[1:] == k_pool.shape[1:] == v_pool.shape[1:]
    assert lse.shape == out.shape[:2]
    assert items.shape[1] == 4
    assert block_rows in BLOCK_ROWS
    assert scale > 0
    sizes = (num_kv, num_q // num_kv, dim, block_rows, tiling.block_keys, TAIL_KEYS)
    _attend_decode_spans[((len(lane_indptr) - 1) * num_kv,)](
        q, k_pool, v_pool, tokens, items, lane_indptr, out, lse, scale, *sizes,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["tokens", "items", "lane_indptr", "lse"])
def _attend_decode_spans(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    tokens: tl.tensor,
    items: tl.tensor,
    lane_indptr: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale: tl.constexpr,
    num_kv: tl.constexpr,
    gqa_ratio: tl.constexpr,
    dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    tail_keys: tl.constexpr,
) -> None:
    """One program a kv head of a lane. Its state is that of `state_kernels`."""
    log2_scale: tl.constexpr = scale * 1.4426950408889634  # log2(e)
    slot_stride: tl.constexpr = num_kv * dim
    lane, head = tl.program_id(0) // num_kv, tl.program_id(0) % num_kv
    row, dims = tl.arange(0, block_rows), tl.arange(0, dim)[None, :]
    in_block, in_tail = tl.arange(0, block_keys)[:, None], tl.arange(0, tail_keys)[:, None]
    index, end = tl.load(lane_indptr + lane), tl.load(lane_indptr + lane + 1)
    while index < end:
        item = items + index * 4
        first_row, num_rows = tl.load(item), tl.load(item + 1)
        start, num_keys = tl.load(item + 2), tl.load(item + 3)
        here = row < num_rows * gqa_ratio
        token = tl.load(tokens + first_row + row // gqa_ratio, mask=here, other=0).to(tl.int64)
        query = (token * num_kv + head) * gqa_ratio + row % gqa_ratio
        queries = tl.load(q + query[:, None] * dim + dims, mask=here[:, None], other=0.0)
        m_i = tl.full([block_rows], float("-inf"), tl.float32)
        l_i = tl.zeros([block_rows], tl.float32)
        acc = tl.zeros([block_rows, dim], tl.float32)
        whole = num_keys // block_keys * block_keys
        for at in range(0, whole, block_keys):
            block = (start + at).to(tl.int64) * slot_stride + head * dim + in_block * slot_stride + dims
            some_k, some_v = tl.load(k_pool + block), tl.load(v_pool + block)
            scores = tl.dot(queries, some_k.T, input_precision="ieee")  # [block_rows, block_keys]
            m_i, l_i, acc = _with_more(m_i, l_i, acc, scores, some_v, log2_scale)
        for at in range(whole, num_keys, tail_keys):
            seen = at + in_tail < num_keys
            block = (start + at).to(tl.int64) * slot_stride + head * dim + in_tail * slot_stride + dims
            some_k = tl.load(k_pool + block, mask=seen, other=0.0)
            some_v = tl.load(v_pool + block, mask=seen, other=0.0)
            scores = tl.dot(queries, some_k.T, input_precision="ieee")
            scores = tl.where(seen.T, scores, float("-inf"))
            m_i, l_i, acc = _with_more(m_i, l_i, acc, scores, some_v, log2_scale)
        place = ((first_row * gqa_ratio + row).to(tl.int64) * num_kv) + head
        tl.store(lse + place, m_i + tl.log2(l_i), mask=here)
        acc /= l_i[:, None]
        tl.store(out + place[:, None] * dim + dims, acc.to(out.dtype.element_ty), mask=here[:, None])
        index += 1


@triton.jit
def _with_more(
    m_i: tl.tensor,
    l_i: tl.tensor,
    acc: tl.tensor,
    scores: tl.tensor,
    values: tl.tensor,
    log2_scale: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state with more keys, whose unscaled scores [rows, keys] and values [keys, dim] these are."""
    m_new = tl.maximum(m_i, tl.max(scores, axis=1) * log2_scale)
    kept, weights = tl.exp2(m_i - m_new), tl.exp2(scores * log2_scale - m_new[:, None])
    l_i = l_i * kept + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * kept[:, None], input_precision="ieee")
    return m_new, l_i, acc
