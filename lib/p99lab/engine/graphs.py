"""Whole steps of few tokens as CUDA graphs: one launch where an eager step takes some four hundred.

A graph is captured for a number of tokens and a number of partial attention results (`GraphShape`), over buffers that
every later step fills anew: inputs, and the lists that attention works through. What it reads there decides which pages
are attended to and how they are shared, so replaying never depends on the plan at capture (TensorRT-LLM issue 18769).
Missing tokens of a smaller step store nothing and are attended to by nobody. All graphs leave their logits in one
buffer: a graph's own would be kept for it alone, [rows, vocab] of float32 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from p99lab.engine.attention.base import GraphAttention, GraphShape
from p99lab.engine.attention.spans import max_partials
from p99lab.engine.model import LlamaModel
from p99lab.engine.plan import StepPath, StepPlan
from p99lab.engine.request import IntArray
from p99lab.engine.staging import ALIGNMENT, upload

ROOM_PER_TOKEN = 8  # partial results of spans
MORE_ROOM = 64  # so that a single token may have its prefix in 64 segments
DECODE_SPANS_PER_TOKEN = 2  # a shared one and, where pages do not lie together, more private ones
MORE_DECODE_SPANS = 16
SMALL_STEPS = (1, 2, 4)  # tokens; then every multiple of 8
MIXED_STEP = 32  # between captured sizes of steps that have prompts in them
EMPTY_STEP = StepPlan(0, ())


def shapes(max_num_seqs: int, max_num_tokens: int) -> list[GraphShape]:
    """The steps to capture: one-token rows that share with a few; then any rows, also prompts. Smallest first each."""
    most = min(max_num_seqs, max_num_tokens)
    decode = sorted({*(n for n in SMALL_STEPS if n < most), *range(8, most, 8), most})
    mixed = range(2 * MIXED_STEP, max_num_tokens + 1, MIXED_STEP)
    return [*(_shape(n, n, False) for n in decode), *(_shape(n, min(n, max_num_seqs), True) for n in mixed)]


def _shape(num_tokens: int, num_samples: int, mixed: bool) -> GraphShape:
    num_span_partials = min(ROOM_PER_TOKEN * num_tokens + MORE_ROOM, max_partials(num_tokens)) if mixed else 0
    num_spans = DECODE_SPANS_PER_TOKEN * num_tokens + MORE_DECODE_SPANS
    return GraphShape(num_tokens, num_span_partials, num_spans, num_spans, num_tokens if mixed else 0, num_samples)


@dataclass(frozen=True, slots=True)
class Captured:
    shape: GraphShape
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor  # int32: token ids, positions, sources, rows that sample, each aligned
    lists: torch.Tensor  # int32, see GraphAttention
    logits: torch.Tensor  # [num_samples, vocab] float32, the beginning of the buffer that all graphs share

    def replay(self, num_samples: int) -> torch.Tensor:
        """Launch the step that was prepared. Returns [num_samples, vocab] float32, valid until the next launch."""
        self.graph.replay()
        return self.logits[:num_samples]

    def fits(self, num_tokens: int, num_samples: int) -> bool:
        return num_tokens <= self.shape.num_tokens and num_samples <= self.shape.num_samples


class StepGraphs:
    """Captured steps of a model and an attention. All graphs share one pool of memory.

    Args:
        sampled: [max rows] int64, what the rows of the latest step have sampled; read by rows that follow them.
        wanted: smallest first, see `shapes`.
    """

    def __init__(
        self, model: LlamaModel, attention: GraphAttention, sampled: torch.Tensor, wanted: Sequence[GraphShape]
    ) -> None:
        self._model, self._attention, self._sampled = model, attention, sampled
        self._memory: Any = None  # torch's handle of the graphs' pool
        device = sampled.device  # torch's own stream for captures is on whichever device captured first
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        most = max(shape.num_samples for shape in wanted)
        self._logits = torch.empty(most, model.geometry.vocab_size, dtype=torch.float32, device=sampled.device)
        self._captured = [self._capture(shape) for shape in reversed(wanted)][::-1]

    @property
    def attention(self) -> GraphAttention:
        """What attends in the captured steps."""
        return self._attention

    def prepare(self, plan: StepPlan, inputs: Sequence[IntArray], samples: IntArray) -> Captured | StepPath:
        """Plan a step, and send its lists and inputs to the buffers of a graph that has room for it.

        Where none has, it is planned to run eagerly, and no inputs are sent: see `GraphAttention.plan_graph`.

        Args:
            inputs: token ids, positions and sources, see `resolved`; [T] int32 each.
            samples: [R], tokens whose logits are wanted.
        """
        fitting = [one for one in self._captured if one.fits(plan.num_tokens, len(samples))]
        chosen = self._attention.plan_graph(plan, [(one.shape, one.lists) for one in fitting])
        if isinstance(chosen, StepPath):
            return chosen
        captured = fitting[chosen]
        upload(_padded(inputs, samples, captured.shape), captured.inputs.device, captured.inputs)
        return captured

    def _capture(self, shape: GraphShape) -> Captured:
        device = self._sampled.device
        nothing = np.empty(0, np.int32)
        inputs = torch.zeros(4 * (shape.num_tokens + ALIGNMENT), dtype=torch.int32, device=device)
        lists = torch.zeros(self._attention.list_elements(shape), dtype=torch.int32, device=device)
        logits = self._logits[: shape.num_samples]
        parts = upload(_padded([nothing] * 3, nothing, shape), device, inputs)
        self._attention.plan_graph(EMPTY_STEP, [(shape, lists)])
        self._forward(logits, *parts)  # compiles and loads what capturing must not
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other engines may step meanwhile
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode=mode):
            self._forward(logits, *parts)
        graph.replay()  # the first replay sends the graph to the device
        self._memory = graph.pool()
        return Captured(shape, graph, inputs, lists, logits)

    def _forward(
        self,
        logits: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sources: torch.Tensor,
        samples: torch.Tensor,
    ) -> None:
        known = resolved(token_ids, sources, self._sampled)
        self._model.logits(self._model.forward(known, positions, self._attention)[samples], out=logits)


def resolved(token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Token ids [T] int64: those of `token_ids`, and where sources is not negative, what that row has just sampled."""
    return torch.where(sources < 0, token_ids, sampled[sources.clamp_min(0)])


def _padded(inputs: Sequence[IntArray], samples: IntArray, shape: GraphShape) -> list[IntArray]:
    fill = (0, 0, -1)
    padded = [
        np.pad(part, (0, shape.num_tokens - len(part)), constant_values=value)
        for part, value in zip(inputs, fill, strict=True)
    ]
    return [*padded, np.pad(samples, (0, shape.num_samples - len(samples)))]
