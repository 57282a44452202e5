"""What an engine takes of its device beside the weights: the page pool, and room for its largest step."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import torch

from p99lab.engine.attention.spans import PARTIALS_PER_TOKEN
from p99lab.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import KVPool, page_bytes
from p99lab.errors import BadParameterError

CPU_SHARE = 0.25  # of the memory available at start; the rest belongs to weights, activations and the user
CUDA_RESERVE_BYTES = 3 << 30  # beside what the largest step takes: kernels' code, workspaces, graphs, sampling
LOGITS_COPIES = 11  # tensors of the size of a step's logits that exist at once: drawing sorts them, and sums
STEP_SLACK = 1.25  # what torch's allocator cannot use again of the memory of a step


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


def step_bytes(geometry: Geometry, num_tokens: int, num_seqs: int, dtype: torch.dtype) -> int:
    """What a step of so many tokens, and rows that sample, takes on the device at most, beside weights and pool."""
    residual = 3 * geometry.hidden_size  # the stream, its norm, and what is added to it
    feed_forward = 3 * geometry.intermediate_size  # gate and up, and their product
    partials = 2 * PARTIALS_PER_TOKEN * geometry.q_size  # folded queries, and outputs
    attention = 4 * geometry.q_size + 2 * geometry.kv_size + partials  # projected, rotated, causal, merged
    logits = LOGITS_COPIES * geometry.vocab_size * num_seqs * 4  # float32
    widest = residual + max(feed_forward, attention)
    return int(STEP_SLACK * num_tokens * widest * dtype.itemsize) + logits


def affordable_pages(
    geometry: Geometry, page_size: int, dtype: torch.dtype, device: torch.device, step_reserve_bytes: int = 0
) -> int:
    """How many pages the device's memory allows now, weights already loaded; at least 2.

    On a GPU all that is free but CUDA_RESERVE_BYTES and `step_reserve_bytes`, see `step_bytes`.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what an engine before this one has left with torch's allocator
        budget = torch.cuda.mem_get_info(device)[0] - CUDA_RESERVE_BYTES - step_reserve_bytes
    else:
        budget = int(min(psutil.virtual_memory().available, _container_memory_left()) * CPU_SHARE)
    return max(2, budget // page_bytes(geometry, page_size, dtype))


def allocate_pool(
    geometry: Geometry, num_pages: int, cache: CacheConfig, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """See `KVPool.allocate`.

    Raises:
        BadParameterError: the device has no room for it.
    """
    try:
        return KVPool.allocate(geometry, num_pages, cache.page_size, dtype, device)
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


def _container_memory_left() -> float:
    """Bytes below the limit of this process's control group, as a container sees it; infinite without one."""
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return math.inf
