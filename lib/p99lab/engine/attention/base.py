"""What the model asks of attention, whichever kernels answer."""

from __future__ import annotations

from typing import Protocol

import torch

from p99lab.engine.plan import StepPlan


class LayerAttention(Protocol):
    """All that the model sees of attention: it hands over new keys and values and gets attended values back."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v of the step's tokens in `layer`, and attend, each token to itself and all before it.

        Args:
            q: [T, q_heads, dim], rotated.
            k, v: [T, kv_heads, dim], k rotated. Views into one buffer, which is free for reuse after the call.

        Returns:
            [T, q_heads, dim] of q's dtype.
        """
        ...


class AttentionBackend(LayerAttention, Protocol):
    """Attention over the page pool: `plan` once a step, then `run` once a layer."""

    def plan(self, step: StepPlan) -> None:
        """Work out what all layers of the step share: slots, spans, masks."""
        ...
