"""FlashInfer's own wrappers against attention in plain torch, over pages in no order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from p99lab.engine.attention.page_tables import FA3_MIN_TOKENS, plan_paged
from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import SamplingParams
from p99lab.engine.rope import HeadNorms, prepared

pytestmark = pytest.mark.gpu

NUM_LAYERS, EPS = 2, 1e-5
HEADS = [(4, 4, 64), (8, 2, 128), (16, 2, 64), (32, 8, 128), (14, 2, 64)]  # q, kv, dim
LONG = FA3_MIN_TOKENS + 33
STEPS = [  # rows of (computed, new) tokens
    [(0, 1), (15, 1), (16, 1), (200, 1), (1999, 1)],
    [(0, 37), (63, 2), (1500, 64), (129, FA3_MIN_TOKENS - 1)],
    [(0, FA3_MIN_TOKENS), (1000, LONG)],
    [(31, 1), (40, 5), (64, LONG), (63, 1), (130, 64), (0, LONG), (15, 1)],  # kernels take tokens from here and there
    [(31, 1), (77, 1), (40, 5), (130, 64), (64, LONG), (0, LONG)],  # each has a run of them
    [(300, 1)],
]


def _steps(num_pages: int, page_size: int) -> Iterator[StepPlan]:
    """No page belongs to two rows."""
    free = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    for shape in STEPS:
        rows = []
        for number, (computed, new) in enumerate(shape):
            table, free = np.split(free, [-(-(computed + new) // page_size)])
            ids = np.zeros(new, np.int32)
            rows.append(Row(str(number), number, ids, computed, table, True, SamplingParams(), 0))
        yield StepPlan(0, tuple(rows))


def _pool(steps: list[StepPlan], num_pages: int, page_size: int, num_kv: int, dim: int) -> KVPool:
    """Keys and values where rows have computed them; elsewhere numbers that spoil the output of whoever sees them."""
    shape = (NUM_LAYERS, num_pages, page_size, num_kv, dim)
    pool = KVPool(*(torch.full(shape, 1e4, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
    for row in (row for step in steps for row in step.rows):
        positions = np.arange(row.num_computed_tokens)
        slots = torch.from_numpy(row.page_table[positions // page_size] * page_size + positions % page_size).cuda()
        for tensor in (pool.k, pool.v):
            of_row = torch.randn(NUM_LAYERS, len(slots), num_kv, dim, device="cuda").bfloat16()
            tensor.flatten(1, 2)[:, slots.long()] = of_row
    return pool


def _geometry(num_q: int, num_kv: int, dim: int) -> Geometry:
    return Geometry(
        architecture="llama",
        num_layers=NUM_LAYERS,
        hidden_size=64,
        num_q_heads=num_q,
        num_kv_heads=num_kv,
        head_dim=dim,
        intermediate_size=64,
        vocab_size=64,
        max_position_embeddings=4096,
    )


def _table(num_tokens: int, dim: int) -> torch.Tensor:
    angles = torch.randn(num_tokens, dim // 2, device="cuda")
    return torch.stack((angles.cos(), angles.sin()), 1).bfloat16()


def _expected(
    step: StepPlan, exact: KVPool, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None
) -> torch.Tensor:
    """All layers' attention in float32, of queries, keys and values rounded as a pool in bfloat16 has them."""
    attention = ReferenceAttention(exact)
    attention.plan(step)
    outs = []
    for layer, of_layer in enumerate(heads.float()):
        parts = prepared(of_layer, exact.k.shape[3], table.float(), norms)
        outs.append(attention.run(layer, *(part.bfloat16().float() for part in parts)))
    return torch.stack(outs)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("num_q", "num_kv", "dim"), HEADS)
def test_steps_of_all_kinds_each_planned_while_the_one_before_runs(
    num_q: int, num_kv: int, dim: int, normed: bool, page_size: int
) -> None:
    from p99lab.engine.attention.paged import PagedAttention, unsupported

    torch.manual_seed(0)
    geometry = _geometry(num_q, num_kv, dim)
    assert unsupported(torch.device("cuda"), torch.bfloat16, geometry) is None
    norms = HeadNorms(*(torch.rand(dim, device="cuda") + 0.5 for _ in range(2)), EPS) if normed else None
    num_pages = 11_000 // page_size
    steps = list(_steps(num_pages, page_size))
    assert {kernel for step in steps for kernel in plan_paged(step, page_size)} == {"decode", "fa2", "fa3"}
    pool = _pool(steps, num_pages, page_size, num_kv, dim)
    exact = KVPool(pool.k.float(), pool.v.float())
    num_heads = num_q + 2 * num_kv
    inputs = [torch.randn(NUM_LAYERS, s.num_tokens, num_heads, dim, device="cuda").bfloat16() for s in steps]
    tables = [_table(step.num_tokens, dim) for step in steps]
    expected = [
        _expected(step, exact, heads, table, norms) for step, heads, table in zip(steps, inputs, tables, strict=True)
    ]

    attention = PagedAttention(pool, geometry)
    outs: list[torch.Tensor] = []
    ended: list[torch.cuda.Event] = []
    for step, heads, table in zip(steps, inputs, tables, strict=True):
        if len(ended) > 1:
            ended[-2].synchronize()
        attention.plan(step)
        outs.append(
            torch.stack([attention.attend(layer, of_layer, table, norms) for layer, of_layer in enumerate(heads)])
        )
        ended.append(torch.cuda.Event())
        ended[-1].record()
    for number, (ours, theirs) in enumerate(zip(outs, expected, strict=True)):
        torch.testing.assert_close(ours.float(), theirs, atol=2e-2, rtol=2e-2, msg=lambda m, n=number: f"step {n}: {m}")
    torch.testing.assert_close(pool.k.float(), exact.k, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(pool.v.float(), exact.v, atol=0, rtol=0)
