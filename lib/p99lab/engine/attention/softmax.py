"""Attention of queries over one span of keys, with its log-sum-exp, so that spans can be attended to apart and merged.

Splitting a softmax over spans of keys and merging by log-sum-exp is exact: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018); FlashAttention (Dao et al. 2022) and Hydragen (Juravsky et al. 2024) build on it.
All log-sum-exps here are natural logarithms.
"""

from __future__ import annotations

import torch

Attended = tuple[torch.Tensor, torch.Tensor]  # out [B, T, q_heads, dim], lse [B, T, q_heads] float32


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, key_mask: torch.Tensor | None = None
) -> Attended:
    """Scaled dot-product attention with grouped heads, on any device.

    Args:
        q: [B, T, q_heads, dim].
        k, v: [B, S, kv_heads, dim], q_heads a multiple of kv_heads; any strides as long as dim is contiguous.
        causal: query t sees keys 0 … t; needs T == S.
        key_mask: [B, S] bool, True where the key may be seen; every batch entry needs at least one.
    """
    fused = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return (attend_fused_cpu if fused else attend_plain)(q, k, v, causal=causal, key_mask=key_mask)


def attend_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, key_mask: torch.Tensor | None = None
) -> Attended:
    """`attend` by its definition, scores in float32: the oracle."""
    b, t, q_heads, dim = q.shape
    s, kv_heads = k.shape[1:3]
    folded = q.view(b, t, kv_heads, -1, dim).float()
    scores = torch.einsum("btkgd,bskd->btkgs", folded, k.float()) * dim**-0.5
    if causal:
        hidden = torch.ones(t, s, dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden[None, :, None, None], -torch.inf)
    if key_mask is not None:
        scores.masked_fill_(~key_mask[:, None, None, None], -torch.inf)
    lse = scores.logsumexp(-1)  # [B, T, kv_heads, gqa_ratio]
    out = torch.einsum("btkgs,bskd->btkgd", (scores - lse[..., None]).exp(), v.float())
    return out.reshape(b, t, q_heads, dim).to(q.dtype), lse.reshape(b, t, q_heads)


def attend_fused_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, key_mask: torch.Tensor | None = None
) -> Attended:
    """`attend` by torch's blocked CPU kernel: `scaled_dot_product_attention` calls the same one but drops the lse.

    Without a causal mask all queries of a kv head see the same keys, so its query heads are folded into rows. With
    one, the kernel numbers rows to place the mask: kv heads become its batch (B must be 1), query heads its heads.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    b, t, q_heads, dim = q.shape
    kv_heads = k.shape[2]
    gqa_ratio = q_heads // kv_heads
    grouped = q.view(b, t, kv_heads, gqa_ratio, dim)
    if causal:
        heads = grouped[0].permute(1, 2, 0, 3)  # [kv_heads, gqa_ratio, T, dim]
        keys, values = (x[0].transpose(0, 1)[:, None].expand(-1, gqa_ratio, -1, -1) for x in (k, v))
        out, lse = kernel(heads, keys, values, is_causal=True)
        return out.permute(2, 0, 1, 3).reshape(1, t, q_heads, dim), lse.permute(2, 0, 1).reshape(1, t, q_heads)
    folded = grouped.transpose(1, 2).reshape(b, kv_heads, t * gqa_ratio, dim)
    bias = None
    if key_mask is not None:
        bias = torch.zeros(key_mask.shape, dtype=q.dtype).masked_fill_(~key_mask, -torch.inf)[:, None, None]
    out, lse = kernel(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
    out = out.reshape(b, kv_heads, t, gqa_ratio, dim).transpose(1, 2).reshape(b, t, q_heads, dim)
    return out, lse.reshape(b, kv_heads, t, gqa_ratio).transpose(1, 2).reshape(b, t, q_heads)


def merge(out: torch.Tensor, lse: torch.Tensor, more_out: torch.Tensor, more_lse: torch.Tensor) -> Attended:
    """The attention over two disjoint spans of keys from the attention over each.

    out, more_out: [..., dim] · lse, more_lse: [...]. A span without keys has lse -inf; one of the two must have keys.
    """
    total = torch.logaddexp(lse, more_lse)
    merged = out * (lse - total).exp_()[..., None] + more_out * (more_lse - total).exp_()[..., None]
    return merged, total
