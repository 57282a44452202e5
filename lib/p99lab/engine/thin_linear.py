"""Matrix products of few tokens on CUDA, in Triton: bound by reading the weight, which each reads once.

`stream` multiplies on the CUDA cores, best one token or two; `tile` on the tensor cores, up to 64. Both can take the
tokens' norm on the way, activate a gate and add to the residual stream, which saves launches between a decoder layer's
products. Sums are float32, results are rounded once.

Nothing is compiled anew for another number of tokens that is `padded` to the same, and nothing synchronises, so a CUDA
graph can capture both. Triton comes with torch for CUDA only. Import this module where it is needed.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch

from p99lab.engine.needs_triton import tl, triton

MAX_STREAMED = 2  # tokens; cuBLAS is faster for three and four
MIN_TILED, MAX_TILED = 5, 64
TILED_AS = 16  # fewer tokens are multiplied as so many
MULTIPROCESSORS = 132  # of an H100 or H200
VECTOR = 8  # elements of 2 bytes in a 16-byte load


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


def streaming(num_tokens: int, is_normed: bool) -> Streaming:
    """The fastest on an H200 with the weights of Llama-3.1-8B."""
    return Streaming(4, 16 if is_normed and num_tokens == 1 else 4)


def tiling(num_tokens: int, num_out: int, size_in: int, gated: bool, normed: bool) -> Tiling:
    """The fastest on an H200 with the weights of Llama-3.1-8B; with a norm, by what the compiler makes of it.

    Two programs a multiprocessor where there are enough tiles, otherwise one with more on its way; split columns where
    there are too few for that, and no norm, for which all of a token's columns count. With eight warps a norm's weight
    comes by asynchronous copies too.
    """
    num_tiles, is_many = -(-num_out // 64), num_tokens > TILED_AS
    if gated and is_many:
        return Tiling(64, 64, 1, 4, 4)
    if gated or num_tiles > 2 * MULTIPROCESSORS:
        if normed:
            return Tiling(64, 64, 1, 4, 6) if is_many else Tiling(64, 128, 1, 8, 3)
        return Tiling(64, 128, 1, 4, 3)
    split = min(max(MULTIPROCESSORS // num_tiles, 1), max(size_in // 512, 1))
    if split > 1 or not is_many:
        return Tiling(64, 128, split, 4, 5)
    return Tiling(64, 64, 1, 4, 8 if num_tiles <= MULTIPROCESSORS else 6)


class ThinProduct:
    """A product with a fixed weight for few tokens.

    Calls must follow each other in one stream of launches: they share counters.

    Args:
        weight, bias, gated: see `tile`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> None:
        self._weight, self._bias, self._gated = weight, bias, gated
        self._num_out = len(weight) // 2 if gated else len(weight)
        self._arrived = torch.zeros(-(-self._num_out // 64), dtype=torch.int32, device=weight.device)

    @staticmethod
    def takes(num_tokens: int) -> bool:
        """Whether this is the fastest for so many."""
        return num_tokens <= MAX_STREAMED or MIN_TILED <= num_tokens <= MAX_TILED

    def takes_norm(self, num_tokens: int) -> bool:
        """Whether the norm on the way costs less than a launch of its own, and loses nothing.

        On the tensor cores tokens have to pass through registers for it, one step of columns after the other. Where two
        programs share a multiprocessor that hides behind the weight. What the norm's weight makes of tokens, before
        they are divided by their mean square, may lie beyond fp16.
        """
        has_two = self._gated or -(-self._num_out // 64) > 2 * MULTIPROCESSORS  # as `tiling` has it
        return num_tokens <= MAX_STREAMED or (has_two and self._weight.dtype == torch.bfloat16)

    def __call__(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `tile`, for numbers of tokens that it `takes`; a norm only where it `takes_norm`."""
        num_tokens, size_in = x.shape
        weight, bias, gated = self._weight, self._bias, self._gated
        if num_tokens <= MAX_STREAMED:
            narrow = streaming(num_tokens, norm is not None)
            return stream(x, weight, narrow, bias=bias, norm=norm, eps=eps, gated=gated, residual=residual)
        how = tiling(num_tokens, self._num_out, size_in, gated, norm is not None)
        return tile(x, weight, how, self._arrived, bias=bias, norm=norm, eps=eps, gated=gated, residual=residual)


def padded(num_tokens: int) -> int:
    """The number of tokens that a kernel is compiled for."""
    return 1 << (num_tokens - 1).bit_length()


def stream(
    x: torch.Tensor,
    weight: torch.Tensor,
    how: Streaming,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T, with what comes before and after it in a decoder layer.

    On a GPU it may begin while the kernel before it in the stream ends: the weight must have been there before that.

    Args:
        x: [T, in], contiguous.
        weight: [out, in] or if gated [2 * out, in], contiguous.
        bias: [out] or if gated [2 * out], added to the product.
        norm: [in], weight of a norm over x (arXiv 1910.07467) that is taken first, and is not rounded.
        eps: of the norm.
        gated: the result is silu(gate) * up (arXiv 2002.05202), the first half of the weight being the gate's.
        residual: [T, out], contiguous; the rounded product is added to it in place.

    Returns:
        `residual`, or a new tensor [T, out].
    """
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    num_tokens, size_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, num_out) if residual is None else residual
    grid = (-(-num_out // how.num_out),)
    block_in = how.num_warps * 32 * VECTOR
    sizes = (num_out, size_in, padded(num_tokens))
    flags = (gated, residual is not None, x.is_cuda)
    blocks = (how.num_out, block_in)
    _stream[grid](
        x, weight, bias, norm, out, num_tokens, eps, *sizes, *flags, *blocks,
        num_warps=how.num_warps, launch_pdl=x.is_cuda,
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
    how: Tiling,
    arrived: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `stream`, for up to 64 tokens, in bf16 or fp16.

    What the norm's weight makes of x is rounded, its scale is not.

    Args:
        how: with a norm, one that does not split.
        arrived: int32 zeros, one for each `how.num_out` outputs. Zeros again at the end; in use until then.

    Returns:
        `residual`, or a new tensor [T, out].
    """
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    assert norm is None or how.split == 1
    num_tokens, size_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, num_out) if residual is None else residual
    tokens = max(padded(num_tokens), TILED_AS)
    grid = (-(-num_out // how.num_out), how.split)
    tile_elements = how.num_out * tokens * (2 if gated else 1)
    partials = x.new_empty(grid[0] * how.split * tile_elements if how.split > 1 else 0, dtype=torch.float32)
    sizes = (num_out, size_in, tokens, gated, residual is not None)
    blocks = (how.num_out, how.num_in, how.split, how.num_stages)
    _tile[grid](
        x, weight, bias, norm, out, partials, arrived, num_tokens, eps, *sizes, *blocks, num_warps=how.num_warps
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _tile(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    out: tl.tensor,
    partials: tl.tensor,
    arrived: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.constexpr,
    num_out: tl.constexpr,
    size_in: tl.constexpr,
    tokens: tl.constexpr,
    gated: tl.constexpr,
    adds: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    split: tl.constexpr,
    num_stages: tl.constexpr,
) -> None:
    """One program a tile of outputs and a part of the columns; the last of a tile's programs to end sums the parts.

    The weight is the left operand: of that Hopper's tensor cores want 64 rows, of the other one as few as 8. A norm's
    scale is a token's own, so it is applied to the products, once all of the token has gone by.
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
    squares = tl.zeros([block_in, tokens], tl.float32)
    for start in tl.range(0, part_size, block_in, num_stages=num_stages):
        at = part * part_size + start
        if part_size * split == size_in:
            left, right = tl.load(rows + at), tl.load(columns + at)
        else:
            inside = at + column < size_in
            left = tl.load(rows + at, mask=inside[None, :], other=0.0)
            right = tl.load(columns + at, mask=inside[:, None], other=0.0)
        if norm is not None:
            scale = tl.load(norm + at + column, mask=at + column < size_in, other=0.0).to(tl.float32)
            values = right.to(tl.float32)
            squares += values * values
            right = (values * scale[:, None]).to(right.dtype)
        total = tl.dot(left, right, total)
    if norm is not None:
        total *= tl.rsqrt(tl.sum(squares, axis=0) / size_in + eps)[None, :]
    is_last = True
    if split > 1:
        size: tl.constexpr = num_rows * tokens
        places = (
            partials + tl.program_id(0) * (split * size) + tl.arange(0, num_rows)[:, None] * tokens + token[None, :]
        )
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
