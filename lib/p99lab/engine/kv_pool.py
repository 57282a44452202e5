"""The keys and values of every page: two tensors, sized once, never grown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from p99lab.caches.pages import PageCopy, PageMoves
from p99lab.engine.geometry import Geometry
from p99lab.engine.staging import upload

MOVED_AT_ONCE = 64  # pages: a quarter of a GiB of a model with 128 KiB a token


@dataclass(frozen=True, slots=True)
class KVPool:
    """`k`, `v`: [num_layers, num_pages, page_size, num_kv_heads, head_dim], contiguous, so that a run of consecutive
    pages is a view of consecutive slots."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def allocate(
        cls, geometry: Geometry, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVPool:
        """Reserve the pool, zeroed.

        On a CPU memory is taken page by page as it is first written (calloc), so a generous pool costs nothing.

        Raises:
            torch.OutOfMemoryError, MemoryError: the device has no room; nothing stays allocated.
        """
        shape = (geometry.num_layers, num_pages, page_size, geometry.num_kv_heads, geometry.head_dim)
        return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device))

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
