"""The small kernels of a decoder layer on CUDA, in Triton: each reads its inputs once and is one launch.

Between two matrix products a layer otherwise runs five to ten elementwise kernels of torch, each of which goes through
memory again. All functions here take and give float32, bfloat16 or float16, compute in float32, never synchronise, and
allocate nothing when `out` is given, so a CUDA graph can capture them. Tensors are contiguous, on the current device.
No tokens, no launch. A kernel is compiled once for each combination of dtypes, sizes of the model and flags; another
number of tokens or slots, or an index tensor that begins elsewhere in its buffer, compiles nothing.

Triton comes with torch for CUDA only. Import this module where it is needed: without Triton the import is an error.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

import torch

from p99lab.engine.needs_triton import tl, triton

NORM_ELEMENTS = 512  # of a row to a warp: 16 a thread, two 16-byte loads in bf16
MAX_WARPS = 16
ACTIVATION_BLOCK = 1024  # 4 warps, 8 elements a thread: one 16-byte load each of gate and up
HEADS_BLOCK = 1024  # elements of the heads that one program handles


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += delta, then residual / rms(residual) * weight (arXiv 1910.07467).

    The sum is rounded to the residual's dtype before it is normalised, as when torch adds and normalises apart.

    Args:
        residual: [T, hidden], changed in place unless delta is None.
        delta: [T, hidden], or None: the norm alone.
        weight: [hidden].
        out: [T, hidden]; may be `delta`, and with no delta `residual`.

    Returns:
        `out`, or a new tensor like residual.
    """
    num_tokens, hidden = residual.shape
    assert residual.is_contiguous()
    assert delta is None or (delta.shape == residual.shape and delta.is_contiguous())
    out = torch.empty_like(residual) if out is None else out
    if num_tokens:
        block = _power_of_2(hidden)
        num_warps = min(max(block // NORM_ELEMENTS, 1), MAX_WARPS)
        _add_rms_norm[(num_tokens,)](residual, delta, weight, out, eps, hidden, block, num_warps=num_warps)
    return out


@triton.jit
def _add_rms_norm(
    residual: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.constexpr,
    hidden: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program a token, its row in registers."""
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, block)
    inside = at < hidden
    x = tl.load(residual + row + at, mask=inside, other=0.0)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)  # before the sum: its latency is hidden
    if delta is not None:
        more = tl.load(delta + row + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(residual + row + at, x, mask=inside)
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps) * scale
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=inside)


def silu_and_multiply(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202), rounded once.

    Args:
        gate_up: [T, 2 * n], the gate first.
        out: [T, n].

    Returns:
        `out`, or a new tensor of gate_up's dtype.
    """
    num_tokens, width = gate_up.shape
    size = width // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_tokens, size) if out is None else out
    if num_tokens:
        grid = (num_tokens, -(-size // ACTIVATION_BLOCK))
        _silu_and_multiply[grid](gate_up, out, size, ACTIVATION_BLOCK, num_warps=4)
    return out


@triton.jit
def _silu_and_multiply(gate_up: tl.tensor, out: tl.tensor, size: tl.constexpr, block: tl.constexpr) -> None:
    """One program a block of a token's row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gate_up + token * (2 * size) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * size) + size + at, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * size + at, product.to(out.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    q_out: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm (Qwen3) and rotate (arXiv 2104.09864; NeoX: dimension i with i + dim / 2) queries and keys, and put keys and
    values into the layer's pool. Keys are also rotated in place, so that a step's own can be attended to side by side.

    Normed heads and the table are rounded to qkv's dtype before they are used, as torch does it step by step. Angles
    come as a table, not as positions, because all layers of a step share it.

    Args:
        qkv: [T, (q_heads + 2 * kv_heads) * dim], as the fused projection gives it; dim a power of two >= 16.
        table: [T, 2, dim / 2], cos and sin as `Rotary.table` has them; any float dtype.
        slots: [T] int32 or int64, each token's place in the pool; a negative one stores nothing. No slot twice.
        q_out: [T, q_heads, dim], written for every token.
        k_pool, v_pool: [num_slots, kv_heads, dim].
        q_norm, k_norm: [dim] weights of the norm over each head, or None.
        eps: of the norms.
    """
    num_tokens, num_q, dim = q_out.shape
    num_kv = k_pool.shape[1]
    assert qkv.shape == (num_tokens, (num_q + 2 * num_kv) * dim)
    assert k_pool.shape[1:] == v_pool.shape[1:] == (num_kv, dim)
    assert all(tensor.is_contiguous() for tensor in (qkv, q_out, k_pool, v_pool))
    if num_tokens:
        block = heads_of_a_program(dim)
        grid = (num_tokens, -(-num_q // block) + 2 * -(-num_kv // block))
        sizes = (num_q, num_kv, dim // 2, block)
        _rotate_and_store[grid](qkv, table, slots, q_out, k_pool, v_pool, q_norm, k_norm, eps, *sizes, num_warps=2)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_store(
    qkv: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    q_out: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.constexpr,
    num_q: tl.constexpr,
    num_kv: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """One program a block of heads of one token: the first programs have queries, the next keys, the last values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (num_q + block - 1) // block
    kv_parts: tl.constexpr = (num_kv + block - 1) // block
    dim: tl.constexpr = 2 * half
    q = qkv + token * ((num_q + 2 * num_kv) * dim)
    k = q + num_q * dim
    v = k + num_kv * dim
    table += token * dim
    if part < q_parts:
        _rotate(q, q_out + token * (num_q * dim), part * block, num_q, table, q_norm, eps, half, block, False)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            place = slot * (num_kv * dim)
            if part < q_parts + kv_parts:
                _rotate(k, k_pool + place, (part - q_parts) * block, num_kv, table, k_norm, eps, half, block, True)
            else:
                heads = (part - q_parts - kv_parts) * block + tl.arange(0, block)[:, None]
                at = heads * dim + tl.arange(0, dim)[None, :]
                values = tl.load(v + at, mask=heads < num_kv)
                tl.store(v_pool + place + at, values, mask=heads < num_kv)


@triton.jit
def _rotate(
    source: tl.tensor,
    target: tl.tensor,
    first_head: tl.tensor,
    num_heads: tl.constexpr,
    table: tl.tensor,
    norm: tl.tensor,
    eps: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    in_place_too: tl.constexpr,
) -> None:
    """Norm and rotate up to `block` of the `num_heads` heads that lie at `source` into `target`."""
    heads = first_head + tl.arange(0, block)[:, None]
    dims = tl.arange(0, half)[None, :]
    at = heads * (2 * half) + dims
    inside = heads < num_heads
    dtype = source.dtype.element_ty
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)  # [block, half]
    high = tl.load(source + at + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(table + dims).to(dtype).to(tl.float32)
    sin = tl.load(table + half + dims).to(dtype).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / (2 * half) + eps)[:, None]
        low = (low * scale * tl.load(norm + dims).to(tl.float32)).to(dtype).to(tl.float32)
        high = (high * scale * tl.load(norm + half + dims).to(tl.float32)).to(dtype).to(tl.float32)
    rotated_low, rotated_high = low * cos - high * sin, high * cos + low * sin
    tl.store(target + at, rotated_low.to(target.dtype.element_ty), mask=inside)
    tl.store(target + at + half, rotated_high.to(target.dtype.element_ty), mask=inside)
    if in_place_too:
        tl.store(source + at, rotated_low.to(dtype), mask=inside)
        tl.store(source + at + half, rotated_high.to(dtype), mask=inside)


def heads_of_a_program(dim: int) -> int:
    """How many heads of `dim` dimensions a program takes, a power of two; 8 elements a thread in 4 warps."""
    assert dim >= 16
    assert dim == _power_of_2(dim)
    return max(1, HEADS_BLOCK // dim)


def _power_of_2(size: int) -> int:
    """The smallest that is not below `size`."""
    return 1 << (size - 1).bit_length()
