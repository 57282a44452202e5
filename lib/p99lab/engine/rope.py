"""Rotary position embedding (arXiv 2104.09864) in its three variants, computed as transformers computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch

from p99lab.engine.geometry import Rope
from p99lab.engine.norm import rms_norm


class Rotary:
    """Rotates queries and keys of a head dimension; dimension i turns with dimension i + head_dim / 2 (NeoX)."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)  # [dim / 2] float32
        self._scale = attention_factor(rope)

    def table(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """cos and sin of every angle at `positions` [T], [T, 2, dim / 2], for `rotate_`.

        Computed per step, not kept for all positions: 131 072 of them would take 64 MiB, and one step needs few.
        """
        angles = positions[:, None].float() * self._frequencies  # [T, dim / 2]
        return torch.stack((angles.cos(), angles.sin()), 1).mul_(self._scale).to(dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of single query and key heads before they are rotated (Qwen3). Weights: [head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float

    @classmethod
    def of(cls, q: torch.Tensor | None, k: torch.Tensor | None, eps: float) -> Self | None:
        return None if q is None or k is None else cls(q, k, eps)

    def apply_(self, q: torch.Tensor, k: torch.Tensor) -> None:
        """In place. q: [T, q_heads, dim], k: [T, kv_heads, dim]."""
        q.copy_(rms_norm(q, self.q, self.eps))
        k.copy_(rms_norm(k, self.k, self.eps))


def prepared(
    heads: torch.Tensor, num_kv_heads: int, table: torch.Tensor, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of projected heads, normed and rotated in place: views of `heads`."""
    num_q = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads[:, :num_q], heads[:, num_q : num_q + num_kv_heads], heads[:, num_q + num_kv_heads :]
    if norms is not None:
        norms.apply_(q, k)
    rotate_(heads[:, : num_q + num_kv_heads], table)
    return q, k, v


def rotate_(heads: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate `heads` [T, heads, dim] in place, by the table of the same T tokens."""
    cos, sin = table[:, 0, None], table[:, 1, None]  # [T, 1, dim / 2] each
    low, high = heads.chunk(2, -1)
    was_low = low.clone()
    low.mul_(cos).addcmul_(high, sin, value=-1)
    high.mul_(cos).addcmul_(was_low, sin)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    return _yarn(frequencies, rope, head_dim) if rope.type == "yarn" else frequencies


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by: 1, but for yarn, which sharpens attention as contexts grow."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = _required(rope.factor)
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor, trained = _required(rope.factor), _required(rope.original_max_position_embeddings)
    low, high = _required(rope.low_freq_factor), _required(rope.high_freq_factor)
    turns = trained * frequencies / (2 * math.pi)  # over the trained length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often keep their frequency, those that turn rarely are stretched (NTK by parts)."""
    factor, trained = _required(rope.factor), _required(rope.original_max_position_embeddings)

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension_of(rope.beta_fast or 32.0), dimension_of(rope.beta_slow or 1.0)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return (1 - stretched) * frequencies + stretched * frequencies / factor


def _required(value: float | None) -> float:
    assert value is not None  # Rope's validator saw to it
    return value
