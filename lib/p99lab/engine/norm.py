"""Root-mean-square norms (arXiv 1910.07467), each together with the residual sum before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

AddNorm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
"""(residual, delta, weight, eps): adds delta, if there is one, to residual in place; returns the sum's norm, new."""


def add_norm_for(device: torch.device) -> AddNorm:
    """The fastest `AddNorm` of a device."""
    if device.type != "cuda":
        return add_norm
    from p99lab.engine.kernels import add_rms_norm  # Triton, which comes with torch for CUDA

    return add_rms_norm


def add_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`AddNorm` in plain torch."""
    if delta is not None:
        residual.add_(delta)
    return rms_norm(residual, weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside."""
    return F.rms_norm(x, weight.shape, weight, eps)
