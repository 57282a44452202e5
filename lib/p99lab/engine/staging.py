"""Integers on their way to the device: one copy a step, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from p99lab.engine.request import IntArray

ALIGNMENT = 4  # elements: every array begins at 16 bytes, whatever stands before it


def upload(arrays: Sequence[IntArray], device: torch.device, target: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Copy arrays side by side, in stream order.

    They leave from pinned memory of torch's caching allocator, which gives it out again only when the copy has ended:
    the step before may still be running.

    Args:
        arrays: int32 each, of one dimension.
        target: where to, int32 on the device and long enough; None: to new memory.

    Returns:
        Views of the target, one for each array.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-len(array) // ALIGNMENT) * ALIGNMENT
    host = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + len(array)] = array
    if target is None:
        target = host.to(device, non_blocking=True)
    else:
        target[:size].copy_(host, non_blocking=True)
    return [target[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]
