"""Captured steps where nothing captures: what they compute into, and which of them a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from p99lab.engine.attention.base import GraphShape
from p99lab.engine.checkpoint import dummy_weights
from p99lab.engine.geometry import Geometry
from p99lab.engine.graphs import Captured, StepGraphs, shapes
from p99lab.engine.model import LlamaModel
from p99lab.engine.plan import Row, StepPath, StepPlan
from p99lab.engine.request import SamplingParams

CPU = torch.device("cpu")
MOST = 9  # tokens, and rows


class NoAttention:
    """Attends to nothing, in a step of any shape."""

    def __init__(self, num_q_heads: int) -> None:
        self._num_q_heads = num_q_heads

    def plan(self, step: StepPlan) -> StepPath:
        return StepPath.EAGER

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: Any) -> torch.Tensor:
        return torch.zeros_like(heads[:, : self._num_q_heads])

    def list_elements(self, shape: GraphShape) -> int:
        return 1

    def plan_graph(self, step: StepPlan, graphs: Sequence[tuple[GraphShape, torch.Tensor]]) -> int | StepPath:
        return 0 if graphs else self.plan(step)


class NoGraph:
    """In place of `torch.cuda.CUDAGraph`: what is captured has run, and is run no more."""

    def pool(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture
def model() -> LlamaModel:
    geometry = Geometry.named("tiny-128k")
    return LlamaModel(dummy_weights(geometry, torch.bfloat16, CPU, 0))


@pytest.fixture
def graphs(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    attention = NoAttention(model.geometry.num_q_heads)
    with torch.inference_mode():
        return StepGraphs(model, attention, torch.zeros(MOST, dtype=torch.int64), shapes(MOST, MOST))


@torch.inference_mode()
def prepared(graphs: StepGraphs, num_rows: int) -> Captured | StepPath:
    """A step of so many rows of one token."""
    one, page = np.zeros(1, np.int32), np.zeros(1, np.int32)
    rows = tuple(Row(str(i), i, one, 0, page, True, SamplingParams(), 0) for i in range(num_rows))
    ids = np.zeros(num_rows, np.int32)
    return graphs.prepare(StepPlan(0, rows), [ids, ids, ids - 1], np.arange(num_rows, dtype=np.int32))


def test_a_step_takes_the_smallest_that_holds_it(graphs: StepGraphs) -> None:
    taken = {num_rows: prepared(graphs, num_rows) for num_rows in range(1, MOST + 2)}
    sizes = [one.shape.num_tokens if isinstance(one, Captured) else one for one in taken.values()]
    assert sizes == [1, 2, 4, 4, 8, 8, 8, 8, 9, StepPath.EAGER]


def test_all_leave_their_logits_in_one_buffer(graphs: StepGraphs, model: LlamaModel) -> None:
    taken = [one for num_rows in (1, 2, 8, 9) if isinstance(one := prepared(graphs, num_rows), Captured)]
    first = taken[0].logits
    assert len({one.logits.untyped_storage().data_ptr() for one in taken}) == 1
    assert first.untyped_storage().nbytes() == MOST * model.geometry.vocab_size * 4
    assert [len(one.logits) for one in taken] == [1, 2, 8, 9]
    assert all(one.replay(1).shape == (1, model.geometry.vocab_size) for one in taken)


@torch.inference_mode()
def test_logits_are_float32_wherever_they_are_put(graphs: StepGraphs, model: LlamaModel) -> None:
    zeros = torch.zeros(1, dtype=torch.int32)
    hidden = model.forward(zeros, zeros, NoAttention(model.geometry.num_q_heads))
    new = model.logits(hidden)
    out = torch.full_like(new, torch.nan)
    assert model.logits(hidden, out=out) is out
    assert new.dtype == torch.float32
    assert torch.equal(out, new)
    captured = prepared(graphs, 1)
    assert isinstance(captured, Captured)
    assert torch.equal(captured.logits, new)  # of token 0 at position 0, as captured
