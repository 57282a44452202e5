"""Attention over one span, and merging spans."""

import pytest
import torch

from p99lab.engine.attention.softmax import attend_fused_cpu, attend_plain, merge


def _tensors(b: int, t: int, s: int, q_heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(b + t + s)
    shapes = (b, t, q_heads, dim), (b, s, kv_heads, dim), (b, s, kv_heads, dim)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("t", [1, 7, 40])
def test_plain_is_torch_attention(q_heads: int, kv_heads: int, t: int) -> None:
    q, k, v = _tensors(2, t, t, q_heads, kv_heads, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    out, _ = attend_plain(q, k, v, causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize(("b", "t", "s"), [(1, 1, 70), (1, 33, 129), (3, 1, 64), (2, 5, 17)])
def test_fused_equals_plain(q_heads: int, kv_heads: int, b: int, t: int, s: int) -> None:
    q, k, v = _tensors(b, t, s, q_heads, kv_heads, 16)
    for actual, expected in zip(attend_fused_cpu(q, k, v), attend_plain(q, k, v), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("t", [2, 64, 301])
def test_fused_causal_equals_plain(t: int) -> None:
    q, k, v = _tensors(1, t, t, 6, 2, 16)
    for actual, expected in zip(
        attend_fused_cpu(q, k, v, causal=True), attend_plain(q, k, v, causal=True), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("attend", [attend_fused_cpu, attend_plain])
def test_masked_keys_do_not_count(attend) -> None:
    q, k, v = _tensors(3, 1, 40, 6, 2, 16)
    lengths = [1, 17, 40]
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    out, lse = attend(q, k, v, key_mask=mask)
    for i, length in enumerate(lengths):
        expected, expected_lse = attend_plain(q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length])
        torch.testing.assert_close(out[i : i + 1], expected)
        torch.testing.assert_close(lse[i : i + 1], expected_lse)


@pytest.mark.parametrize("cut", [1, 20, 63])
def test_merging_two_spans_is_attending_to_both(cut: int) -> None:
    q, k, v = _tensors(1, 5, 64, 4, 2, 16)
    whole, whole_lse = attend_plain(q, k, v)
    merged, merged_lse = merge(*attend_plain(q, k[:, :cut], v[:, :cut]), *attend_plain(q, k[:, cut:], v[:, cut:]))
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, whole_lse)


def test_merging_into_nothing_keeps_the_other_exactly() -> None:
    q, k, v = _tensors(1, 5, 64, 4, 2, 16)
    out, lse = attend_plain(q, k, v)
    merged, merged_lse = merge(torch.zeros_like(out), torch.full_like(lse, -torch.inf), out, lse)
    assert torch.equal(merged, out)
    assert torch.equal(merged_lse, lse)
