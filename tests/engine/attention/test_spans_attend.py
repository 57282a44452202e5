"""Attention computed through the CUDA planner's index arrays, by plain torch, against the reference backend."""

import numpy as np
import torch

from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.attention.softmax import attend_plain, merge
from p99lab.engine.attention.spans import Split, plan_spans
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import SamplingParams
from tests.engine.grouped import group_rows

PAGE_SIZE, NUM_PAGES = 4, 200


def test_attention_through_the_arrays_is_the_reference_backends() -> None:
    kv_heads, q_heads, dim = 2, 4, 8
    rows = []
    for number, (table, computed, new) in enumerate(
        [([0, 1, 2, 3, 9], 17, 1), ([0, 1, 2, 3, 12, 30, 31], 18, 7), ([0, 1, 40, 41], 9, 5), ([50, 51], 0, 6)]
    ):
        ids, pages = np.zeros(new, np.int32), np.array(table, np.int32)
        rows.append(Row(str(number), number, ids, computed, pages, True, SamplingParams(), 0))
    step = StepPlan(0, tuple(rows), group_rows(rows, PAGE_SIZE, 1))
    assert len(step.groups) == 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shape = (1, NUM_PAGES, PAGE_SIZE, kv_heads, dim)
    pool = KVPool(random(*shape), random(*shape))
    q, k, v = random(step.num_tokens, q_heads, dim), *(random(step.num_tokens, kv_heads, dim) for _ in range(2))
    reference = ReferenceAttention(pool)
    reference.plan(step)
    expected = reference.run(0, q, k, v)

    plan = plan_spans(step, PAGE_SIZE, Split(lambda levels: 6))
    keys, values = (pool_of[0].flatten(0, 1) for pool_of in (pool.k, pool.v))
    partials = []
    for span, tokens in enumerate(np.split(plan.tokens, plan.span_indptr[1:-1])):
        at = slice(int(plan.key_starts[span]), int(plan.key_starts[span] + plan.num_keys[span]))
        out, lse = attend_plain(q[None, tokens], keys[None, at], values[None, at])
        partials += list(zip(out[0], lse[0], strict=True))
    empty = (torch.zeros(q_heads, dim), torch.full((q_heads,), -torch.inf))
    causal = [empty] * step.num_tokens
    for start, stop, num_keys in zip(plan.causal_indptr, plan.causal_indptr[1:], plan.causal_lens, strict=False):
        if num_keys:
            out, lse = attend_plain(*(x[None, start:stop] for x in (q, k, v)), causal=True)
            causal[start:stop] = list(zip(out[0], lse[0], strict=True))
    for token in range(step.num_tokens):
        total = empty
        for row in plan.merge_rows[plan.merge_indptr[token] : plan.merge_indptr[token + 1]]:
            total = merge(*total, *(partials + causal)[row])
        if plan.private_lens[token]:
            at = slice(int(plan.private_starts[token]), int(plan.private_starts[token] + plan.private_lens[token]))
            out, lse = attend_plain(q[None, token : token + 1], keys[None, at], values[None, at])
            total = merge(*total, out[0, 0], lse[0, 0])
        torch.testing.assert_close(total[0], expected[token])
