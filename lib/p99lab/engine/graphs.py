"""Whole decode steps as CUDA graphs: one launch where an eager step takes some four hundred.

A graph is captured for a number of tokens and a number of partial attention results (`GraphShape`), over buffers that
every later step fills anew: inputs, and the lists that attention works through. What it reads there decides which pages
are attended to and how they are shared, so replaying never depends on the plan at capture (TensorRT-LLM issue 18769).
Missing tokens of a smaller step store nothing and are attended to by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from p99lab.engine.attention.base import GraphAttention, GraphShape
from p99lab.engine.model import LlamaModel
from p99lab.engine.plan import StepPlan
from p99lab.engine.request import IntArray
from p99lab.engine.staging import ALIGNMENT, upload

PARTIALS_PER_TOKEN = 8
MORE_PARTIALS = 64  # so that a single token may have its prefix in 64 segments
SMALL_STEPS = (1, 2, 4)  # tokens; then every multiple of 8
EMPTY_STEP = StepPlan(0, ())


def shape_for(num_tokens: int) -> GraphShape:
    return GraphShape(num_tokens, PARTIALS_PER_TOKEN * num_tokens + MORE_PARTIALS)


@dataclass(frozen=True, slots=True)
class Captured:
    shape: GraphShape
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor  # [3 * num_tokens, each part aligned] int32
    lists: torch.Tensor  # int32, see GraphAttention
    logits: torch.Tensor  # [num_tokens, vocab] float32


class StepGraphs:
    """Captured steps of a model and an attention, smallest first. All graphs share one pool of memory.

    Args:
        sampled: [max rows] int64, what the rows of the latest step have sampled; read by rows that follow them.
        max_num_tokens: the largest step to capture.
    """

    def __init__(
        self, model: LlamaModel, attention: GraphAttention, sampled: torch.Tensor, max_num_tokens: int
    ) -> None:
        self._model, self._attention, self._sampled = model, attention, sampled
        self._memory: Any = None  # torch's handle of the graphs' pool
        sizes = [n for n in SMALL_STEPS if n < max_num_tokens] + [*range(8, max_num_tokens, 8), max_num_tokens]
        captured = [self._capture(shape_for(size)) for size in sorted(set(sizes), reverse=True)]
        self._captured = captured[::-1]

    def run(self, plan: StepPlan, inputs: Sequence[IntArray]) -> torch.Tensor | None:
        """Launch the step. None, and nothing launched: no graph has its shape.

        Args:
            inputs: token ids, positions and sources, see `resolved`; [T] int32 each.

        Returns:
            Logits of each token, [T, vocab] float32, valid until the next call.
        """
        num_tokens = plan.num_tokens
        if num_tokens != len(plan.rows) or num_tokens > self._captured[-1].shape.num_tokens:
            return None
        captured = next(one for one in self._captured if one.shape.num_tokens >= num_tokens)
        if not self._attention.plan_graph(plan, captured.shape, captured.lists):
            return None
        upload(_padded(inputs, captured.shape.num_tokens), captured.inputs.device, captured.inputs)
        captured.graph.replay()
        return captured.logits[:num_tokens]

    def _capture(self, shape: GraphShape) -> Captured:
        device = self._sampled.device
        aligned = -(-shape.num_tokens // ALIGNMENT) * ALIGNMENT
        inputs = torch.zeros(3 * aligned, dtype=torch.int32, device=device)
        lists = torch.zeros(self._attention.list_elements(shape), dtype=torch.int32, device=device)
        parts = upload(_padded([np.empty(0, np.int32)] * 3, shape.num_tokens), device, inputs)
        self._attention.plan_graph(EMPTY_STEP, shape, lists)
        self._forward(parts)  # compiles and loads what capturing must not
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._forward(parts)
        self._memory = graph.pool()
        return Captured(shape, graph, inputs, lists, logits)

    def _forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        token_ids, positions, sources = parts
        known = resolved(token_ids, sources, self._sampled)
        return self._model.logits(self._model.forward(known, positions, self._attention))


def resolved(token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Token ids [T] int64: those of `token_ids`, and where sources is not negative, what that row has just sampled."""
    return torch.where(sources < 0, token_ids, sampled[sources.clamp_min(0)])


def _padded(inputs: Sequence[IntArray], num_tokens: int) -> list[IntArray]:
    fill = (0, 0, -1)
    return [
        np.pad(part, (0, num_tokens - len(part)), constant_values=value)
        for part, value in zip(inputs, fill, strict=True)
    ]
