"""Attention of few rows over long runs of keys on CUDA, in Triton: bound by reading the keys and values once.

A decode step's tokens that share a prefix see the same keys, so their query heads of one kv head are rows of one small
matrix, folded as in `state_kernels`. 16 to 64 such rows fill no tile of a prefill kernel, which would compute up to
eight times as much as there is, and slow the clock with it. Here a tile has as many rows as there are: what is left is
to keep memory busy. Runs are cut into items (flash-decoding), and a fixed number of programs go through the items of
all kv heads, neighbours through the heads of the same keys, whose rows lie side by side in memory.

As in `kernels`, a function is one launch, sums in float32 and can be captured by a CUDA graph.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch

from p99lab.engine.needs_triton import tl, triton

BLOCK_ROWS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a program reads: `block_keys` keys at a time, `num_stages` of such blocks on their way or in use.

    With `bulk`, by the tensor memory accelerator, otherwise by 16-byte asynchronous copies.
    """

    block_keys: int
    num_stages: int
    num_warps: int
    bulk: bool


def attend_runs(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tokens: torch.Tensor,
    items: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    block_rows: int,
    num_programs: int,
    pipeline: Pipeline,
) -> None:
    """Partial results of tokens over runs of consecutive slots that they see whole.

    Args:
        q: [T, q_heads, dim] in bf16 or fp16, dim a power of two >= 16.
        k_pool, v_pool: [num_slots, kv_heads, dim], q_heads a multiple of kv_heads.
        tokens: [M] int32, the token of each partial row.
        items: [N, 4] int32: first partial row, number of rows, first slot, number of keys. Rows times
            q_heads / kv_heads are at most block_rows. The first item without keys ends the list.
        out: [M * group, kv_heads, dim], folded as `state_kernels.gather_folded` folds queries.
        lse: [M * group, kv_heads] float32, in base 2.
        scale: of scores, positive; another value compiles another kernel.
        block_rows: rows of the tile, one of BLOCK_ROWS.
        num_programs: that run side by side; an item of a kv head is one program's.
        pipeline: how they read.
    """
    num_q, dim = q.shape[1:]
    num_slots, num_kv, _ = k_pool.shape
    assert all(tensor.is_contiguous() for tensor in (q, k_pool, v_pool, items, out, lse))
    assert block_rows in BLOCK_ROWS
    assert scale > 0
    descriptors = [None, None]
    if pipeline.bulk:
        from triton.tools.tensor_descriptor import TensorDescriptor

        shape, strides = [num_slots, num_kv * dim], [num_kv * dim, 1]
        block = [pipeline.block_keys, dim]
        descriptors = [
            TensorDescriptor(x, shape, strides, block) for x in (k_pool, v_pool)
        ]
    sizes = (num_kv, num_q // num_kv, dim, block_rows, pipeline.block_keys)
    _attend_runs[num_programs,](
        q, k_pool, v_pool, *descriptors, tokens, items, out, lse, len(items) * num_kv, scale, *sizes,
        num_warps=pipeline.num_warps, num_stages=pipeline.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["tokens", "items", "lse"])
def _attend_runs(
    q: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    k_blocks: tl.tensor_descriptor,
    v_blocks: tl.tensor_descriptor,
    tokens: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_pairs: int,
    scale: tl.constexpr,
    num_kv: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
) -> None:
    """A program goes through pairs of an item and a kv head."""
    log2_scale: tl.constexpr = scale * 1.4426950408889634  # log2(e)
    stride: tl.constexpr = num_kv * dim
    row = tl.arange(0, block_rows)
    dims = tl.arange(0, dim)
    keys = tl.arange(0, block_keys)
    pair = tl.program_id(0)
    num_keys = 1
    while (pair < num_pairs) & (num_keys > 0):
        item = items + pair // num_kv * 4
        head = pair % num_kv
        first_row, num_rows, start = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        num_keys = tl.load(item + 3)
        here = row < num_rows * group
        token = tl.load(tokens + first_row + row // group, mask=here, other=0).to(tl.int64)
        at = token * (num_kv * group) + head * group + row % group
        queries = tl.load(q + at[:, None] * dim + dims[None, :], mask=here[:, None], other=0.0)
        peak = tl.full([block_rows], float("-inf"), tl.float32)
        total = tl.zeros([block_rows], tl.float32)
        mixed = tl.zeros([block_rows, dim], tl.float32)
        column = head * dim
        whole = num_keys // block_keys * block_keys
        near = keys[:, None] * stride + dims[None, :]
        for at_key in range(0, whole, block_keys):
            if k_blocks is not None:
                some_k = k_blocks.load([start + at_key, column])
                some_v = v_blocks.load([start + at_key, column])
            else:
                block = (start + at_key).to(tl.int64) * stride + column
                some_k = tl.load(k_pool + block + near)
                some_v = tl.load(v_pool + block + near)
            scores = tl.dot(queries, some_k.T, input_precision="ieee")  # [block_rows, block_keys]
            peak, total, mixed = _mixed(peak, total, mixed, scores, some_v, log2_scale)
        if whole < num_keys:
            seen = whole + keys < num_keys
            block = (start + whole).to(tl.int64) * stride + column
            some_k = tl.load(k_pool + block + near, mask=seen[:, None], other=0.0)
            some_v = tl.load(v_pool + block + near, mask=seen[:, None], other=0.0)
            scores = tl.dot(queries, some_k.T, input_precision="ieee")
            scores = tl.where(seen[None, :], scores, float("-inf"))
            peak, total, mixed = _mixed(peak, total, mixed, scores, some_v, log2_scale)
        if num_keys > 0:
            place = ((first_row * group + row) * num_kv + head).to(tl.int64)
            tl.store(lse + place, peak + tl.log2(total), mask=here)
            mixed /= total[:, None]
            tl.store(out + place[:, None] * dim + dims[None, :], mixed.to(out.dtype.element_ty), mask=here[:, None])
        pair += tl.num_programs(0)


@triton.jit
def _mixed(
    peak: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    scores: tl.tensor,
    values: tl.tensor,
    log2_scale: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state with more keys: `peak` is the largest scaled score, `total` and `mixed` sums relative to it."""
    higher = tl.maximum(peak, tl.max(scores, axis=1) * log2_scale)
    kept, weights = tl.exp2(peak - higher), tl.exp2(scores * log2_scale - higher[:, None])
    total = total * kept + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * kept[:, None], input_precision="ieee")
    return higher, total, mixed
