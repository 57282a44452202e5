"""What the model asks of attention, whichever kernels answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from p99lab.engine.attention.shape import GraphShape as GraphShape
from p99lab.engine.plan import StepPath, StepPlan
from p99lab.engine.rope import HeadNorms


class LayerAttention(Protocol):
    """All that the model sees of attention: it hands over projected heads and gets attended values back."""

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values, and attend, each token to all up to itself.

        Args:
            heads: [T, q_heads + 2 * kv_heads, dim] of the step's tokens: q, then k, then v, as projected. Overwritten.
            table: [T, 2, dim / 2], cos and sin of the tokens' positions by `Rotary.table`.
            norms: of single heads, where the model has them.

        Returns:
            [T, q_heads, dim] of the dtype of `heads`.
        """
        ...


class AttentionBackend(LayerAttention, Protocol):
    """Attention over the page pool: `plan` once a step, then `attend` once a layer."""

    def plan(self, step: StepPlan) -> StepPath:
        """Work out what all layers of the step share: slots, spans, masks. Returns how it will run: not as a graph."""
        ...


class GraphAttention(AttentionBackend, Protocol):
    """Attention whose launches stay valid in a CUDA graph while the lists change that they read."""

    def list_elements(self, shape: GraphShape) -> int:
        """int32 that the lists of a shape take."""
        ...

    def plan_graph(self, step: StepPlan, graphs: Sequence[tuple[GraphShape, torch.Tensor]]) -> int | StepPath:
        """Plan a step for the first of some captured graphs that has room for it, into the buffer of its lists.

        Returns its place; where none has, the step is planned as by `plan`, and what that returns.
        """
        ...
