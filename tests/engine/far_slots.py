"""Pools of keys and values so large that an int32 does not count their elements."""

from __future__ import annotations

import torch


def far_slots(num_slots: int, num_kv: int, dim: int) -> tuple[torch.Tensor, int]:
    """Keys and values in float16, [2, slots, kv_heads, dim], random in their last `num_slots`; and the first of those.

    Each is contiguous. What lies before is the same memory for both and never touched: on a CPU its four gigabytes are
    addresses alone.
    """
    first = -(-(2**31) // (num_kv * dim))
    memory = torch.empty(first + 2 * num_slots, num_kv, dim, dtype=torch.float16)
    memory[first:] = torch.randn(2 * num_slots, num_kv, dim)
    keys_and_values = (2, first + num_slots, num_kv, dim)
    return memory.as_strided(keys_and_values, (num_slots * num_kv * dim, *memory.stride())), first
