"""A model's tensors: fused as the forward pass wants them, and named as checkpoints name them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from p99lab.engine.geometry import Geometry


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Projections are [out, in]; q, k and v are one matrix, gate and up another."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [q_size + 2 * kv_size, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None
    output: torch.Tensor  # [hidden, q_size]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model, of one dtype, on one device. `lm_head` is `embedding` itself where they are tied."""

    geometry: Geometry
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]

    @classmethod
    def allocate(cls, geometry: Geometry, dtype: torch.dtype, device: torch.device | str) -> Weights:
        """Uninitialised tensors; on the device `meta` they are shapes without memory."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        embedding = empty(geometry.vocab_size, geometry.hidden_size)
        return cls(
            geometry=geometry,
            embedding=embedding,
            layers=tuple(_empty_layer(geometry, dtype, device) for _ in range(geometry.num_layers)),
            final_norm=empty(geometry.hidden_size),
            lm_head=embedding if geometry.tie_word_embeddings else empty(*embedding.shape),
        )

    def by_name(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint's naming, as a view into the fused ones: what is written there is loaded."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            for name, tensor in _layer_by_name(layer, self.geometry):
                yield f"model.layers.{index}.{name}", tensor
        yield "model.norm.weight", self.final_norm
        if not self.geometry.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head


def _empty_layer(geometry: Geometry, dtype: torch.dtype, device: torch.device | str) -> LayerWeights:
    hidden, intermediate = geometry.hidden_size, geometry.intermediate_size
    qkv_size = geometry.q_size + 2 * geometry.kv_size

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return LayerWeights(
        attention_norm=empty(hidden),
        qkv=empty(qkv_size, hidden),
        qkv_bias=empty(qkv_size) if geometry.attention_bias else None,
        q_norm=empty(geometry.head_dim) if geometry.qk_norm else None,
        k_norm=empty(geometry.head_dim) if geometry.qk_norm else None,
        output=empty(hidden, geometry.q_size),
        output_bias=empty(hidden) if geometry.output_bias else None,
        mlp_norm=empty(hidden),
        gate_up=empty(2 * intermediate, hidden),
        gate_up_bias=empty(2 * intermediate) if geometry.mlp_bias else None,
        down=empty(hidden, intermediate),
        down_bias=empty(hidden) if geometry.mlp_bias else None,
    )


def _layer_by_name(layer: LayerWeights, geometry: Geometry) -> Iterator[tuple[str, torch.Tensor]]:
    yield "input_layernorm.weight", layer.attention_norm
    yield "post_attention_layernorm.weight", layer.mlp_norm
    qkv = {
        "self_attn.q_proj": geometry.q_size,
        "self_attn.k_proj": geometry.kv_size,
        "self_attn.v_proj": geometry.kv_size,
    }
    gate_up = {"mlp.gate_proj": geometry.intermediate_size, "mlp.up_proj": geometry.intermediate_size}
    yield from _split(layer.qkv, qkv, "weight")
    yield from _split(layer.gate_up, gate_up, "weight")
    yield "self_attn.o_proj.weight", layer.output
    yield "mlp.down_proj.weight", layer.down
    if layer.qkv_bias is not None:
        yield from _split(layer.qkv_bias, qkv, "bias")
    if layer.gate_up_bias is not None:
        yield from _split(layer.gate_up_bias, gate_up, "bias")
    optional = {
        "self_attn.o_proj.bias": layer.output_bias,
        "mlp.down_proj.bias": layer.down_bias,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
    }
    yield from ((name, tensor) for name, tensor in optional.items() if tensor is not None)


def _split(fused: torch.Tensor, sizes: dict[str, int], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for module, size in sizes.items():
        yield f"{module}.{kind}", fused[start : start + size]
        start += size
