"""`bench h200`, compile: that the ways compute the same layer, and what is said of one that has no figure."""

from __future__ import annotations

import math

import pytest
import torch

from p99lab.engine.geometry import Geometry
from p99lab.lab.bench import h200_compile, h200_layers
from p99lab.lab.bench.h200_compile import LayerTime
from p99lab.lab.bench.h200_floors import layer_floor_s
from tests.lab.bench.test_h200 import H200, TINY


@pytest.fixture(scope="module")
def tiny() -> Geometry:
    return Geometry.named("tiny-128k")


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_our_layer_and_the_plain_one_are_the_same(tiny: Geometry, num_tokens: int) -> None:
    weights = h200_layers.one_layer(tiny, torch.float32, torch.device("cpu"), 0)
    assert len(weights.layers) == 1
    hidden = torch.randn(num_tokens, tiny.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = h200_layers.chain("own", weights, hidden.clone())(3)
        plain = h200_layers.chain("eager", weights, hidden.clone())(3)
    assert not torch.allclose(plain, hidden, atol=1e-3)
    torch.testing.assert_close(ours, plain)


def test_floors_are_reading_the_weights_or_multiplying_them() -> None:
    """218 M weights a layer: 0.104 ms to read, and 2.41 ms for 4 096 tokens."""
    llama = Geometry.named("llama-3.1-8b")
    assert layer_floor_s(llama, 1, H200) == pytest.approx(103.9e-6, rel=0.002)
    assert layer_floor_s(llama, 4096, H200) == pytest.approx(2.414e-3, rel=0.002)


def test_what_has_no_figure_says_why(tiny: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(way: str, weights: object, num_tokens: int) -> h200_layers.Times:
        if way == "default":
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\n\nmore")
        return h200_layers.Times(0.5, 1e-4 if way == "own" else 2e-4, 9)

    monkeypatch.setattr(h200_layers, "times", times)
    bench = TINY.model_copy(update={"compile_ways": ("own", "eager", "default", "max-autotune")})
    found = [*h200_compile.layer_times(bench)]
    assert [timed.note for timed in found] == [
        *(None, None),
        "failed: InvalidCxxCompiler: No working C++ compiler found",
        "not measured: takes a GPU",
    ]
    spent = [*h200_compile.layer_times(bench.model_copy(update={"compile_budget_s": 1e-9}))]
    assert {timed.note for timed in spent[:3]} == {"not measured: 1e-09 s were over"}
    monkeypatch.setattr(h200_compile, "measure", lambda bench: found)
    rows = {row.name: row for row in h200_compile.rows(bench, tiny, H200)}
    own = rows["compile: own, T = 2"]
    assert (own.value, own.peer, own.ratio_to_peer, own.n) == (pytest.approx(100), "eager", pytest.approx(2), 9)
    assert own.ratio_to_floor == pytest.approx(own.value / own.floor)
    assert math.isnan(rows["compile: default, T = 2"].value)
    assert rows["compile: own, T = 2, first result"].value == 0.5
    assert "compile: default, T = 2, first result" not in rows


def test_a_process_that_dies_leaves_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200_compile, "MODULE", "p99lab.lab.bench.no_such_module")
    found = h200_compile.measure(TINY)
    assert [(timed.way, timed.num_tokens) for timed in found] == [("own", 2), ("default", 2)]
    for timed in found:
        assert timed.layer_s is None
        assert timed.note is not None
        assert timed.note.startswith("ended with 1: ")
        assert "no_such_module" in timed.note


def test_the_fastest_other_way_has_as_many_tokens() -> None:
    own, fast, slow, other = (
        *(LayerTime("own", 1, 1e-4), LayerTime("default", 1, 2e-4), LayerTime("eager", 1, 3e-4)),
        LayerTime("default", 64, 1e-5),
    )
    assert h200_compile.fastest_other(own, [own, slow, fast, other, LayerTime("max-autotune", 1)]) == fast
    assert h200_compile.fastest_other(own, [own, other]) is None
