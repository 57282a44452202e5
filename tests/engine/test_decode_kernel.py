"""The kernel for few rows over long spans against attention by definition.

Compiled where there is a GPU (and then marked `gpu`), otherwise interpreted by Triton on CPU tensors.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p99lab.engine.attention.lanes import Lanes, deal
from p99lab.engine.attention.softmax import attend_plain
from p99lab.errors import P99labError
from tests.engine.far_slots import far_slots

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

DTYPES = (torch.bfloat16, torch.float16) if ON_CUDA else (torch.float32, torch.float16)  # interpreted bf16 is wrong
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}  # weights are rounded too
NOWHERE = 77.0  # what a buffer holds before the kernel writes to it
NUM_SLOTS = 1_100

Span = tuple[list[int], int, int]  # tokens, first slot, number of keys


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu, id="compiled") if ON_CUDA else "cpu"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, triton: None) -> Iterator[Any]:
    """The module; its device is also that of what the test makes without naming one."""
    torch.manual_seed(0)
    module = importlib.import_module("p99lab.engine.decode_kernel")
    if not ON_CUDA:  # Triton 3.6 asks for the int of a bound, an array of one element, which numpy 2.4 refuses
        monkeypatch.setattr(module, "range", interpreted_range, raising=False)
    with torch.device(request.param):
        yield module


def interpreted_range(start: Any, stop: Any, step: Any) -> range:
    first, last = (bound.handle.data.item() if hasattr(bound, "handle") else int(bound) for bound in (start, stop))
    return range(first, last, int(step))


def lanes_of(spans: list[Span], num_lanes: int) -> tuple[Lanes, list[int]]:
    """Items, and the token of each partial row."""
    arrays = (
        np.array(part, np.int32) for part in ([len(t) for t, _, _ in spans], *([r[i] for r in spans] for i in (1, 2)))
    )
    lanes = deal(*arrays, num_lanes)
    return lanes, [token for span in lanes.spans for token in spans[span][0]]


def attended(
    kernel: Any, q: torch.Tensor, pools: torch.Tensor, spans: list[Span], num_lanes: int, block_rows: int, **how: Any
) -> tuple[Lanes, torch.Tensor, torch.Tensor]:
    """The kernel's partial results, [M, q_heads, dim] and [M, q_heads], with lse in base e."""
    lanes, tokens = lanes_of(spans, num_lanes)
    num_kv = pools.shape[2]
    group = q.shape[1] // num_kv
    out = torch.full((len(tokens) * group, num_kv, q.shape[2]), NOWHERE, dtype=q.dtype)
    lse = torch.full((len(tokens) * group, num_kv), NOWHERE)
    lists = [torch.tensor(array, dtype=torch.int32) for array in (tokens, lanes.items, lanes.indptr)]
    tiling = kernel.Tiling(**{"block_keys": 64, "num_stages": 3, "num_warps": 4} | how)
    scale = q.shape[2] ** -0.5
    kernel.attend_decode_spans(q, *pools, *lists, out, lse, scale, block_rows=block_rows, tiling=tiling)
    unfolded = (x.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2) for x in (out, lse * math.log(2)))
    return lanes, *unfolded


def assert_attended(
    q: torch.Tensor, pools: torch.Tensor, spans: list[Span], lanes: Lanes, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Each item's rows are its tokens' attention over its keys."""
    for (first, num_rows, start, num_keys), span in zip(lanes.items.tolist(), lanes.spans.tolist(), strict=True):
        rows, (keys, values) = slice(first, first + num_rows), pools[:, None, start : start + num_keys].float()
        own = q[spans[span][0]].float()[:, None]  # one query a sequence: no mask
        expected = attend_plain(own, keys.expand(num_rows, -1, -1, -1), values.expand(num_rows, -1, -1, -1))
        tolerance = TOLERANCE[q.dtype]
        torch.testing.assert_close(out[rows].float(), expected[0][:, 0], rtol=tolerance, atol=tolerance / 4)
        torch.testing.assert_close(
            lse[rows], expected[1][:, 0], rtol=1e-5, atol=2e-5 if q.dtype == torch.float32 else 1e-3
        )


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tokens_over_any_spans(kernel: Any, data: st.DataObject) -> None:
    dtype, group = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 3, 4, 8]))
    num_kv, dim = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([16, 64, 128]))
    block_rows = data.draw(st.sampled_from(kernel.BLOCK_ROWS))
    tokens = st.lists(st.integers(0, 8), min_size=1, max_size=block_rows // group)
    spans = []
    for num_keys in data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=3)):
        spans.append((data.draw(tokens), data.draw(st.integers(0, NUM_SLOTS - num_keys)), num_keys))
    block_keys, num_lanes = data.draw(st.sampled_from([32, 64])), data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    q, pools = torch.randn(9, group * num_kv, dim).to(dtype), torch.randn(2, NUM_SLOTS, num_kv, dim).to(dtype)
    assert_attended(q, pools, spans, *attended(kernel, q, pools, spans, num_lanes, block_rows, block_keys=block_keys))


@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 63, 64, 65, 128, 1_099])
def test_runs_that_fill_blocks_and_those_that_do_not(kernel: Any, num_keys: int) -> None:
    q, pools = torch.randn(2, 4, 64, dtype=DTYPES[0]), torch.randn(2, NUM_SLOTS, 2, 64, dtype=DTYPES[0])
    spans: list[Span] = [([1, 0], 1, num_keys)]
    assert_attended(q, pools, spans, *attended(kernel, q, pools, spans, 1, 16))


def test_what_lies_around_a_run_is_not_seen(kernel: Any) -> None:
    q, pools = torch.randn(3, 6, 16, dtype=DTYPES[0]), torch.full((2, NUM_SLOTS, 2, 16), torch.nan, dtype=DTYPES[0])
    pools[:, 5:205] = torch.randn(2, 200, 2, 16)
    pools[:, NUM_SLOTS - 70 :] = torch.randn(2, 70, 2, 16)  # up to the last slot
    q[1] = torch.nan
    spans: list[Span] = [([2], 5, 200), ([0, 2], NUM_SLOTS - 70, 70)]
    assert_attended(q, pools, spans, *attended(kernel, q, pools, spans, 2, 16))


def test_slots_may_lie_further_away_than_an_int32_counts(kernel: Any) -> None:
    q, (pools, first) = torch.randn(2, 6, 16).half(), far_slots(100, 3, 16)
    spans: list[Span] = [([1, 0], first + 3, 97)]
    assert_attended(q, pools, spans, *attended(kernel, q, pools, spans, 1, 16))


def test_scores_far_apart(kernel: Any) -> None:
    """Weights that differ by powers of two in the hundreds, whichever block has the largest."""
    q, pools = torch.full((1, 2, 64), 10.0).half(), torch.randn(2, NUM_SLOTS, 1, 64).half()
    pools[0] = torch.linspace(-9, 9, NUM_SLOTS)[torch.randperm(NUM_SLOTS), None, None]  # scores from -720 to 720
    spans: list[Span] = [([0], 0, NUM_SLOTS)]
    assert_attended(q, pools, spans, *attended(kernel, q, pools, spans, 1, 16))


@pytest.mark.parametrize("broken", ["query", "key", "value", "last key", "last value"])
def test_a_nan_that_was_seen_is_not_hidden(kernel: Any, broken: str) -> None:
    q, pools = torch.randn(1, 1, 16, dtype=DTYPES[0]), torch.randn(2, 100, 1, 16, dtype=DTYPES[0])
    places = {
        "query": q,
        "key": pools[0, 30],
        "value": pools[1, 30],
        "last key": pools[0, 99],
        "last value": pools[1, 99],
    }
    places[broken].fill_(torch.nan)
    assert attended(kernel, q, pools, [([0], 0, 100)], 1, 16)[1].isnan().all()


def test_rows_and_items_of_no_lane_stay_as_they_are(kernel: Any) -> None:
    """Lists of a captured step are longer than a step's own, and hold what was there before."""
    q, pools = torch.randn(2, 2, 16, dtype=DTYPES[0]), torch.randn(2, 50, 1, 16, dtype=DTYPES[0])
    items = [[1, 1, 0, 50], [0, 1, 1 << 30, 1 << 30]]
    out, lse = torch.full((6, 1, 16), NOWHERE, dtype=DTYPES[0]), torch.full((6, 1), NOWHERE)
    lists = [torch.tensor(x, dtype=torch.int32) for x in ([-7, 1, -7], items, [0, 0, 1, 1])]
    kernel.attend_decode_spans(q, *pools, *lists, out, lse, 0.25, block_rows=16, tiling=kernel.Tiling(32, 2, 4))
    for buffer in (out, lse):
        assert (buffer[[0, 1, 4, 5]] == NOWHERE).all()
        assert (buffer[2:4] != NOWHERE).all()


def test_without_triton_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decode_kernel", "needs_triton"):
        monkeypatch.delitem(sys.modules, f"p99lab.engine.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(P99labError, match=r"^the CUDA kernels need the package 'triton'.*$"):
        importlib.import_module("p99lab.engine.decode_kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("block_rows", [16, 32, 64])
def test_a_graph_follows_its_lists(block_rows: int) -> None:
    """Replayed over other items than it was captured with, as many as there are lanes or fewer."""
    kernel = importlib.import_module("p99lab.engine.decode_kernel")
    torch.manual_seed(0)
    num_lanes, most = 33, block_rows // 4
    with torch.device("cuda"):
        q, pools = torch.randn(16, 32, 128, dtype=torch.bfloat16), torch.randn(2, 20_000, 8, 128, dtype=torch.bfloat16)
        tokens, items, indptr = (torch.zeros(n, dtype=torch.int32) for n in (4_000, 400, num_lanes + 1))
        out, lse = torch.empty(16_000, 8, 128, dtype=torch.bfloat16), torch.empty(16_000, 8)
        tiling = kernel.Tiling(64, 3, 4)

        def run() -> None:
            lists = (tokens, items.view(-1, 4), indptr, out, lse)
            kernel.attend_decode_spans(q, *pools, *lists, 128**-0.5, block_rows=block_rows, tiling=tiling)

        run()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        steps: list[list[Span]] = [[([*range(most)], 0, 19_989), ([most - 1], 77, 300)], [([3], 11, 1_000)], []]
        for spans in steps:
            lanes, row_tokens = lanes_of(spans, num_lanes)
            for target, array in ((tokens, row_tokens), (items, lanes.items.ravel()), (indptr, lanes.indptr)):
                target[: len(array)] = torch.tensor(array, dtype=torch.int32)
            for buffer in (out, lse):
                buffer.fill_(NOWHERE)
            graph.replay()
            unfolded = [x.unflatten(0, (-1, 4)).transpose(1, 2).flatten(1, 2) for x in (out, lse * math.log(2))]
            assert_attended(q, pools, spans, lanes, *unfolded)
            assert (lse[4 * len(row_tokens) :] == NOWHERE).all()
