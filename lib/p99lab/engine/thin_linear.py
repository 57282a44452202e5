"""Matrix products of few tokens on CUDA, in Triton: bound by reading the weight, which each reads once.

Two kernels. `stream` multiplies on the CUDA cores: up to 4 tokens, whose norm it can take on the way. `tile` multiplies
on the tensor cores: up to 64 tokens. Both can activate a gate and add to the residual stream, so that a decoder layer
has no launches between its products but attention's. All sums are float32, results are rounded once.

Nothing is compiled anew for another number of tokens within the same `padded` size, and nothing synchronises, so a CUDA
graph can capture both. Triton comes with torch for CUDA only. Import this module where it is needed.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch

from p99lab.engine.needs_triton import tl, triton

VECTOR = 8  # elements of 2 bytes in a 16-byte load
MAX_STREAMED = 4
MIN_TILED, MAX_TILED = 16, 64  # fewer tokens than 16 are multiplied as 16


@dataclass(frozen=True, slots=True)
class Streaming:
    """How `stream` divides a product: a program has `num_out` outputs, for which all of its warps read."""

    num_out: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """How `tile` divides a product.

    A program has `num_out` rows of the weight (64 or 128) and a `split`-th of its columns, `num_in` at a time, of which
    `num_stages` are on their way or being multiplied.
    """

    num_out: int
    num_in: int
    split: int
    num_warps: int
    num_stages: int


def padded(num_tokens: int) -> int:
    """The number of tokens that a kernel is compiled for."""
    return 1 << (num_tokens - 1).bit_length()


def stream(
    x: torch.Tensor,
    weight: torch.Tensor,
    streaming: Streaming,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """x @ weight.T for 1 to 4 tokens, with what comes before and after it in a decoder layer.

    Args:
        x: [T, in]; `in` a multiple of 8.
        weight: [out, in], or if gated [2 * out, in].
        bias: [out] or if gated [2 * out], added to the product.
        norm: [in], weight of a norm over x (arXiv 1910.07467) that comes before the product and is not rounded.
        eps: of the norm.
        gated: the result is silu(gate) * up (arXiv 2002.05202), gate being the upper half of the weight.
        residual: [T, out], to which the rounded product is added in place.
        overlap: may begin while the kernel before it in the stream ends, and wait for that before it reads x.

    Returns:
        `residual`, or a new tensor [T, out].
    """
    num_tokens, size_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, num_out) if residual is None else residual
    tokens = padded(num_tokens)
    block_in = streaming.num_warps * 32 * VECTOR
    num_programs = -(-num_out // streaming.num_out)
    _stream[(num_programs,)](
        x, weight, bias, norm, out, num_tokens, eps, num_out, size_in, tokens, gated, residual is not None, overlap,
        streaming.num_out, block_in, num_warps=streaming.num_warps, launch_pdl=overlap,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _stream(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.constexpr,
    num_out: tl.constexpr,
    size_in: tl.constexpr,
    tokens: tl.constexpr,
    gated: tl.constexpr,
    adds: tl.constexpr,
    overlap: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
) -> None:
    """One program a block of outputs. The next part of the weight is on its way while one is multiplied.

    A thread sums its own columns until the end, and only then with the others. The norm's scale does not depend on the
    column, so it is applied there too: x is read once. The first part of the weight is asked for before the kernel
    before this one has ended: it does not depend on it.
    """
    num_rows: tl.constexpr = block_out * (2 if gated else 1)
    first = tl.program_id(0) * block_out
    output, row = _rows(first, num_out, gated, num_rows)
    token = tl.arange(0, tokens)[:, None, None]
    column = tl.arange(0, block_in)[None, None, :]
    rows = weight + row.to(tl.int64)[None, :, None] * size_in + column
    exists = (output < num_out)[None, :, None]
    part = tl.load(rows, mask=exists & (column < size_in), other=0.0)  # [1, rows, in]
    if overlap:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([tokens, num_rows, block_in // 8], tl.float32)
    squares = tl.zeros([tokens, 1, block_in // 8], tl.float32)
    for start in range(0, size_in, block_in):
        at = start + column
        values = tl.load(x + token * size_in + at, mask=(token < num_tokens) & (at < size_in), other=0.0)
        values = values.to(tl.float32)  # [tokens, 1, in]
        if norm is not None:
            squares += _sum_of_8(values * values)
            values *= tl.load(norm + at, mask=at < size_in, other=0.0).to(tl.float32)
        next_part = tl.load(rows + start + block_in, mask=exists & (at + block_in < size_in), other=0.0)
        total += _sum_of_8(values * part.to(tl.float32))
        part = next_part
    y = tl.sum(total, axis=2)  # [tokens, rows]
    if norm is not None:
        y *= tl.rsqrt(tl.sum(squares, axis=2) / size_in + eps)
    _put(y, bias, out, first, num_out, num_tokens, num_out, tokens, gated, adds, block_out)


@triton.jit
def _sum_of_8(products: tl.tensor) -> tl.tensor:
    """Of neighbours in the last dimension: those that one thread has loaded."""
    grouped = tl.reshape(products, products.shape[0], products.shape[1], products.shape[2] // 8, 8)
    return tl.sum(grouped, axis=3)


@triton.jit
def _rows(
    first: tl.tensor, num_out: tl.constexpr, gated: tl.constexpr, num_rows: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Outputs `first` and following, and the weight's rows for them: if gated, gate and up of each in turn."""
    place = tl.arange(0, num_rows)
    if gated:
        output = first + place // 2
        return output, output + place % 2 * num_out
    return first + place, first + place


@triton.jit
def _put(
    y: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    num_tokens: tl.tensor,
    num_out: tl.constexpr,
    tokens: tl.constexpr,
    gated: tl.constexpr,
    adds: tl.constexpr,
    block_out: tl.constexpr,
) -> None:
    """Store the products of a program's rows as outputs `first` and following, or add them. y: [tokens, rows].

    An added product is rounded, then the sum, as when torch does one after the other.
    """
    dtype = out.dtype.element_ty
    token = tl.arange(0, tokens)[:, None]
    output = first + tl.arange(0, block_out)[None, :]
    at = out + token * num_out + output
    inside = (token < num_tokens) & (output < end)
    if bias is not None:
        of_bias, row = _rows(first, num_out, gated, y.shape[1])
        y += tl.load(bias + row, mask=of_bias < end, other=0.0).to(tl.float32)[None, :]
    if gated:
        gate, up = tl.split(tl.reshape(y, tokens, block_out, 2))
        y = gate / (1.0 + tl.exp(-gate)) * up
    y = y.to(dtype)
    if adds:
        y = (tl.load(at, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(at, y, mask=inside)


def tile(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: Tiling,
    arrived: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """x @ weight.T for 1 to 64 tokens in bf16 or fp16; the arguments of `stream`, and

    Args:
        arrived: int32, at least out / num_out zeros, for this stream of launches alone; zeros again at the end.

    Returns:
        `residual`, or a new tensor [T, out].
    """
    num_tokens, size_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, num_out) if residual is None else residual
    tokens = max(padded(num_tokens), MIN_TILED)
    grid = (-(-num_out // tiling.num_out), tiling.split)
    tile_elements = tiling.num_out * tokens * (2 if gated else 1)
    partials = x.new_empty(grid[0] * tiling.split * tile_elements if tiling.split > 1 else 0, dtype=torch.float32)
    _tile[grid](
        x, weight, bias, out, partials, arrived, num_tokens, num_out, size_in, tokens, gated, residual is not None,
        overlap, tiling.num_out, tiling.num_in, tiling.split, tiling.num_stages,
        num_warps=tiling.num_warps, launch_pdl=overlap,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _tile(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    arrived: tl.tensor,
    num_tokens: tl.tensor,
    num_out: tl.constexpr,
    size_in: tl.constexpr,
    tokens: tl.constexpr,
    gated: tl.constexpr,
    adds: tl.constexpr,
    overlap: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    split: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program a tile of outputs and a part of the columns; the last of a tile's programs to end sums the parts.

    The weight is the left operand: of that Hopper's tensor cores want 64 rows, of the other one as few as 8.
    """
    part = tl.program_id(1)
    num_rows: tl.constexpr = block_out * (2 if gated else 1)
    first = tl.program_id(0) * block_out
    output, row = _rows(first, num_out, gated, num_rows)
    token = tl.arange(0, tokens)
    column = tl.arange(0, block_in)
    rows = weight + tl.where(output < num_out, row, 0).to(tl.int64)[:, None] * size_in + column[None, :]
    columns = x + tl.minimum(token, num_tokens - 1)[None, :] * size_in + column[:, None]
    part_size: tl.constexpr = (size_in + block_in * split - 1) // (block_in * split) * block_in
    total = tl.zeros([num_rows, tokens], tl.float32)
    if overlap:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in tl.range(0, part_size, block_in, num_stages=num_stages):
        at = part * part_size + start
        if part_size * split == size_in:
            total = tl.dot(tl.load(rows + at), tl.load(columns + at), total)
        else:
            inside = at + column < size_in
            left = tl.load(rows + at, mask=inside[None, :], other=0.0)
            total = tl.dot(left, tl.load(columns + at, mask=inside[:, None], other=0.0), total)
    is_last = True
    if split > 1:
        size: tl.constexpr = num_rows * tokens
        places = partials + tl.program_id(0) * (split * size) + tl.arange(0, num_rows)[:, None] * tokens + token[None, :]
        tl.store(places + part * size, total)
        tl.debug_barrier()  # the whole program has stored
        is_last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == split - 1
        if is_last:
            total = tl.zeros([num_rows, tokens], tl.float32)
            for i in tl.static_range(split):
                total += tl.load(places + i * size, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)
    if is_last:
        _put(tl.trans(total), bias, out, first, num_out, num_tokens, num_out, tokens, gated, adds, block_out)
