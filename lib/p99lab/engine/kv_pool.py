"""The keys and values of every page: two tensors, sized once, never grown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from p99lab.caches.pages import PageCopy, PageMoves
from p99lab.engine.attention.spans import PARTIALS_PER_TOKEN
from p99lab.engine.config import KVLayout
from p99lab.engine.geometry import Geometry
from p99lab.engine.staging import upload

CPU_SHARE = 0.25  # of the memory available at start; the rest belongs to weights, activations and the user
CUDA_RESERVE_BYTES = 3 << 30  # beside what the largest step takes: kernels' code, workspaces, graphs, sampling
LOGITS_COPIES = 11  # tensors of the size of a step's logits that exist at once: drawing sorts them, and sums
MOVED_AT_ONCE = 64  # pages: half a GiB of a model with 128 KiB a token
STEP_SLACK = 1.25  # what torch's allocator cannot use again of the memory of a step


@dataclass(frozen=True, slots=True)
class KVPool:
    """`k`, `v`: [num_layers, num_pages, page_size, num_kv_heads, head_dim], strided alike.

    A run of consecutive pages is a view of consecutive slots, which lie equally far apart, and the dimensions of a head
    lie side by side. What else lies where is the layout's: see `allocate`.
    """

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def allocate(
        cls,
        geometry: Geometry,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: KVLayout = "NHD",
    ) -> KVPool:
        """Reserve the pool, zeroed. In memory:

            NHD    [num_layers, num_pages, page_size, num_kv_heads, head_dim]: the heads of a token side by side
            HND    [num_layers, num_kv_heads, num_pages, page_size, head_dim]: consecutive tokens of a head side by side

        On a CPU memory is taken page by page as it is first written (calloc), so a generous pool costs nothing.

        Raises:
            torch.OutOfMemoryError, MemoryError: the device has no room; nothing stays allocated.
        """
        layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
        if layout == "NHD":
            shape = (layers, num_pages, page_size, heads, dim)
            return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device))
        shape = (layers, heads, num_pages, page_size, dim)
        return cls(*(_zeros(shape, dtype, device).permute(0, 2, 3, 1, 4) for _ in range(2)))

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    def move_pages(self, moves: Sequence[PageMoves]) -> None:
        """Carry out the moves in all layers, in order; at most MOVED_AT_ONCE pages are in memory twice."""
        for move in moves:
            sources, targets = (pages.long() for pages in upload([move.sources, move.targets], self.k.device))
            for at in range(0, len(sources), MOVED_AT_ONCE):
                some = slice(at, at + MOVED_AT_ONCE)
                for pool in (self.k, self.v):
                    pool.index_copy_(1, targets[some], pool.index_select(1, sources[some]))

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Carry out the copies in all layers, in order."""
        for copy in copies:
            for pool in (self.k, self.v):
                pool[:, copy.target, : copy.num_tokens] = pool[:, copy.source, : copy.num_tokens]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def page_bytes(geometry: Geometry, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, K and V together."""
    per_token = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    return per_token * page_size * dtype.itemsize


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
