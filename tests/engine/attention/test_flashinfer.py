"""How the CUDA backend plans a step, without its kernels: which lists it makes, and how often it works them out."""

from __future__ import annotations

import importlib
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from p99lab.engine.attention.shape import GraphShape
from p99lab.engine.attention.spans import LEAST_PARTIALS
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import Row, StepPath, StepPlan
from p99lab.engine.request import SamplingParams

GEOMETRY = Geometry.named("tiny-128k")
PAGE_SIZE = 16
SMALL, LARGE = GraphShape(4, 0, 8, 8, 0, 4), GraphShape(64, 500, 80, 80, 64, 64)  # rows of one token only; any rows


class NoLists:
    """In place of FlashInfer's planner."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def plan(self, *args: Any, **options: Any) -> list[int]:
        return []


class Paged:
    num_steps = 0

    def plan(self, step: StepPlan) -> StepPath:
        self.num_steps += 1
        return StepPath.EAGER


class Rig:
    """The backend and what it is put together from. `num_planned`: how often a step's spans were worked out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module("p99lab.engine.attention.flashinfer")
        plan_spans = module.plan_spans
        self.num_planned = 0

        def counted(*args: Any) -> Any:
            self.num_planned += 1
            return plan_spans(*args)

        monkeypatch.setattr(module, "plan_spans", counted)
        monkeypatch.setattr(module, "_module", lambda *_: None)
        monkeypatch.setattr(module, "ItemLists", NoLists)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        pool = KVPool.allocate(GEOMETRY, 8, PAGE_SIZE, torch.bfloat16, torch.device("cpu"))
        self.paged = Paged()
        self.attention = module.FlashInferAttention(pool, GEOMETRY, lambda levels: 192, self.paged, 1 << 16)

    def prepared(self, step: StepPlan, *shapes: GraphShape) -> int | StepPath:
        graphs = [(one, torch.zeros(self.attention.list_elements(one), dtype=torch.int32)) for one in shapes]
        before = self.num_planned
        planned: int | StepPath = self.attention.plan_graph(step, graphs)
        assert self.num_planned == before + 1
        return planned


@pytest.fixture
def rig(triton: None, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def _step(num_rows: int, num_tokens: int, pages: list[int]) -> StepPlan:
    """Rows of so many new tokens each, the last ones of what the pages hold."""
    table, ids = np.array(pages, np.int32), np.zeros(num_tokens, np.int32)
    computed = len(pages) * PAGE_SIZE - num_tokens
    rows = (Row(str(i), i, ids, computed, table, True, SamplingParams(), 0) for i in range(num_rows))
    return StepPlan(0, tuple(rows))


def test_a_step_takes_the_first_graph_with_room_or_runs_eagerly_planned_once(rig: Rig) -> None:
    assert rig.prepared(_step(3, 1, [0, 1, 2]), SMALL, LARGE) == 0
    assert rig.prepared(_step(2, 5, [0, 1, 2]), SMALL, LARGE) == 1
    assert rig.prepared(_step(2, 5, [0, 1, 2]), SMALL) is StepPath.EAGER
    assert rig.prepared(_step(2, 5, [0, 1, 2])) is StepPath.EAGER
    assert rig.attention.plan(_step(2, 5, [0, 1, 2])) is StepPath.EAGER
    assert rig.paged.num_steps == 0


def test_a_step_over_pages_in_too_many_pieces_is_left_to_the_paged_kernels(rig: Rig) -> None:
    pieces = list(range(0, 2 * (LEAST_PARTIALS // 64 + 10), 2))
    step = _step(1, 64, pieces)
    assert rig.prepared(step, LARGE) is StepPath.FALLBACK
    assert rig.paged.num_steps == 1
    assert rig.attention.plan(step) is StepPath.FALLBACK
    assert rig.paged.num_steps == 2


@pytest.mark.parametrize(("found", "why"), [("0.8.1", "0.8.1 is installed"), ("0.7.40", "0.7.40 is"), (None, "not in")])
def test_another_flashinfer_is_refused_in_one_line(
    triton: None, monkeypatch: pytest.MonkeyPatch, found: str | None, why: str
) -> None:
    flashinfer = importlib.import_module("p99lab.engine.attention.flashinfer")

    def version(package: str) -> str:
        assert package == "flashinfer-python"
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(metadata, "version", version)
    reason = flashinfer.unsupported(torch.device("cuda"), torch.bfloat16, Geometry.named("llama-3.1-8b"))
    assert why in reason
    assert "flashinfer-python" in reason
    assert len(reason.splitlines()) == 1
    for fine in (flashinfer.VERSION, f"{flashinfer.VERSION}+cu130"):
        monkeypatch.setattr(metadata, "version", lambda package, fine=fine: fine)
        assert flashinfer.wrong_version() is None
