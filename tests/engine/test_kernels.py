"""The fused kernels against plain torch, over shapes that fill no block.

Compiled where there is a GPU (and then marked `gpu`), otherwise interpreted by Triton on CPU tensors.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p99lab.engine.attention.softmax import attend_plain
from p99lab.engine.geometry import Rope
from p99lab.engine.rope import Rotary, inverse_frequencies, rotate_
from p99lab.errors import P99labError
from tests.engine.far_slots import far_slots

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRODUCT_DTYPES = (
    DTYPES if ON_CUDA else [torch.float32, torch.float16]
)  # Triton's interpreter multiplies bfloat16's bits
BF16_ULP = 2.0**-7 if ON_CUDA else 2.0**-5  # Triton's interpreter cuts to bfloat16 where a GPU rounds
ULP = {torch.float32: 2.0**-18, torch.bfloat16: BF16_ULP, torch.float16: 2.0**-10}  # relative; of float32 a few
EPS = 1e-5
NOWHERE = 77.0  # what a buffer holds before a kernel writes to it

Shape = tuple[int, int, int]  # q heads, kv heads, dim
YARN = Rope(type="yarn", factor=4.0, original_max_position_embeddings=32)  # scales cos and sin
SHAPES: list[Shape] = [(9, 3, 64), (14, 2, 128), (16, 16, 16), (4, 1, 256)]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu, id="compiled") if ON_CUDA else "cpu"])
def device(request: pytest.FixtureRequest, triton: None) -> Iterator[torch.device]:
    """Also the device of what the test makes without naming one; random numbers are the same in every run."""
    torch.manual_seed(0)
    with torch.device(request.param) as device:
        yield device


@pytest.fixture
def kernels(device: torch.device) -> Any:
    return importlib.import_module("p99lab.engine.kernels")


@pytest.fixture
def state_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("p99lab.engine.state_kernels")
    if not ON_CUDA:  # Triton 3.6 asks for the int of a bound, an array of one element, which numpy 2.4 refuses
        monkeypatch.setattr(module, "range", interpreted_range, raising=False)
    return module


def interpreted_range(start: int, stop: Any, step: Any) -> range:
    return range(start, stop.handle.data.item(), int(step))


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the order of sums and what follows from it: no more than one unit in the last place."""
    tolerance = ULP[expected.dtype]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * 2**-4)


def rounds(dtype: torch.dtype) -> bool:
    return ON_CUDA or dtype != torch.bfloat16


# The norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 4096), (5, 576), (3, 100), (2, 14336), (1, 1)])
def test_the_sum_stays_and_its_norm_comes_out(kernels: Any, num_tokens: int, hidden: int, dtype: torch.dtype) -> None:
    residual, delta = torch.randn(2, num_tokens, hidden, dtype=dtype)
    weight = torch.randn(hidden, dtype=dtype)
    summed = residual + delta
    out = torch.full_like(residual, NOWHERE)
    assert kernels.add_rms_norm(residual, delta, weight, EPS, out) is out
    assert torch.equal(residual, summed) or not rounds(dtype)
    assert_near(residual, summed)
    assert_near(out, F.rms_norm(summed, (hidden,), weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_delta_only_the_norm_is_taken(kernels: Any, dtype: torch.dtype) -> None:
    residual, weight = torch.randn(3, 576, dtype=dtype), torch.randn(576, dtype=dtype)
    before = residual.clone()
    out = kernels.add_rms_norm(residual, None, weight, EPS)
    assert torch.equal(residual, before)
    assert_near(out, F.rms_norm(before, (576,), weight, EPS))


def test_the_sum_is_rounded_before_it_is_normed(kernels: Any) -> None:
    residual, delta = torch.tensor([[2048.0, 128.0], [1.0, 0.0]], dtype=torch.float16)[:, None]
    out = kernels.add_rms_norm(residual, delta, torch.ones(2), 0.0, torch.empty(1, 2))
    assert residual.tolist() == [[2048.0, 128.0]]  # 2049 lies halfway between two numbers of float16
    assert float(out[0, 0] / out[0, 1]) == pytest.approx(16.0, rel=1e-5)


def test_the_norm_may_take_the_deltas_place(kernels: Any) -> None:
    residual, delta, weight = torch.randn(4, 576), torch.randn(4, 576), torch.randn(576)
    expected = F.rms_norm(residual + delta, (576,), weight, EPS)
    assert_near(kernels.add_rms_norm(residual, delta, weight, EPS, delta), expected)
    assert_near(delta, expected)


def test_a_row_of_zeros_has_a_norm_of_zeros(kernels: Any) -> None:
    assert not kernels.add_rms_norm(torch.zeros(2, 100), torch.zeros(2, 100), torch.ones(100), EPS).any()


# The activation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 14336), (5, 1536), (3, 100), (2, 1)])
def test_the_gate_is_activated_and_multiplied(kernels: Any, num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_tokens, 2 * size).mul_(4).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    out = torch.full((num_tokens, size), NOWHERE, dtype=dtype)
    assert kernels.silu_and_multiply(gate_up, out) is out
    assert_near(out, (F.silu(gate) * up).to(dtype))
    assert torch.equal(kernels.silu_and_multiply(gate_up), out)


def test_a_gate_far_from_zero_gives_no_nan(kernels: Any) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 2.0, 2.0, 2.0]])
    assert kernels.silu_and_multiply(gate_up).tolist() == [[0.0, 0.0, 400.0]]


# Rotation


def rotated(heads: torch.Tensor, table: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    """By definition, rounded where torch would round between norm and rotation. heads: [T, heads, dim]."""
    normed = heads if norm is None else F.rms_norm(heads, norm.shape, norm, EPS)
    low, high = normed.float().chunk(2, -1)
    cos, sin = table.to(heads.dtype).float()[:, :, None].unbind(1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(heads.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_normed_rotated_and_put_in_their_places(
    kernels: Any, shape: Shape, has_norm: bool, dtype: torch.dtype
) -> None:
    num_q, num_kv, dim = shape
    qkv = torch.randn(4, (num_q + 2 * num_kv) * dim, dtype=dtype)
    table = Rotary(YARN, dim, qkv.device).table(torch.tensor([0, 7, 4000, 131_071]), torch.float32)
    norms = torch.randn(2, dim, dtype=dtype) if has_norm else (None, None)
    slots = torch.tensor([5, 0, -1, 3])  # the third is padding
    q_out = torch.full((4, num_q, dim), NOWHERE, dtype=dtype)
    k_pool, v_pool = torch.full((2, 7, num_kv, dim), NOWHERE, dtype=dtype)

    q, k, v = qkv.clone().view(4, -1, dim).split((num_q, num_kv, num_kv), 1)
    kernels.rotate_and_store(qkv, table, slots, q_out, k_pool, v_pool, *norms, EPS)

    own_q, own_k, own_v = qkv.view(4, -1, dim).split((num_q, num_kv, num_kv), 1)
    assert torch.equal(own_q, q)
    assert torch.equal(own_v, v)
    assert torch.equal(own_k[[0, 1, 3]], k_pool[[5, 0, 3]])  # keys are rotated in place too, but for padding
    expected_k, expected_v = torch.full((2, 7, num_kv, dim), NOWHERE, dtype=dtype)
    stored = slots >= 0
    expected_k[slots[stored]], expected_v[slots[stored]] = rotated(k, table, norms[1])[stored], v[stored]
    assert torch.equal(v_pool, expected_v)
    for ours, expected in ((q_out, rotated(q, table, norms[0])), (k_pool, expected_k)):
        torch.testing.assert_close(ours, expected, rtol=ULP[dtype], atol=4 * ULP[dtype])  # differences of products
        if rounds(dtype) and dtype != torch.float32:
            assert (ours == expected).float().mean() > 0.97  # rounded where the definition rounds


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_heads_are_put_into_slots_further_away_than_an_int32_counts(
    kernels: Any, device: torch.device, index_dtype: torch.dtype
) -> None:
    num_q, num_kv, dim = 6, 3, 16
    pools, first = far_slots(7, num_kv, dim)
    qkv, slots = torch.randn(3, (num_q + 2 * num_kv) * dim).half(), torch.tensor([5, -1, 2], dtype=index_dtype)
    table = Rotary(YARN, dim, device).table(torch.tensor([0, 7, 4000]), torch.float32)
    norms, q_out = torch.randn(2, dim).half(), torch.empty(3, num_q, dim).half()
    expected = pools[:, first:].clone()
    kernels.rotate_and_store(qkv.clone(), table, slots, q_out, *expected, *norms, EPS)
    assert not torch.equal(pools[:, first:], expected)
    kernels.rotate_and_store(qkv, table, torch.where(slots < 0, -1, slots + first), q_out, *pools, *norms, EPS)
    assert torch.equal(pools[:, first:], expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_heads_are_rotated_as_the_reference_rotates_them(
    kernels: Any, device: torch.device, index_dtype: torch.dtype
) -> None:
    table = Rotary(YARN, 64, device).table(torch.tensor([3, 100_000]), torch.float32)
    qkv, slots = torch.randn(2, 5 * 64), torch.tensor([1, 0], dtype=index_dtype)
    q_out, k_pool, v_pool = torch.empty(2, 3, 64), torch.empty(2, 1, 64), torch.empty(2, 1, 64)
    heads = qkv.view(2, 5, 64).clone()
    kernels.rotate_and_store(qkv, table, slots, q_out, k_pool, v_pool)
    rotate_(heads[:, :4], table)
    torch.testing.assert_close(q_out, heads[:, :3])
    torch.testing.assert_close(k_pool, heads[[1, 0], 3:4])
    assert torch.equal(v_pool, heads[[1, 0], 4:])


def test_cos_and_sin_are_exact_to_float32_for_a_million_tokens(device: torch.device) -> None:
    rope = Rope(theta=500_000.0)
    positions = torch.tensor([0, 1, 1_000, 65_537, 131_071, 131_072, 1_048_576])
    angles = (positions[:, None].float() * inverse_frequencies(rope, 128).to(device)).double()
    exact = torch.stack((angles.cos(), angles.sin()), 1)
    table = Rotary(rope, 128, device).table(positions, torch.float32)
    torch.testing.assert_close(table.double(), exact, rtol=0, atol=2.0**-22)


# Attention states


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_queries_are_folded(state_kernels: Any, shape: Shape, index_dtype: torch.dtype) -> None:
    num_q, num_kv, dim = shape
    q = torch.randn(5, num_q, dim, dtype=torch.bfloat16)
    rows = torch.tensor([4, 0, 4], dtype=index_dtype)
    folded = state_kernels.gather_folded(q, rows, num_kv)
    assert torch.equal(folded, fold(q[rows], num_kv))


def test_padding_leaves_its_rows_alone(state_kernels: Any) -> None:
    q, out = torch.randn(2, 4, 16), torch.full((4, 2, 16), NOWHERE)
    assert state_kernels.gather_folded(q, torch.tensor([-1, 1]), 2, out) is out
    assert (out[:2] == NOWHERE).all()
    assert torch.equal(out[2:], fold(q[1:], 2))


def fold(by_row: torch.Tensor, num_kv: int) -> torch.Tensor:
    """[M, q_heads, ...] -> [M * group, kv_heads, ...]"""
    return by_row.unflatten(1, (num_kv, -1)).transpose(1, 2).flatten(0, 1).contiguous()


Partials = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # shared out and lse, causal out and lse


def finished(
    state_kernels: Any,
    q: torch.Tensor,
    pools: torch.Tensor,
    starts: list[int],
    lens: list[int],
    partials: Partials,
    rows: list[list[int]],
    out: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """`finish_states` on lists, rows of each token apart."""
    flat = [*itertools.chain(*rows), -9]  # nobody's
    indptr = [0, *itertools.accumulate(map(len, rows))]
    parts, segments = (
        [torch.tensor(x, dtype=index_dtype) for x in lists] for lists in ((starts, lens), (indptr, flat))
    )
    result: torch.Tensor = state_kernels.finish_states(q, *pools, *parts, *partials, *segments, q.shape[2] ** -0.5, out)
    return result


def finished_plainly(
    q: torch.Tensor, pools: torch.Tensor, starts: list[int], lens: list[int], partials: Partials, rows: list[list[int]]
) -> torch.Tensor:
    """The same by definition."""
    k, v = pools[:, None]
    partial_out, partial_lse, causal_out, causal_lse = partials
    outs = torch.cat((unfold(partial_out, q.shape[1]), causal_out)).float()
    lses = torch.cat((unfold(partial_lse, q.shape[1]), causal_lse)) * math.log(2)
    expected = torch.zeros(q.shape)
    for token in range(len(q)):
        seen = slice(starts[token], starts[token] + lens[token])
        own = (
            [attend_plain(q[None, token, None].float(), k[:, seen].float(), v[:, seen].float())] if lens[token] else []
        )
        token_outs = torch.cat([outs[rows[token]], *(out[0] for out, _ in own)])
        weights = torch.cat([lses[rows[token]], *(lse[0] for _, lse in own)]).softmax(0)
        if len(token_outs):
            expected[token] = (weights[..., None] * token_outs).sum(0)
    return expected.to(q.dtype)


def unfold(folded: torch.Tensor, num_q: int) -> torch.Tensor:
    """[M * group, kv_heads, ...] -> [M, q_heads, ...]"""
    return folded.unflatten(0, (-1, num_q // folded.shape[1])).transpose(1, 2).flatten(1, 2)


def assert_close_states(ours: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-5 if expected.dtype == torch.float32 else 2 * ULP[expected.dtype]  # weights are rounded too
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_private_keys_merging_is_all_there_is_to_finishing(state_kernels: Any, shape: Shape) -> None:
    num_q, num_kv, dim = shape
    group = num_q // num_kv
    q, pools = torch.randn(4, num_q, dim), torch.randn(2, 1, num_kv, dim)
    partial_lse, causal_lse = torch.randn(5 * group, num_kv), torch.randn(4, num_q)
    partial_lse[2 * group : 3 * group] = -math.inf
    partials = (torch.randn(5 * group, num_kv, dim), partial_lse, torch.randn(4, num_q, dim), causal_lse)
    rows = [[0, 1, 5], [2], [], [3, 4, 2, 8]]
    indptr = torch.tensor([0, *itertools.accumulate(map(len, rows))])
    merged = state_kernels.merge_states(*partials, indptr, torch.tensor([*itertools.chain(*rows)]))
    assert_close_states(merged, finished(state_kernels, q, pools, [0] * 4, [0] * 4, partials, rows))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_finished_parts_are_the_attention_over_all_keys(
    state_kernels: Any, shape: Shape, index_dtype: torch.dtype
) -> None:
    """Two tokens share two segments of a document and have private slots, the third has a causal part alone."""
    num_q, num_kv, dim = shape
    q, document, pools = torch.randn(3, num_q, dim), torch.randn(2, 40, num_kv, dim), torch.randn(2, 90, num_kv, dim)
    segments = [attend_plain(q[None, :2], *document[:, None, span]) for span in (slice(0, 17), slice(17, 40))]
    partial_out, partial_lse = (torch.cat([part[i][0] for part in segments]) for i in range(2))  # rows: segment, token
    causal_out, causal_lse = (part[0] for part in attend_plain(q[None, 2:], *pools[:, None, :6]))
    partials = (
        fold(partial_out, num_kv),
        fold(partial_lse, num_kv) / math.log(2),
        causal_out,
        causal_lse / math.log(2),
    )

    out = finished(state_kernels, q, pools, [20, 3, 0], [70, 5, 0], partials, [[0, 2], [3, 1], [4]], None, index_dtype)
    for token, own in enumerate((slice(20, 90), slice(3, 8), slice(6))):
        keys, values = pools[:, own] if token == 2 else torch.cat((document, pools[:, own]), 1)
        assert_close_states(out[token], attend_plain(q[None, token, None], keys[None], values[None])[0][0, 0])


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_private_part_with_any_partial_rows(state_kernels: Any, data: st.DataObject) -> None:
    group, dtype = data.draw(st.sampled_from([1, 3, 4, 8])), data.draw(st.sampled_from(PRODUCT_DTYPES))
    dim, num_kv, num_slots = data.draw(st.sampled_from([16, 64])), 2, 320
    lens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, num_slots - length)) for length in lens]
    counts = [data.draw(st.integers(0, 37)) for _ in lens]
    num_partials = data.draw(st.integers(0, sum(counts)))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    q = torch.randn(len(lens), group * num_kv, dim).to(dtype)
    pools = torch.randn(2, num_slots, num_kv, dim).to(dtype)
    outs = torch.randn(sum(counts), group * num_kv, dim).to(dtype)
    lses = torch.randn(sum(counts), group * num_kv) * 5 + 6
    shared = (fold(outs[:num_partials], num_kv), fold(lses[:num_partials], num_kv))
    partials = (*shared, outs[num_partials:], lses[num_partials:])
    rows = [part.tolist() for part in torch.randperm(sum(counts)).split(counts)]
    out = torch.full_like(q, NOWHERE)
    assert finished(state_kernels, q, pools, starts, lens, partials, rows, out) is out
    assert_close_states(out, finished_plainly(q, pools, starts, lens, partials, rows))


def test_private_keys_further_away_than_an_int32_counts(state_kernels: Any) -> None:
    q, (pools, first) = torch.randn(2, 6, 16).half(), far_slots(40, 3, 16)
    none = (q[:0, :3], q[:0, :3, 0].float(), q[:0], q[:0, :, 0].float())
    case = (q, pools, [first + 1, first + 7], [39, 3], none, [[], []])
    assert_close_states(finished(state_kernels, *case), finished_plainly(*case))


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES, ids=str)
def test_parts_far_apart(state_kernels: Any, dtype: torch.dtype) -> None:
    """Weights that differ by powers of two in the hundreds, among rows and among private keys."""
    q, pools = torch.full((3, 9, 64), 10.0, dtype=dtype), torch.randn(2, 70, 3, 64).to(dtype)
    pools[0] = torch.linspace(-9, 9, 70)[torch.randperm(70), None, None].to(dtype)  # scores from -720 to 720
    outs, lses = torch.randn(41, 9, 64).to(dtype), torch.randn(41, 9) * 300
    partials = (fold(outs[:20], 3), fold(lses[:20], 3), outs[20:], lses[20:])
    case = (q, pools, [0, 5, 0], [70, 60, 0], partials, [[7], [*range(1, 40)], [40, 0]])
    assert_close_states(finished(state_kernels, *case), finished_plainly(*case))


def test_what_a_token_does_not_see_counts_for_nothing_whatever_it_holds(state_kernels: Any) -> None:
    q, pools = torch.randn(5, 2, 16), torch.full((2, 70, 2, 16), torch.nan)
    pools[:, 3:40] = torch.randn(2, 37, 2, 16)
    outs, lses = torch.randn(4, 2, 16), torch.randn(4, 2)
    outs[1:], lses[1:] = torch.nan, -torch.inf
    outs[3, 0], lses[3, 0] = 5.0, 1e30
    partials = (outs[:2], lses[:2], outs[2:], lses[2:])
    rows = [[1, 0, 2], [2, 1], [3], [], [1, 2]]
    out = finished(state_kernels, q, pools, [50, 9, 0, 69, 3], [0, 0, 0, 0, 37], partials, rows)
    torch.testing.assert_close(out[0], outs[0])
    assert not out[1].any()
    assert (out[2, 0] == 5.0).all()
    assert not out[2, 1].any()
    assert not out[3].any()
    torch.testing.assert_close(out[4], attend_plain(q[None, 4:], *pools[:, None, 3:40])[0][0, 0])


@pytest.mark.parametrize("broken", ["key", "value", "out", "lse"])
def test_a_nan_where_keys_were_seen_is_not_hidden(state_kernels: Any, broken: str) -> None:
    q, pools = torch.randn(1, 1, 16), torch.randn(2, 40, 1, 16)
    outs, lses = torch.randn(2, 1, 16), torch.zeros(2, 1)
    {"key": pools[0, 35], "value": pools[1, 35], "out": outs[1], "lse": lses[1]}[broken].fill_(torch.nan)
    assert (
        finished(state_kernels, q, pools, [0], [40], (outs[:1], lses[:1], outs[1:], lses[1:]), [[0, 1]]).isnan().all()
    )


# All of them


def test_no_tokens_are_no_work(kernels: Any, state_kernels: Any) -> None:
    none = torch.empty(0, 4, 16)
    assert kernels.add_rms_norm(none.flatten(1), None, torch.ones(64), EPS).shape == (0, 64)
    assert kernels.silu_and_multiply(none.flatten(1)).shape == (0, 32)
    pool = torch.full((3, 1, 16), NOWHERE)
    kernels.rotate_and_store(
        torch.empty(0, 6 * 16), torch.empty(0, 2, 8), torch.empty(0, dtype=torch.int32), none, pool, pool
    )
    assert (pool == NOWHERE).all()
    no_rows = torch.empty(0, dtype=torch.int32)
    assert state_kernels.gather_folded(torch.empty(2, 4, 16), no_rows, 2).shape == (0, 2, 16)
    no_partials = (none[:, :1], none[:, :1, 0].contiguous(), none, none[..., 0].contiguous())
    no_segments = (torch.zeros(1, dtype=torch.int32), no_rows)
    out = state_kernels.finish_states(none, pool, pool, no_rows, no_rows, *no_partials, *no_segments, 0.25)
    assert out.shape == (0, 4, 16)


@pytest.mark.parametrize("module", ["kernels", "state_kernels"])
def test_without_triton_one_line_says_so(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in ("kernels", "state_kernels", "needs_triton"):
        monkeypatch.delitem(sys.modules, f"p99lab.engine.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(P99labError, match=r"^the CUDA kernels need the package 'triton'.*$") as raised:
        importlib.import_module(f"p99lab.engine.{module}")
    assert "\n" not in str(raised.value)


def layer_of_kernels(num_tokens: int) -> tuple[Callable[[], None], list[torch.Tensor], list[torch.Tensor]]:
    """All kernels in a row on tensors of a Llama-3.1-8B layer: what runs them, their inputs, their outputs.

    Every other token, from the first on, sees one private key, its own, and has a partial result that counts for
    nothing; the others have a partial result alone, their folded query.
    """
    kernels, states = (importlib.import_module(f"p99lab.engine.{name}") for name in ("kernels", "state_kernels"))
    bf16 = {"dtype": torch.bfloat16}
    residual, delta, normed = torch.randn(3, num_tokens, 4096, **bf16)
    gate_up, qkv = torch.randn(num_tokens, 28672, **bf16), torch.randn(num_tokens, 6144, **bf16)
    table = Rotary(Rope(), 128, residual.device).table(torch.arange(num_tokens), torch.bfloat16)
    index = torch.arange(num_tokens + 3)
    slots, rows, indptr = index[1 : num_tokens + 1], index[2 : num_tokens + 2] - 2, index[: num_tokens + 1]
    lens = (index % 2)[1 : num_tokens + 1]
    activated, q = torch.empty(num_tokens, 14336, **bf16), torch.empty(num_tokens, 32, 128, **bf16)
    pools = torch.zeros(2, num_tokens + 3, 8, 128, **bf16)
    folded, merged = torch.empty(num_tokens * 4, 8, 128, **bf16), torch.empty(num_tokens, 32, 128, **bf16)
    weight = torch.ones(4096, **bf16)
    lse = torch.where(lens == 1, -torch.inf, 0.0).repeat_interleave(4)[:, None].repeat(1, 8)

    def run() -> None:
        kernels.add_rms_norm(residual, delta, weight, EPS, normed)
        kernels.silu_and_multiply(gate_up, activated)
        kernels.rotate_and_store(qkv, table, slots, q, *pools)
        states.gather_folded(q, rows, 8, folded)
        partials = (folded, lse, q[:0], lse.view(-1, 32)[:0])
        states.finish_states(q, *pools, slots, lens, *partials, indptr, rows, 128**-0.5, merged)

    return run, [residual, delta, gate_up, qkv], [residual, normed, activated, q, pools, folded, merged]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 8192])
def test_a_graph_captures_all_of_them(num_tokens: int) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        run, inputs, outputs = layer_of_kernels(num_tokens)
        run()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        fresh = [torch.randn_like(tensor) for tensor in inputs]
        results = []
        for call in (run, graph.replay):
            for tensor, content in zip(inputs, fresh, strict=True):
                tensor.copy_(content)
            for tensor in outputs[1:]:
                tensor.zero_()
            call()
            results.append([tensor.clone() for tensor in outputs])
        for eager, replayed in zip(*results, strict=True):
            assert torch.equal(eager, replayed)
            assert replayed.any()
        *_, q, pools, folded, merged = results[1]
        assert torch.equal(folded, fold(q, 8))
        assert torch.equal(merged[1::2], q[1::2])
        heads = fresh[3].view(num_tokens, 48, 128)  # in inputs[3] keys are rotated by now
        assert torch.equal(merged[::2], heads[::2, 40:].repeat_interleave(4, 1))
        table = Rotary(Rope(), 128, heads.device).table(torch.arange(num_tokens), torch.bfloat16)
        expected = rotated(heads[:, :40], table, None)
        assert torch.equal(pools[1, 1 : num_tokens + 1], heads[:, 40:])
        for ours, definition in ((q, expected[:, :32]), (pools[0, 1 : num_tokens + 1], expected[:, 32:])):
            torch.testing.assert_close(ours, definition, rtol=2.0**-7, atol=2.0**-5)


@pytest.mark.gpu
def test_another_number_of_tokens_or_slots_compiles_and_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = importlib.import_module("triton")
    with torch.device("cuda"):
        layer_of_kernels(16)[0]()
        compiled: list[object] = []
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(1))
        for num_tokens in (1, 2, 17, 300):
            run, _, _ = layer_of_kernels(num_tokens)
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            run()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert not compiled
