"""Paged attention on CUDA: FlashInfer's FA3 kernel over the spans of a step, all of them in one launch a layer.

The kernel (FlashAttention-3, arXiv 2407.08608, in FlashInfer's ragged form) works through a list of items: a tile of
query rows, a head, a run of keys. Three things make it fit here. The query heads of a kv head are folded into rows, so
that a tile of 128 rows is filled by 32 tokens of a model with four query heads to a kv head, and keys are read once for
all of them. Long runs are cut into segments, items of their own, so that few rows still occupy every multiprocessor.
And an item's keys may lie anywhere in the pool, so shared prefixes and private parts are items of one launch. What a
row of several tokens sees of its own is causal and takes a second launch. docs/log.md has the measurements.

The lists lie in device memory: a captured launch reads whatever list is there, so one graph serves every step of its
shape (see `GraphShape`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from p99lab.engine.attention.base import GraphShape
from p99lab.engine.attention.spans import SpanPlan, plan_spans, token_slots
from p99lab.engine.geometry import Geometry
from p99lab.engine.kernels import rotate_and_store
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import StepPlan
from p99lab.engine.request import IntArray
from p99lab.engine.rope import HeadNorms
from p99lab.engine.staging import ALIGNMENT, upload
from p99lab.engine.state_kernels import gather_folded, merge_states

HEAD_DIMS = (64, 128)
TILE_ROWS = {64: 192, 128: 128}  # query rows of an item, by head dimension
KEY_BLOCK = 192  # keys that an item reads at a time
INT_WORKSPACE_BYTES = 32 << 20  # 28 bytes an item: more than a million of them
ITEM_ARRAYS = 7
FLOAT_WORKSPACE_BYTES = 1 << 20  # FA3 has no split keys of its own and uses none of it

SEGMENT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # into which the longest span may be cut
ITEM_OVERHEAD_KEYS = 256  # what beginning and ending an item costs, in keys read
LEAST_GAIN = 0.04  # for which spans are cut further

Plan = Sequence[int]  # where in its workspace the kernel finds its lists


@dataclass(frozen=True, slots=True)
class Planned:
    """A step's lists on the device."""

    slots: torch.Tensor  # [T]
    tokens: torch.Tensor  # [M]
    merge_indptr: torch.Tensor  # [T + 1]
    merge_rows: torch.Tensor
    spans: Plan | None  # None: no token has anything but its own row's new tokens
    causal: Plan | None


class FlashInferAttention:
    """`AttentionBackend` over a `KVPool` on a Hopper GPU. Steps are planned, and run, on the current stream.

    A step may be planned while the one before it runs: lists reach the device in stream order, and the pinned buffers
    that FlashInfer copies them from are used by turns (it knows of one only: mini-sglang 103). So at most two steps may
    be on their way.
    Use it only where `unsupported` has no objection.
    """

    def __init__(self, pool: KVPool, geometry: Geometry) -> None:
        device, dtype = pool.k.device, pool.k.dtype
        self._keys = pool.k.flatten(1, 2)  # [layers, slots, kv_heads, dim]
        self._values = pool.v.flatten(1, 2)
        self._page_size = pool.page_size
        self._num_q, self._num_kv = geometry.num_q_heads, geometry.num_kv_heads
        self._group = self._num_q // self._num_kv
        self._num_slots_at_once = torch.cuda.get_device_properties(device).multi_processor_count
        self._tile_tokens = TILE_ROWS[geometry.head_dim] // self._group
        self._scale = geometry.head_dim**-0.5
        module = _module(dtype, geometry.head_dim)
        self._spans = ItemLists(module, self._num_kv, self._num_kv, geometry.head_dim, causal=False, device=device)
        self._causal = ItemLists(module, self._num_q, self._num_kv, geometry.head_dim, causal=True, device=device)
        self._device = device
        self._planned: Planned | None = None

    def plan(self, step: StepPlan) -> None:
        """Lists for exactly this step."""
        spans = plan_spans(step, self._page_size, self._segment_tokens)
        slots = token_slots(step, self._page_size)
        arrays = [slots, spans.tokens, spans.merge_indptr, spans.merge_rows]
        slots_there, tokens, merge_indptr, merge_rows = upload(arrays, self._device)
        self._planned = Planned(
            slots_there,
            tokens,
            merge_indptr,
            merge_rows,
            spans=self._spans.plan(spans.span_indptr * self._group, spans.key_starts, spans.num_keys),
            causal=self._causal.plan(spans.causal_indptr, spans.causal_indptr[:-1], spans.causal_lens),
        )

    def list_elements(self, shape: GraphShape) -> int:
        """See `GraphAttention`."""
        sizes = (shape.num_tokens, shape.num_partials, shape.num_tokens + 1, shape.num_partials)
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def plan_graph(self, step: StepPlan, shape: GraphShape, target: torch.Tensor) -> bool:
        """See `GraphAttention`."""
        spans = plan_spans(step, self._page_size, self._segment_tokens)
        if spans.num_partials > shape.num_partials or spans.has_causal:
            return False
        rest = shape.num_partials - len(spans.num_keys)  # spans without rows: the lists must lie as they lay at capture
        plan = self._spans.plan(
            np.pad(spans.span_indptr * self._group, (0, rest), mode="edge"),
            np.pad(spans.key_starts, (0, rest)),
            np.pad(spans.num_keys, (0, rest)),
            num_rows=shape.num_partials * self._group,
        )
        arrays = _padded(token_slots(step, self._page_size), spans, shape)
        slots, tokens, merge_indptr, merge_rows = upload(arrays, self._device, target)
        self._planned = Planned(slots, tokens, merge_indptr, merge_rows, plan, None)
        return True

    def _segment_tokens(self, levels: Sequence[tuple[int, int]]) -> int:
        items = [(-(-tokens // self._tile_tokens) * self._num_kv, num_keys) for tokens, num_keys in levels]
        return segment_len(items, self._num_slots_at_once)

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """See `LayerAttention`."""
        planned = self._planned
        assert planned is not None
        num_q, num_kv = self._num_q, self._num_kv
        q = heads.new_empty(len(heads), num_q, heads.shape[2])
        weights = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        rotate_and_store(heads.flatten(1), table, planned.slots, q, self._keys[layer], self._values[layer], *weights)
        causal_out, causal_lse = q.new_empty(0, num_q, q.shape[2]), q.new_empty(0, num_q, dtype=torch.float32)
        if planned.causal is not None:
            k, v = heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
            causal_out, causal_lse = self._causal.run(planned.causal, q, k, v, self._scale)
            if planned.spans is None:
                return causal_out
        assert planned.spans is not None
        folded = gather_folded(q, planned.tokens, num_kv)
        out, lse = self._spans.run(planned.spans, folded, self._keys[layer], self._values[layer], self._scale)
        merge = (planned.merge_indptr, planned.merge_rows)
        return merge_states(out, lse, causal_out, causal_lse, *merge, base2=True, folded=True)


class ItemLists:
    """The kernel for one way of looking at heads and mask, with the workspaces that its lists lie in."""

    def __init__(
        self,
        module: SimpleNamespace,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool,
        device: torch.device,
    ) -> None:
        self._module = module
        self._num_heads, self._num_kv_heads, self._head_dim, self._causal = num_heads, num_kv_heads, head_dim, causal
        self._floats = torch.empty(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ints = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._unused = torch.empty(1, dtype=torch.int32, device=device)  # FA3 reads the lists alone

    def plan(
        self, row_indptr: IntArray, key_starts: IntArray, num_keys: IntArray, num_rows: int | None = None
    ) -> Plan | None:
        """Distribute spans over the multiprocessors, longest first. None: there are no spans.

        Args:
            row_indptr: [B + 1], query rows of each span.
            key_starts, num_keys: [B].
            num_rows: lay the lists out for so many rows and this B, whatever the spans are, as a graph needs it.
        """
        if len(num_keys) == 0:
            return None
        total = int(row_indptr[-1]) if num_rows is None else num_rows
        num_items = -(-total // TILE_ROWS[self._head_dim]) + len(num_keys)
        assert ITEM_ARRAYS * 4 * num_items * (self._num_heads if num_items <= 4096 else 1) < INT_WORKSPACE_BYTES - 65536
        self._pinned.reverse()
        indptr, starts, lens = (torch.from_numpy(np.ascontiguousarray(x)) for x in (row_indptr, key_starts, num_keys))
        workspaces = (self._floats, self._ints, self._pinned[0])
        sizes = (total, len(num_keys), self._num_heads, self._num_kv_heads, 1, num_rows is not None)
        plan: Plan = self._module.plan(
            *workspaces, indptr, starts, lens, *sizes, self._head_dim, self._head_dim, self._causal, -1
        )
        return plan

    def run(
        self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q: [rows, heads, dim]; k, v: [keys, kv_heads, dim]. Returns out like q, and lse [rows, heads], in base 2."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        mask_mode, layout, window, pdl = int(self._causal), 0, -1, False
        options = (None,) * 6  # masks, slopes and items that these kernels are built without
        self._module.ragged_run(
            self._floats, self._ints, plan, q, k, v, self._unused, self._unused, out, lse,
            mask_mode, layout, window, pdl, *options, 0.0, scale, 1.0, 1e4, 0,
        )  # fmt: skip
        return out, lse


def segment_len(items: Sequence[tuple[int, int]], num_processors: int) -> int:
    """Into how long segments to cut spans so that all multiprocessors end at about the same time.

    Args:
        items: how many items each span is, uncut, and how many keys each of them has.
    """
    longest = max(num_keys for _, num_keys in items)
    total = sum(count * num_keys for count, num_keys in items)
    best, least = longest, float("inf")
    for parts in SEGMENT_COUNTS:
        segment = -(-longest // (parts * KEY_BLOCK)) * KEY_BLOCK
        num_items = sum(count * -(-num_keys // segment) for count, num_keys in items)
        num_long = sum(count * round(num_keys / segment) for count, num_keys in items)
        rounds = -(-max(num_long, 1) // num_processors)
        makespan = max(rounds * segment, total / num_processors) + ITEM_OVERHEAD_KEYS * num_items / num_processors
        if makespan < least * (1 - LEAST_GAIN):
            best, least = segment, makespan
    return best


def unsupported(device: torch.device, dtype: torch.dtype, geometry: Geometry) -> str | None:
    """Why this backend cannot be used here, in one line; None: it can."""
    if device.type != "cuda":
        return f"it needs a GPU, the device is '{device}'"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"its kernels are for Hopper GPUs, this is {torch.cuda.get_device_name(device)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels are for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if geometry.head_dim not in HEAD_DIMS:
        return f"its kernels are for heads of 64 and 128 dimensions, not {geometry.head_dim}"
    try:
        _module(dtype, geometry.head_dim)
    except Exception as error:  # not installed, or its kernel can be neither found nor compiled
        return f"FlashInfer cannot be used ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None


def _module(dtype: torch.dtype, head_dim: int) -> SimpleNamespace:
    """FlashInfer's FA3 kernels, below its wrappers: those only know key ranges that follow each other."""
    from flashinfer.prefill import get_batch_prefill_module

    no_options = (0, False, False, False, False)  # position encoding, window, soft cap, fp16 reduction, scales
    module: SimpleNamespace = get_batch_prefill_module(
        "fa3", dtype, dtype, dtype, torch.int32, head_dim, head_dim, *no_options
    )
    return module


def _padded(slots: IntArray, spans: SpanPlan, shape: GraphShape) -> list[IntArray]:
    """A step's index arrays at the sizes of a shape: missing tokens store nothing and are merged from nothing."""
    num_missing = shape.num_tokens - len(slots)
    return [
        np.pad(slots, (0, num_missing), constant_values=-1),
        np.pad(spans.tokens, (0, shape.num_partials - len(spans.tokens)), constant_values=-1),
        np.pad(spans.merge_indptr, (0, num_missing), mode="edge"),
        np.pad(spans.merge_rows, (0, shape.num_partials - len(spans.merge_rows))),
    ]
