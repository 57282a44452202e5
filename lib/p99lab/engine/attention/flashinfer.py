"""Paged attention on CUDA, as `spans` shares out a step: FlashInfer's FA3, a decode kernel, and one that merges.

FA3 (FlashAttention-3, arXiv 2407.08608, in FlashInfer's ragged form) works through a list of items: a tile of query
rows, a head, a run of keys. Three things make it fit shared prefixes. The query heads of a kv head are folded into
rows, so that a tile of 128 rows is filled by 32 tokens of a model with four query heads to a kv head, and keys are read
once for all of them. Long spans are cut into segments, items of their own, so that few rows still occupy every
multiprocessor. And an item's keys may lie anywhere in the pool. What a row of several tokens sees of its own is causal
and takes a second launch. A few decode rows over long spans fill no such tile: `decode_kernel` has smaller ones.
docs/log.md has the measurements.

All lists lie in device memory: a captured launch reads whatever list is there, so one graph serves every step that fits
its shape (see `GraphShape`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import torch

from p99lab.engine.attention.base import AttentionBackend, GraphShape
from p99lab.engine.attention.lists import Lists, Room, lists_of, padded
from p99lab.engine.attention.page_tables import FA3_TILE_TOKENS, fa3_list_bytes
from p99lab.engine.attention.spans import SegmentTokens, SpanPlan, Split, max_partials, plan_spans
from p99lab.engine.decode_kernel import BLOCK_ROWS, Tiling, attend_decode_spans
from p99lab.engine.geometry import Geometry
from p99lab.engine.kernels import rotate_and_store
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import StepPath, StepPlan
from p99lab.engine.request import IntArray
from p99lab.engine.rope import HeadNorms
from p99lab.engine.staging import ALIGNMENT, upload
from p99lab.engine.state_kernels import finish_states, gather_folded, merge_states

VERSION = "0.7.4"  # of FlashInfer: its kernels are called below its API, see `_module`
FLOAT_WORKSPACE_BYTES = 1 << 20  # FA3 has no split keys of its own and uses none of it

PROGRAMS_PER_PROCESSOR = 2  # of the decode kernel: with three blocks of 64 keys each they fill its shared memory
TILING = Tiling(block_keys=64, num_stages=3, num_warps=4)

Plan = Sequence[int]  # where in its workspace the kernel finds its lists


@dataclass(frozen=True, slots=True)
class Planned:
    """A step's lists on the device, and who has something to do."""

    lists: Lists
    spans: Plan | None
    causal: Plan | None
    num_span_partials: int
    block_rows: int  # of the decode spans' tiles; 0: there are no such spans
    has_private: bool


class FlashInferAttention:
    """`AttentionBackend` over a `KVPool` on a Hopper GPU. Steps are planned, and run, on the current stream.

    A step may be planned while the one before it runs: lists reach the device in stream order, and the pinned buffers
    that FlashInfer copies them from are used by turns (it knows of one only: mini-sglang 103). So at most two steps may
    be on their way.

    Use it only where `unsupported` has no objection.

    Args:
        segment_tokens: how long the segments of a step's spans may be.
        paged: takes the steps whose page tables lie in too many pieces, see `plan_spans`.
        max_num_tokens: of a step, captured ones included. Larger ones find their workspaces too small, and raise.
    """

    def __init__(
        self,
        pool: KVPool,
        geometry: Geometry,
        segment_tokens: SegmentTokens,
        paged: AttentionBackend,
        max_num_tokens: int,
    ) -> None:
        device, dtype = pool.k.device, pool.k.dtype
        self._keys = pool.k.flatten(1, 2)  # [layers, slots, kv_heads, dim]
        self._values = pool.v.flatten(1, 2)
        self._page_size = pool.page_size
        self._num_q, self._num_kv = geometry.num_q_heads, geometry.num_kv_heads
        self._gqa_ratio = self._num_q // self._num_kv
        self._scale = geometry.head_dim**-0.5
        module, dim = _module(dtype, geometry.head_dim), geometry.head_dim
        most = max_partials(max_num_tokens)  # each may be a span of its own
        rows = (most, most * self._gqa_ratio)
        self._spans = ItemLists(module, self._num_kv, self._num_kv, dim, *rows, causal=False, device=device)
        rows = (max_num_tokens, max_num_tokens)
        self._causal = ItemLists(module, self._num_q, self._num_kv, dim, *rows, causal=True, device=device)
        self._device = device
        num_programs = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        self._split = Split(segment_tokens, BLOCK_ROWS[-1] // self._gqa_ratio, max(1, num_programs // self._num_kv))
        self._paged = paged
        self._planned: Planned | None = None  # None: the step is left to `paged`

    def plan(self, step: StepPlan) -> StepPath:
        """Lists for exactly this step."""
        return self._plan_eagerly(step, plan_spans(step, self._page_size, self._split))

    def _plan_eagerly(self, step: StepPlan, spans: SpanPlan | None) -> StepPath:
        if spans is None:
            self._planned = None
            self._paged.plan(step)
            return StepPath.FALLBACK
        lists = upload(lists_of(step, spans, self._page_size), self._device)
        self._planned = Planned(
            Lists(*lists),
            self._spans.plan(spans.span_indptr * self._gqa_ratio, spans.key_starts, spans.num_keys),
            self._causal.plan(spans.causal_indptr, spans.causal_indptr[:-1], spans.causal_lens),
            spans.num_span_partials,
            self._block_rows(int(spans.items[:, 1].max(initial=0))),
            bool(spans.private_lens.any()),
        )
        return StepPath.EAGER

    def list_elements(self, shape: GraphShape) -> int:
        """See `GraphAttention`."""
        sizes = Room.of(shape, self._split).sizes
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)

    def plan_graph(self, step: StepPlan, graphs: Sequence[tuple[GraphShape, torch.Tensor]]) -> int | StepPath:
        """See `GraphAttention`."""
        spans = plan_spans(step, self._page_size, self._split)
        for place, (shape, target) in enumerate(graphs):
            room = Room.of(shape, self._split)
            if spans is not None and room.holds(spans):
                self._plan_into(room, lists_of(step, spans, self._page_size), spans, target)
                return place
        return self._plan_eagerly(step, spans)

    def _plan_into(self, room: Room, lists: Lists, spans: SpanPlan, target: torch.Tensor) -> None:
        there = upload(padded(lists, spans, room), self._device, target)
        shared = _more_spans(
            spans.span_indptr * self._gqa_ratio, spans.key_starts, spans.num_keys, room.num_span_partials
        )
        causal = _more_spans(spans.causal_indptr, spans.causal_indptr[:-1], spans.causal_lens, room.num_causal)
        self._planned = Planned(
            Lists(*there),
            self._spans.plan(*shared, num_rows=room.num_span_partials * self._gqa_ratio),
            self._causal.plan(*causal, num_rows=room.num_tokens),
            room.num_span_partials,
            self._block_rows(room.num_tokens),
            has_private=True,
        )

    def _block_rows(self, num_tokens: int) -> int:
        """The smallest tile that holds the rows of so many tokens, or the largest there is; 0 for none."""
        num_rows = num_tokens * self._gqa_ratio
        return next((size for size in BLOCK_ROWS if num_rows <= size), BLOCK_ROWS[-1]) if num_rows else 0

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """See `LayerAttention`."""
        planned = self._planned
        if planned is None:
            return self._paged.attend(layer, heads, table, norms)
        lists = planned.lists
        num_q, num_kv = self._num_q, self._num_kv
        q = heads.new_empty(len(heads), num_q, heads.shape[2])
        weights = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        keys, values = self._keys[layer], self._values[layer]
        rotate_and_store(heads.flatten(1), table, lists.slots, q, keys, values, *weights)
        causal = _room_for_partials(q, 0, num_q)
        if planned.causal is not None:
            causal = _room_for_partials(q, len(q), num_q)
            own = (heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :])
            self._causal.run(planned.causal, q, *own, self._scale, *causal)
        partial = _room_for_partials(q, len(lists.tokens) * self._gqa_ratio, num_kv)
        if planned.spans is not None:
            folded = gather_folded(q, lists.tokens[: planned.num_span_partials], num_kv)
            self._spans.run(planned.spans, folded, keys, values, self._scale, *(x[: len(folded)] for x in partial))
        if planned.block_rows:
            decode = (lists.tokens, lists.items.view(-1, 4), lists.lane_indptr)
            attend_decode_spans(
                q, keys, values, *decode, *partial, self._scale, block_rows=planned.block_rows, tiling=TILING
            )
        merge = (lists.merge_indptr, lists.merge_rows)
        attended: torch.Tensor
        if planned.has_private:
            private = (lists.private_starts, lists.private_lens)
            attended = finish_states(q, keys, values, *private, *partial, *causal, *merge, self._scale)
        elif len(lists.tokens):
            attended = merge_states(*partial, *causal, *merge)
        else:
            attended = causal[0]
        return attended


class ItemLists:
    """The kernel for one way of looking at heads and mask, with the workspaces that its lists lie in.

    Of a step there are at most `max_num_spans` spans, of `max_num_rows` query rows in all.
    """

    def __init__(
        self,
        module: SimpleNamespace,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_num_spans: int,
        max_num_rows: int,
        causal: bool,
        device: torch.device,
    ) -> None:
        self._module = module
        self._num_heads, self._num_kv_heads, self._head_dim, self._causal = num_heads, num_kv_heads, head_dim, causal
        self._floats = torch.empty(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_bytes = fa3_list_bytes(max_num_spans, max_num_rows, num_heads, head_dim, num_processors)
        self._ints = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._pinned = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
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
        self._pinned.reverse()
        indptr, starts, lens = (torch.from_numpy(np.ascontiguousarray(x)) for x in (row_indptr, key_starts, num_keys))
        workspaces = (self._floats, self._ints, self._pinned[0])
        sizes = (total, len(num_keys), self._num_heads, self._num_kv_heads, 1, num_rows is not None)
        plan: Plan = self._module.plan(
            *workspaces, indptr, starts, lens, *sizes, self._head_dim, self._head_dim, self._causal, -1
        )
        return plan

    def run(
        self,
        plan: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """q: [rows, heads, dim]; out like q, and lse [rows, heads] float32, in base 2.

        k, v: [keys, kv_heads, dim], keys and heads anywhere at distances of 16 bytes or multiples.
        """
        mask_mode, layout, window, pdl = int(self._causal), 0, -1, False
        options = (None,) * 6  # masks, slopes and items that these kernels are built without
        self._module.ragged_run(
            self._floats, self._ints, plan, q, k, v, self._unused, self._unused, out, lse,
            mask_mode, layout, window, pdl, *options, 0.0, scale, 1.0, 1e4, 0,
        )  # fmt: skip


def unsupported(device: torch.device, dtype: torch.dtype, geometry: Geometry) -> str | None:
    """Why this backend cannot be used here, in one line; None: it can."""
    if device.type != "cuda":
        return f"it needs a GPU, the device is '{device}'"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"its kernels are for Hopper GPUs, this is {torch.cuda.get_device_name(device)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its kernels are for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if geometry.head_dim not in FA3_TILE_TOKENS:
        return f"its kernels are for heads of 64 and 128 dimensions, not {geometry.head_dim}"
    missing = wrong_version()
    if missing is not None:
        return missing
    try:
        _module(dtype, geometry.head_dim)
    except Exception as error:  # not installed, or its kernel can be neither found nor compiled
        return f"FlashInfer cannot be used ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None


def wrong_version() -> str | None:
    """What is installed in place of the FlashInfer that this is written for, in one line; None: it is that one."""
    try:
        found = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return "the package 'flashinfer-python' is not installed (extra 'gpu')"
    if found.partition("+")[0] == VERSION:
        return None
    return f"it calls kernels of flashinfer-python=={VERSION} below its API, and {found} is installed"


def _module(dtype: torch.dtype, head_dim: int) -> SimpleNamespace:
    """FlashInfer's FA3 kernels, below its wrappers: those only know key ranges that follow each other."""
    from flashinfer.prefill import get_batch_prefill_module

    no_options = (0, False, False, False, False)  # position encoding, window, soft cap, fp16 reduction, scales
    module: SimpleNamespace = get_batch_prefill_module(
        "fa3", dtype, dtype, dtype, torch.int32, head_dim, head_dim, *no_options
    )
    return module


def _room_for_partials(q: torch.Tensor, num_rows: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, heads, dim] and their lse [rows, heads] float32."""
    return q.new_empty(num_rows, num_heads, q.shape[2]), q.new_empty(num_rows, num_heads, dtype=torch.float32)


def _more_spans(
    indptr: IntArray, starts: IntArray, lens: IntArray, num_spans: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Filled up with spans that have no rows: the kernel's lists must lie where they lay at capture."""
    missing = num_spans - len(lens)
    return np.pad(indptr, (0, missing), mode="edge"), np.pad(starts, (0, missing)), np.pad(lens, (0, missing))
