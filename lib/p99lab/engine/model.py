"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3), inference only."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from p99lab.engine.attention.base import LayerAttention
from p99lab.engine.geometry import Geometry
from p99lab.engine.linear import can_pack, gated_linear, linear
from p99lab.engine.rope import Rotary, rotate_
from p99lab.engine.weights import LayerWeights, Weights


class LlamaModel:
    """A decoder over a flat run of tokens: which request a token belongs to is attention's affair alone.

    Call under `torch.inference_mode()`.
    """

    def __init__(self, weights: Weights) -> None:
        self.geometry = weights.geometry
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self._rotary = Rotary(weights.geometry.rope, weights.geometry.head_dim, weights.embedding.device)
        element_bytes = weights.embedding.element_size()
        pack = can_pack(weights.embedding, weights.geometry.num_parameters * element_bytes)
        self._layers = [Layer(layer, weights.geometry, pack) for layer in weights.layers]
        self._lm_head = linear(weights.lm_head, None, pack)

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
        cos, sin = self._rotary.tables(positions, hidden.dtype)
        for index, layer in enumerate(self._layers):
            layer.add_attention_(hidden, cos, sin, index, attention)
            layer.add_mlp_(hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token. hidden: [R, hidden] as `forward` returned it; returns [R, vocab] float32."""
        return self._lm_head(rms_norm(hidden, self._final_norm, self.geometry.rms_norm_eps)).float()


class Layer:
    """One decoder layer; both halves add to the residual stream in place."""

    def __init__(self, weights: LayerWeights, geometry: Geometry, pack: bool) -> None:
        self._geometry = geometry
        self._attention_norm, self._mlp_norm = weights.attention_norm, weights.mlp_norm
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm
        self._qkv = linear(weights.qkv, weights.qkv_bias, pack)
        self._output = linear(weights.output, weights.output_bias, pack)
        self._gate_up = gated_linear(weights.gate_up, weights.gate_up_bias, pack)
        self._down = linear(weights.down, weights.down_bias, pack)

    def add_attention_(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, index: int, attention: LayerAttention
    ) -> None:
        """hidden: [T, hidden]; cos, sin: of the step's positions, see `Rotary.tables`."""
        num_q, num_kv = self._geometry.num_q_heads, self._geometry.num_kv_heads
        qkv = self._qkv(rms_norm(hidden, self._attention_norm, self._geometry.rms_norm_eps))
        heads = qkv.view(len(hidden), num_q + 2 * num_kv, -1)  # [T, q_heads + 2 * kv_heads, dim]
        q, k, v = heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
        if self._q_norm is not None and self._k_norm is not None:
            q.copy_(rms_norm(q, self._q_norm, self._geometry.rms_norm_eps))
            k.copy_(rms_norm(k, self._k_norm, self._geometry.rms_norm_eps))
        rotate_(heads[:, : num_q + num_kv], cos, sin)
        hidden.add_(self._output(attention.run(index, q, k, v).flatten(1)))

    def add_mlp_(self, hidden: torch.Tensor) -> None:
        """hidden: [T, hidden]."""
        hidden.add_(self._down(self._gate_up(rms_norm(hidden, self._mlp_norm, self._geometry.rms_norm_eps))))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, in float32 inside."""
    return F.rms_norm(x, weight.shape, weight, eps)
