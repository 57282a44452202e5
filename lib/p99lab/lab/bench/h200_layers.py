"""A decoder layer without its attention, in the ways that `p99lab bench h200 --only compile` compares."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch.nn import Parameter

from p99lab.engine.checkpoint import dummy_weights
from p99lab.engine.geometry import Geometry
from p99lab.engine.linear import can_pack
from p99lab.engine.model import Layer
from p99lab.engine.rope import HeadNorms
from p99lab.engine.weights import LayerWeights, Weights
from p99lab.lab.bench.h200_sizes import Way

NUM_LAYERS = 8  # in a graph; all read the same weights, which no cache holds
STEADY_S = 0.4
LEAST_SAMPLES, MOST_SAMPLES = 5, 200
OWN_GRAPHS: frozenset[Way] = frozenset({"max-autotune"})

Chain = Callable[[int], torch.Tensor]
"""Runs so many layers one after the other. Returns the residual stream, [T, hidden]."""


@dataclass(frozen=True, slots=True)
class Times:
    """`layer_s`: one layer of many, the median of `n`; `first_s`: of the first one, with all that is made for it."""

    first_s: float
    layer_s: float
    n: int


class QueriesBack:
    """`LayerAttention` that attends to nothing."""

    def __init__(self, num_q_heads: int) -> None:
        self._num_q_heads = num_q_heads

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """Returns [T, q_heads, dim], new, as attention does."""
        return heads[:, : self._num_q_heads].contiguous()


class PlainLayer(torch.nn.Module):
    """The layer as torch's own functions say it, over the same fused weights."""

    def __init__(self, weights: LayerWeights, geometry: Geometry) -> None:
        super().__init__()
        self._eps, self._q_size = geometry.rms_norm_eps, geometry.q_size
        self.attention_norm, self.mlp_norm = _fixed(weights.attention_norm), _fixed(weights.mlp_norm)
        self.qkv, self.output = _fixed(weights.qkv), _fixed(weights.output)
        self.gate_up, self.down = _fixed(weights.gate_up), _fixed(weights.down)
        biases = (weights.qkv_bias, weights.output_bias, weights.gate_up_bias, weights.down_bias)
        self.qkv_bias, self.output_bias, self.gate_up_bias, self.down_bias = map(_fixed_or_none, biases)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [T, hidden]; returns the same, new."""
        heads = F.linear(self._norm(hidden, self.attention_norm), self.qkv, self.qkv_bias)
        attended = heads[:, : self._q_size].contiguous()
        hidden = hidden + F.linear(attended, self.output, self.output_bias)
        gate, up = F.linear(self._norm(hidden, self.mlp_norm), self.gate_up, self.gate_up_bias).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.down, self.down_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)


def _fixed(weight: torch.Tensor) -> Parameter:
    return Parameter(weight, requires_grad=False)


def _fixed_or_none(weight: torch.Tensor | None) -> Parameter | None:
    return None if weight is None else _fixed(weight)


def one_layer(geometry: Geometry, dtype: torch.dtype, device: torch.device, seed: int) -> Weights:
    """Random weights of one layer, with next to no vocabulary."""
    return dummy_weights(geometry.model_copy(update={"num_layers": 1, "vocab_size": 16}), dtype, device, seed)


def chain(way: Way, weights: Weights, hidden: torch.Tensor) -> Chain:
    """The layer made ready for `hidden`: [T, hidden], which our own way overwrites, as the engine does."""
    if way == "own":
        return _own(weights, hidden)
    call: Callable[[torch.Tensor], torch.Tensor] = PlainLayer(weights.layers[0], weights.geometry)
    if way != "eager":
        call = torch.compile(call, fullgraph=True, dynamic=False, mode=None if way == "default" else way)

    def run(num_layers: int) -> torch.Tensor:
        x = hidden
        for _ in range(num_layers):
            if way in OWN_GRAPHS:  # whose results the next call overwrites
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                x = call(hidden)
            else:
                x = call(x)
        return x

    return run


def _own(weights: Weights, hidden: torch.Tensor) -> Chain:
    num_bytes = weights.geometry.num_parameters * hidden.element_size()
    layer = Layer(weights.layers[0], weights.geometry, can_pack(weights.embedding, num_bytes))
    attention = QueriesBack(weights.geometry.num_q_heads)
    table = hidden.new_empty(0)  # nobody rotates

    def run(num_layers: int) -> torch.Tensor:
        delta: torch.Tensor | None = None
        for _ in range(num_layers):
            delta = layer.attend(hidden, delta, table, 0, attention)
            delta = layer.feed_forward(hidden, delta)
        return hidden if delta is None else hidden.add_(delta)

    return run


@torch.no_grad()  # not inference_mode: what is compiled would have to be compiled for it
def times(way: Way, weights: Weights, num_tokens: int) -> Times:
    """Make a way ready for so many tokens, and time it. Whatever was compiled before is forgotten."""
    torch.compiler.reset()
    like = weights.embedding
    hidden = torch.randn(num_tokens, weights.geometry.hidden_size, dtype=like.dtype, device=like.device)
    F.linear(hidden, like)  # what CUDA's libraries load at their first use
    _wait(like.device)
    began_s = time.perf_counter()
    run = chain(way, weights, hidden)
    run(1)
    _wait(like.device)
    first_s = time.perf_counter() - began_s

    def layers() -> None:
        run(NUM_LAYERS)

    samples = _samples(layers if like.device.type != "cuda" or way in OWN_GRAPHS else _captured(layers), like.device)
    return Times(first_s, statistics.median(samples) / NUM_LAYERS, len(samples))


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # loads what capturing must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _samples(work: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds of each run, back to back for `STEADY_S`, after a few that warm up."""
    work()
    _wait(device)
    began_s = time.perf_counter()
    work()
    _wait(device)
    num_samples = min(max(LEAST_SAMPLES, int(STEADY_S / (time.perf_counter() - began_s))), MOST_SAMPLES)
    for _ in range(num_samples // 4):
        work()
    return _on_device(work, num_samples) if device.type == "cuda" else _on_host(work, num_samples)


def _on_device(work: Callable[[], None], num_samples: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_samples + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _on_host(work: Callable[[], None], num_samples: int) -> list[float]:
    found = []
    for _ in range(num_samples):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
