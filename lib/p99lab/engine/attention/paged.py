"""Paged attention on CUDA as FlashInfer's authors mean it: its own wrappers, every row over its own page table.

What `FlashInferAttention` is measured against: no shared prefixes, no folded heads, no graphs. Rows of one token go to
the batch decode wrapper on tensor cores, which take every head size and group that this backend does and were faster
than the CUDA-core kernel wherever measured (docs/log.md). Rows of several go to the batch prefill wrapper, by FA2 or
FA3 as `page_tables` has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from p99lab.engine.attention.flashinfer import unsupported as spans_unsupported
from p99lab.engine.attention.page_tables import Kernel, PagedRows, Workspaces, plan_paged
from p99lab.engine.attention.spans import token_slots
from p99lab.engine.config import MAX_NUM_SEQS
from p99lab.engine.geometry import Geometry
from p99lab.engine.kernels import rotate_and_store
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import StepPath, StepPlan
from p99lab.engine.request import IntArray
from p99lab.engine.rope import HeadNorms
from p99lab.engine.staging import upload

KERNELS: tuple[Kernel, ...] = ("decode", "fa2", "fa3")
LAYOUT = "NHD"  # [pages, page_size, kv_heads, dim]


@dataclass(frozen=True, slots=True)
class Part:
    """A step's tokens for which one wrapper has been planned."""

    wrapper: Any
    tokens: slice | torch.Tensor


class PagedAttention:
    """`AttentionBackend` over a `KVPool` on a Hopper GPU. Steps are planned, and run, on the current stream.

    A step may be planned while the one before it runs: of each wrapper there are two, used by turns, because one has a
    single pinned buffer that its lists are copied from (mini-sglang 103). So at most two steps may be on their way.
    Planning never waits for the device: wrappers plan from what lies on the host, and CUDA stages at once the few bytes
    a row that they copy from pageable memory.
    Use it only where `unsupported` has no objection.
    """

    def __init__(self, pool: KVPool, geometry: Geometry) -> None:
        device = pool.k.device
        self._device, self._dtype, self._page_size = device, pool.k.dtype, pool.page_size
        self._num_q = geometry.num_q_heads
        self._heads = (geometry.num_q_heads, geometry.num_kv_heads, geometry.head_dim)
        self._layers = list(zip(pool.k, pool.v, strict=True))  # [pages, page_size, kv_heads, dim] each
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        num_slots = pool.k.shape[1] * pool.page_size
        sizes = Workspaces(num_processors, *self._heads, max_num_rows=MAX_NUM_SEQS, max_num_tokens=num_slots)
        floats = torch.zeros(sizes.float_bytes, dtype=torch.uint8, device=device)  # of whichever wrapper runs
        self._wrappers = [{kernel: _wrapper(kernel, floats, sizes) for kernel in KERNELS} for _ in range(2)]
        self._slots = torch.empty(0, dtype=torch.int32, device=device)
        self._parts: list[Part] = []

    def plan(self, step: StepPlan) -> StepPath:
        """Plan one wrapper for the rows of each kind; the step's groups are not looked at."""
        self._wrappers.reverse()
        by_kernel = plan_paged(step, self._page_size)
        arrays = [array for rows in by_kernel.values() for array in (rows.tokens, rows.kv_indices)]
        self._slots, *there = upload([token_slots(step, self._page_size), *arrays], self._device)
        self._parts = [
            self._plan_part(kernel, rows, tokens, pages)
            for (kernel, rows), tokens, pages in zip(by_kernel.items(), there[::2], there[1::2], strict=True)
        ]
        return StepPath.EAGER

    def _plan_part(self, kernel: Kernel, rows: PagedRows, tokens: torch.Tensor, pages: torch.Tensor) -> Part:
        """`tokens`, `pages`: those of `rows`, on the device."""
        wrapper = self._wrappers[0][kernel]
        table = (_pinned(rows.kv_indptr), pages, _pinned(rows.last_page_len))
        options: dict[str, Any] = {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        if kernel == "decode":
            wrapper.plan(*table, *self._heads, self._page_size, **options)
        else:
            wrapper.plan(_pinned(rows.qo_indptr), *table, *self._heads, self._page_size, causal=True, **options)
        first, last = int(rows.tokens[0]), int(rows.tokens[-1])
        is_run = last - first == len(rows.tokens) - 1  # they ascend
        return Part(wrapper, slice(first, last + 1) if is_run else tokens.long())

    def attend(self, layer: int, heads: torch.Tensor, table: torch.Tensor, norms: HeadNorms | None) -> torch.Tensor:
        """See `LayerAttention`."""
        keys, values = self._layers[layer]
        q = heads.new_empty(len(heads), self._num_q, heads.shape[2])
        weights = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
        pools = (keys.flatten(0, 1), values.flatten(0, 1))  # [slots, kv_heads, dim]
        rotate_and_store(heads.flatten(1), table, self._slots, q, *pools, *weights)
        out = torch.empty_like(q)
        for part in self._parts:
            picked = q[part.tokens]
            if isinstance(part.tokens, slice):
                part.wrapper.run(picked, (keys, values), out=out[part.tokens])
            else:
                out[part.tokens] = part.wrapper.run(picked, (keys, values), out=torch.empty_like(picked))
        return out


def _wrapper(kernel: Kernel, floats: torch.Tensor, sizes: Workspaces) -> Any:
    """One of FlashInfer's wrappers, over a workspace for floats that others may use between its runs."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    if kernel == "decode":
        wrapper = BatchDecodeWithPagedKVCacheWrapper(floats, LAYOUT, use_tensor_cores=True, backend="fa2")
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(floats, LAYOUT, backend=kernel)
    ints = torch.empty(sizes.int_bytes(kernel), dtype=torch.uint8, device=floats.device)
    wrapper.reset_workspace_buffer(floats, ints)  # and a pinned buffer as large
    return wrapper


def _pinned(array: IntArray) -> torch.Tensor:
    """On the host, where wrappers plan from it, and copied from there without waiting."""
    return torch.from_numpy(array).pin_memory()


def unsupported(device: torch.device, dtype: torch.dtype, geometry: Geometry) -> str | None:
    """Why this backend cannot be used here, in one line; None: it can."""
    objection = spans_unsupported(device, dtype, geometry)
    if objection is not None:
        return objection
    from flashinfer.prefill import get_batch_prefill_module

    no_options = (0, False, False, False, False)  # position encoding, window, soft cap, fp16 reduction, scales
    try:
        get_batch_prefill_module("fa2", dtype, dtype, dtype, torch.int32, *2 * (geometry.head_dim,), *no_options)
    except Exception as error:  # its kernel can be neither found nor compiled
        return f"FlashInfer's FA2 cannot be used ({type(error).__name__}: {str(error).splitlines()[0]})"
    return None
