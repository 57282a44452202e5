"""The two ways in which a pool of keys or values lies in memory."""

from __future__ import annotations

from typing import get_args

import torch

from p99lab.engine.config import KVLayout

LAYOUTS: tuple[KVLayout, ...] = get_args(KVLayout)


def laid_out(pools: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """[layers or pools, ..., kv_heads, dim], the heads outside of all but the first dimension in memory if so asked."""
    return pools if layout == "NHD" else pools.movedim(-2, 1).contiguous().movedim(1, -2)


def far_apart(num_pools: int, num_slots: int, dim: int) -> torch.Tensor:
    """Random pools in float16, [pools, slots, 3 heads, dim]: an int32 counts from head to head, but not to the last.

    The four gigabytes between them are never touched: on a CPU they are addresses without memory.
    """
    size, distance = num_pools * num_slots * dim, 2**30
    memory = torch.empty(2 * distance + size, dtype=torch.float16)
    pools = memory.as_strided((num_pools, num_slots, 3, dim), (num_slots * dim, dim, distance, 1))
    return pools.copy_(torch.randn(pools.shape))
