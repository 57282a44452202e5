"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3), inference only."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from p99lab.engine.attention.base import LayerAttention
from p99lab.engine.geometry import Geometry
from p99lab.engine.linear import can_pack
from p99lab.engine.projection import Norm, projection
from p99lab.engine.rope import HeadNorms, Rotary
from p99lab.engine.weights import LayerWeights, Weights


class LlamaModel:
    """A decoder over a flat run of tokens: which request a token belongs to is attention's affair alone.

    Call under `torch.inference_mode()`.
    """

    def __init__(self, weights: Weights) -> None:
        self.geometry = weights.geometry
        self._embedding = weights.embedding
        self._final_norm = Norm(weights.final_norm, weights.geometry.rms_norm_eps)
        self._rotary = Rotary(weights.geometry.rope, weights.geometry.head_dim, weights.embedding.device)
        element_bytes = weights.embedding.element_size()
        pack = can_pack(weights.embedding, weights.geometry.num_parameters * element_bytes)
        self._layers = [Layer(layer, weights.geometry, pack) for layer in weights.layers]
        self._lm_head = projection(weights.lm_head, None, pack)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: LayerAttention) -> torch.Tensor:
        """Run the step's tokens through all layers.

        Args:
            token_ids: [T] int32 or int64.
            positions: [T] int32 or int64, each token's place in its own sequence.
            attention: stores and attends; called once a layer, in order.

        Returns:
            [T, hidden], before the final norm: `logits` applies it to the rows that need it.
        """
        hidden = F.embedding(token_ids, self._embedding)
        table = self._rotary.table(positions, hidden.dtype)
        delta: torch.Tensor | None = None  # what the next norm adds to `hidden` first
        for index, layer in enumerate(self._layers):
            delta = layer.attend(hidden, delta, table, index, attention)
            delta = layer.feed_forward(hidden, delta)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Scores of the next token, [R, vocab] float32: in `out` if there is one, else new.

        hidden: [R, hidden] as `forward` returned it.
        """
        scores = self._lm_head.of_norm(hidden, None, self._final_norm)
        return scores.float() if out is None else out.copy_(scores)


class Layer:
    """One decoder layer. Either half first adds to the residual stream, in place, what the half before it left over."""

    def __init__(self, weights: LayerWeights, geometry: Geometry, pack: bool) -> None:
        eps = geometry.rms_norm_eps
        self._num_heads = geometry.num_q_heads + 2 * geometry.num_kv_heads
        self._attention_norm, self._mlp_norm = Norm(weights.attention_norm, eps), Norm(weights.mlp_norm, eps)
        self._head_norms = HeadNorms.of(weights.q_norm, weights.k_norm, eps)
        self._qkv = projection(weights.qkv, weights.qkv_bias, pack)
        self._output = projection(weights.output, weights.output_bias, pack)
        self._gate_up = projection(weights.gate_up, weights.gate_up_bias, pack, gated=True)
        self._down = projection(weights.down, weights.down_bias, pack)

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        table: torch.Tensor,
        index: int,
        attention: LayerAttention,
    ) -> torch.Tensor | None:
        """hidden, delta: [T, hidden]; table: of the step's positions, see `Rotary.table`.

        Returns [T, hidden], still to be added to `hidden`, or None.
        """
        qkv = self._qkv.of_norm(hidden, delta, self._attention_norm)
        heads = qkv.view(len(hidden), self._num_heads, -1)  # [T, q_heads + 2 * kv_heads, dim]
        return self._output.onto(hidden, attention.attend(index, heads, table, self._head_norms).flatten(1))

    def feed_forward(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor | None:
        """hidden, delta: [T, hidden]. Returns as `attend` does."""
        return self._down.onto(hidden, self._gate_up.of_norm(hidden, delta, self._mlp_norm))
