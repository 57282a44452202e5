"""Products of few tokens against float32, over shapes that fill no block; and a layer's projections with and without.

Compiled where there is a GPU (and then marked `gpu`), otherwise interpreted by Triton on CPU tensors.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from p99lab.engine.linear import gated_linear, linear
from p99lab.engine.projection import Norm, Separate, Thin, projection

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

# Triton's interpreter multiplies no matrices of bfloat16, and cuts to it where a GPU rounds
DTYPES = [torch.float16, torch.bfloat16] if ON_CUDA else [torch.float16]
ULP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # relative
EPS = 1e-5
NOWHERE = 77.0  # what a buffer holds that no kernel should write to
SIZES = [(2048, 9), (100, 20)]  # in, out; the second fills no block


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu, id="compiled") if ON_CUDA else "cpu"])
def thin(request: pytest.FixtureRequest, triton: None) -> Iterator[Any]:
    """The module; what the test makes without naming a device is on the module's, the same numbers in every run."""
    torch.manual_seed(0)
    with torch.device(request.param):
        yield importlib.import_module("p99lab.engine.thin_linear")


class Case:
    """A product by definition, in float32. weight: [out, in] or if gated [2 * out, in]."""

    def __init__(
        self, num_tokens: int, sizes: tuple[int, int], dtype: torch.dtype, gated: bool, has_bias: bool
    ) -> None:
        size_in, self.num_out = sizes
        num_rows = self.num_out * (2 if gated else 1)
        self.gated = gated
        self.x = torch.randn(num_tokens, size_in, dtype=dtype)
        self.weight = torch.randn(num_rows, size_in).mul_(size_in**-0.5).to(dtype)
        self.bias = torch.randn(num_rows, dtype=dtype) if has_bias else None
        self.norm = torch.randn(size_in, dtype=dtype)

    def expected(self, normed: bool = False) -> torch.Tensor:
        x = self.x.float()
        x = F.rms_norm(x, self.norm.shape, self.norm.float(), EPS) if normed else x
        product = F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())
        if self.gated:
            gate, up = product.chunk(2, -1)
            product = F.silu(gate) * up
        return product.to(self.x.dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=ULP[expected.dtype], atol=ULP[expected.dtype] * 2**-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("gated", "has_bias"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("normed", [False, True])
def test_streamed(
    thin: Any, num_tokens: int, sizes: tuple[int, int], gated: bool, has_bias: bool, normed: bool, dtype: torch.dtype
) -> None:
    case = Case(num_tokens, sizes, dtype, gated, has_bias)
    before = {"norm": case.norm, "eps": EPS} if normed else {}
    ours = thin.stream(case.x, case.weight, thin.Streaming(8, 4), bias=case.bias, gated=gated, **before)
    assert_near(ours, case.expected(normed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_streamed_product_is_rounded_and_then_added(thin: Any, num_tokens: int, dtype: torch.dtype) -> None:
    case = Case(num_tokens, SIZES[0], dtype, False, True)
    product = thin.stream(case.x, case.weight, thin.Streaming(4, 4), bias=case.bias)
    stream = torch.full((num_tokens + 1, case.num_out), NOWHERE, dtype=dtype)  # a row more than there are tokens
    residual = stream[:num_tokens]
    residual.copy_(torch.randn(num_tokens, case.num_out) * 100)  # far from the product: two roundings differ from one
    expected = residual + product
    result = thin.stream(case.x, case.weight, thin.Streaming(4, 4), bias=case.bias, residual=residual)
    assert result is residual
    assert torch.equal(residual, expected)
    assert (stream[num_tokens:] == NOWHERE).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 33, 64])
@pytest.mark.parametrize("sizes", [(512, 64), (200, 70)], ids=str)
@pytest.mark.parametrize(("gated", "has_bias"), [(False, False), (True, True)])
@pytest.mark.parametrize("split", [1, 2, 5])
def test_tiled(
    thin: Any, num_tokens: int, sizes: tuple[int, int], gated: bool, has_bias: bool, split: int, dtype: torch.dtype
) -> None:
    case = Case(num_tokens, sizes, dtype, gated, has_bias)
    arrived = torch.zeros(2, dtype=torch.int32)
    how = thin.Tiling(64, 64, split, 4, 3)
    ours = thin.tile(case.x, case.weight, how, arrived, bias=case.bias, gated=gated)
    assert_near(ours, case.expected())
    assert not arrived.any()
    again = thin.tile(case.x, case.weight, how, arrived, bias=case.bias, gated=gated)
    assert torch.equal(again, ours)  # whichever part came last


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [5, 16, 33])
@pytest.mark.parametrize("sizes", [(512, 64), (200, 70)], ids=str)
@pytest.mark.parametrize(("gated", "has_bias"), [(False, False), (True, True)])
def test_tiled_behind_a_norm(
    thin: Any, num_tokens: int, sizes: tuple[int, int], gated: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    case = Case(num_tokens, sizes, dtype, gated, has_bias)
    arrived = torch.zeros(2, dtype=torch.int32)
    how = thin.Tiling(64, 64, 1, 4, 3)
    ours = thin.tile(case.x, case.weight, how, arrived, bias=case.bias, norm=case.norm, eps=EPS, gated=gated)
    tolerance = 4 * ULP[dtype]  # what the norm's weight makes of the tokens is rounded
    torch.testing.assert_close(ours, case.expected(True), rtol=tolerance, atol=tolerance)
    with pytest.raises(AssertionError):
        thin.tile(case.x, case.weight, thin.Tiling(64, 64, 2, 4, 3), arrived, norm=case.norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [1, 3])
def test_a_tiled_product_is_rounded_and_then_added(thin: Any, split: int, dtype: torch.dtype) -> None:
    case = Case(7, (512, 70), dtype, False, True)
    arrived, how = torch.zeros(2, dtype=torch.int32), thin.Tiling(64, 64, split, 4, 3)
    product = thin.tile(case.x, case.weight, how, arrived, bias=case.bias)
    stream = torch.full((8, case.num_out), NOWHERE, dtype=dtype)  # a row more than there are tokens
    residual = stream[:7]
    residual.copy_(torch.randn(7, case.num_out) * 100)
    expected = residual + product
    assert thin.tile(case.x, case.weight, how, arrived, bias=case.bias, residual=residual) is residual
    assert torch.equal(residual, expected)
    assert (stream[7:] == NOWHERE).all()


@pytest.mark.parametrize("size_in", [64, 896, 4096, 14336])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("num_out", [1, 64, 896, 4096, 6144, 128256])
@pytest.mark.parametrize("gated", [False, True])
def test_every_product_can_be_tiled(thin: Any, size_in: int, num_out: int, gated: bool, normed: bool) -> None:
    weight = torch.empty(num_out * (2 if gated else 1), size_in, dtype=torch.bfloat16, device="meta")
    for num_tokens in (5, 16, 17, 64):
        if normed and not thin.ThinProduct(weight, None, gated).takes_norm(num_tokens):
            continue
        how = thin.tiling(num_tokens, num_out, size_in, gated, normed)
        num_programs = -(-num_out // how.num_out) * how.split
        assert how.split == 1 or num_programs <= thin.MULTIPROCESSORS
        assert how.split <= (1 if normed else max(size_in // 512, 1))
        rows = how.num_out * (2 if gated else 1)
        tokens = max(thin.padded(num_tokens), thin.TILED_AS)
        values = tokens * how.num_in * normed  # what the norm's weight makes of them
        assert (how.num_stages * (rows + tokens) * how.num_in + values) * 2 <= 227 << 10  # bytes of shared memory


def test_a_norm_is_taken_on_the_way_where_two_programs_share_a_multiprocessor(thin: Any) -> None:
    dtype, size = torch.bfloat16, 64
    narrow, wide = (thin.ThinProduct(torch.zeros(rows, size, dtype=dtype), None, False) for rows in (6144, 20_000))
    gated = thin.ThinProduct(torch.zeros(2 * 1024, size, dtype=dtype), None, True)
    half = thin.ThinProduct(torch.zeros(2 * 1024, size, dtype=torch.float16), None, True)
    assert [one.takes_norm(2) for one in (narrow, wide, gated, half)] == [True] * 4
    assert [one.takes_norm(64) for one in (narrow, wide, gated, half)] == [False, True, True, False]


@pytest.fixture
def projections(thin: Any) -> Callable[[Case], tuple[Separate, Thin]]:
    def of(case: Case) -> tuple[Separate, Thin]:
        product = (gated_linear if case.gated else linear)(case.weight, case.bias, pack=False)
        separate = Separate(product, case.weight.device)
        return separate, Thin(case.weight, case.bias, case.gated, separate)

    return of


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 64, 65])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_thin_projection_is_the_norm_and_the_product(
    projections: Any, num_tokens: int, has_delta: bool, gated: bool
) -> None:
    case = Case(num_tokens, SIZES[1], DTYPES[-1], gated, True)
    separate, thin = projections(case)
    norm = Norm(case.norm, EPS)
    residual, delta = case.x.clone(), torch.randn_like(case.x) if has_delta else None
    summed = case.x.clone()
    expected = separate.of_norm(summed, delta, norm)
    ours = thin.of_norm(residual, delta, norm)
    assert torch.equal(residual, summed)
    tolerance = 4 * ULP[ours.dtype]  # the norm is rounded in one of them
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 64, 65])
def test_what_a_projection_leaves_over_completes_the_residual_stream(projections: Any, num_tokens: int) -> None:
    case = Case(num_tokens, SIZES[1], DTYPES[-1], False, True)
    separate, thin = projections(case)
    start = torch.randn(num_tokens, case.num_out, dtype=case.x.dtype)
    sums = []
    for project in (separate, thin):
        residual = start.clone()
        left = project.onto(residual, case.x)
        sums.append(residual if left is None else residual + left)
        assert (left is None) == (project is thin and num_tokens not in (3, 65))
        assert left is None or torch.equal(residual, start)
    torch.testing.assert_close(*sums, rtol=2 * ULP[start.dtype], atol=2 * ULP[start.dtype])


# On a GPU, with weights that are large enough for these kernels


def large(gated: bool) -> Case:
    """A down projection, or gate and up, of Llama-3.1-8B."""
    case = Case(64, (4096, 14336) if gated else (14336, 4096), torch.bfloat16, gated, False)
    case.norm = case.norm.abs_()
    return case


@pytest.mark.gpu
def test_large_weights_of_16_bits_are_streamed() -> None:
    with torch.device("cuda"):
        weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
        assert isinstance(projection(weight, None, pack=False), Thin)
        assert isinstance(projection(weight[:4095], None, pack=False), Separate)
        assert isinstance(projection(weight.float(), None, pack=False), Separate)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 31, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_a_graph_captures_projections(num_tokens: int, gated: bool) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        case = large(gated)
        project = projection(case.weight, None, pack=False, gated=gated)
        x, residual = case.x[:num_tokens].clone(), torch.zeros(num_tokens, case.num_out, dtype=case.x.dtype)

        def run() -> torch.Tensor:
            if gated:
                return project.of_norm(x, None, Norm(case.norm, EPS))
            left = project.onto(residual, x)
            return residual if left is None else residual + left

        run()  # compiles
        residual.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(20):  # parts of a product arrive in another order each time
            case.x.normal_()
            x.copy_(case.x[:num_tokens])
            residual.zero_()
            graph.replay()
            expected = case.expected(normed=gated)[:num_tokens]
            # of more than two tokens, what is multiplied is rounded first
            torch.testing.assert_close(captured, expected, rtol=2.0**-6, atol=2.0**-5 if gated else 2.0**-10)
            replayed = captured.clone()
            residual.zero_()
            assert torch.equal(run(), replayed)


@pytest.mark.gpu
def test_another_number_of_tokens_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = importlib.import_module("triton")
    with torch.device("cuda"):
        case = large(True)
        project = projection(case.weight, None, pack=False, gated=True)

        def run(num_tokens: int) -> None:
            project.of_norm(case.x[:num_tokens], None, Norm(case.norm, EPS))

        for num_tokens in (1, 2, 4, 16, 32, 64):
            run(num_tokens)
        compiled: list[object] = []
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(1))
        for num_tokens in range(1, 65):
            run(num_tokens)
        assert not compiled


@pytest.mark.gpu
def test_streamed_launches_wait_for_each_other() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        weights = [torch.randn(4096, 4096).mul_(2**-6).to(torch.bfloat16) for _ in range(8)]
        project = [projection(weight, None, pack=False) for weight in weights]
        norm = Norm(torch.ones(4096, dtype=torch.bfloat16), EPS)
        start = torch.randn(1, 4096, dtype=torch.bfloat16)
        ends = []
        for waits in (True, False):
            x = start.clone()
            torch.cuda._sleep(50_000_000)  # so that launches queue up behind it
            for before, after in zip(project[::2], project[1::2], strict=True):
                y = before.of_norm(x, None, norm)
                if waits:
                    torch.cuda.synchronize()
                assert after.onto(x, y) is None
                if waits:
                    torch.cuda.synchronize()
            ends.append(x)
        assert torch.equal(*ends)
