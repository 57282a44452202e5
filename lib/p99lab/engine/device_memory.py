"""What an engine takes of its device beside the weights: the page pool, and room for its largest step."""

from __future__ import annotations

import torch

from p99lab.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import KVPool, affordable_pages, page_bytes, step_bytes
from p99lab.errors import BadParameterError


def open_device(name: str) -> torch.device:
    """
    Raises:
        BadParameterError: there is no such device, or it cannot be used.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise BadParameterError(f"device '{name}' cannot be used: {str(error).splitlines()[0]}") from None
    return device


def max_step_tokens(config: SchedulerConfig, geometry: Geometry) -> int:
    """The most tokens of one step; `stock` computes the longest prompt there can be in one."""
    is_stock = config.composition == "stock"
    return max(config.max_num_batched_tokens, geometry.max_position_embeddings if is_stock else 0)


def pool_pages(config: EngineConfig, geometry: Geometry, device: torch.device) -> int:
    """`cache.num_pages`, or what free memory holds beside the largest step. Call it after the weights are loaded."""
    if config.cache.num_pages is not None:
        return config.cache.num_pages
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    num_tokens = max_step_tokens(config.scheduler, geometry)
    reserve_bytes = step_bytes(geometry, num_tokens, config.scheduler.max_num_seqs, dtype)
    return affordable_pages(geometry, config.cache.page_size, dtype, device, reserve_bytes)


def allocate_pool(
    geometry: Geometry, num_pages: int, cache: CacheConfig, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """See `KVPool.allocate`.

    Raises:
        BadParameterError: the device has no room for it.
    """
    try:
        return KVPool.allocate(geometry, num_pages, cache.page_size, dtype, device, cache.kv_layout)
    except (MemoryError, torch.OutOfMemoryError):
        gib = num_pages * page_bytes(geometry, cache.page_size, dtype) / 2**30
        raise BadParameterError(f"a pool of {num_pages} pages takes {gib:.1f} GiB, more than '{device}' has") from None


def require_reserved(config: EngineConfig, geometry: Geometry, reserved: SchedulerConfig) -> None:
    """
    Raises:
        BadParameterError: on a GPU, steps of more tokens or rows than `reserved` has, which memory was reserved for.
    """
    if config.model.device == "cpu":
        return
    for wanted, most, what in (
        (max_step_tokens(config.scheduler, geometry), max_step_tokens(reserved, geometry), "tokens"),
        (config.scheduler.max_num_seqs, reserved.max_num_seqs, "requests"),
    ):
        if wanted > most:
            reason = f"memory is reserved for {most}, the most at the engine's start"
            raise BadParameterError(f"steps of up to {wanted} {what}: {reason}")
