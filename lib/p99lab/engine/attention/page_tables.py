"""A step's attention row by row, each over its own page table: index arrays for FlashInfer's paged kernels.

Nothing is shared between rows here: it is how a step is attended to without prefix groups. Which kernel answers for a
row follows from its number of new tokens. Bounds on what the kernels' planners allot stand here too: they follow from
the same lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import IntArray

Kernel = Literal["decode", "fa2", "fa3"]

FA3_MIN_TOKENS = 256
"""New tokens of a row from which FA3 attends for it; below FA2.

Measured on an H200, a layer of 32 query heads on 8 over 128K keys, milliseconds of FA2 and FA3: one row of 64 tokens
0.43 and 1.76, four 1.60 and 1.81, sixteen 6.3 and 8.0; four rows of 256 tokens 6.8 and 3.6, of 1 024 24.9 and 16.2. FA2
folds the query heads of a kv head into rows and splits keys. FA3 does neither, but is 1.5 times as fast where its tiles
of 128 tokens are full. So FA2's time follows the tokens, and FA3 needs 1.8 for as many tiles as there are
multiprocessors for all their heads (four here) or for one alone: for a row by itself they meet at about 260 tokens.
Among many rows they would at about 80; that is not made use of.
"""

FA2_TILE_ROWS = 128  # folded query rows of an item, at most: then 64 or 16, by the mean of a step's rows
FA3_TILE_TOKENS = {64: 192, 128: 128}  # query tokens of an item, by head dimension
FA2_ITEM_BYTES = 3 * 4  # row, tile, chunk of keys
FA3_ITEM_BYTES = 7 * 4
FA3_TILES_WITH_HEADS = 4096  # tiles up to which FA3's list has an item for each of their heads; above, one for all
ALIGNMENT_BYTES = 16 * 16  # arrays of a workspace begin at 16 bytes each, and there are fewer than 16


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The R rows of a step, n tokens in all, that one kernel attends for. int32 each; page tables as FlashInfer lays
    them out (https://docs.flashinfer.ai/tutorials/kv_layout.html)."""

    tokens: IntArray  # [n], which of the step's tokens these are, row by row
    qo_indptr: IntArray  # [R + 1], where each row's tokens begin among them
    kv_indptr: IntArray  # [R + 1], where each row's pages begin
    kv_indices: IntArray  # [kv_indptr[-1]], pages
    last_page_len: IntArray  # [R], keys in the row's last page, its own new tokens included: 1 to page_size


def plan_paged(step: StepPlan, page_size: int) -> dict[Kernel, PagedRows]:
    """The rows of a step by the kernel that attends for them; kernels without any are left out, groups are not used."""
    lengths = np.array([len(row.token_ids) for row in step.rows], np.int32)
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    by_kernel: dict[Kernel, list[int]] = {}
    for index, num_tokens in enumerate(lengths.tolist()):
        by_kernel.setdefault(kernel_of(num_tokens), []).append(index)
    return {
        kernel: _paged_rows([step.rows[i] for i in indices], starts[indices], lengths[indices], page_size)
        for kernel, indices in by_kernel.items()
    }


def kernel_of(num_tokens: int) -> Kernel:
    """What attends for a row of so many new tokens."""
    if num_tokens == 1:
        return "decode"
    return "fa3" if num_tokens >= FA3_MIN_TOKENS else "fa2"


def _paged_rows(rows: Sequence[Row], starts: IntArray, lengths: IntArray, page_size: int) -> PagedRows:
    qo_indptr = _indptr(lengths)
    seq_lens = np.array([row.seq_len for row in rows], np.int32)
    return PagedRows(
        tokens=np.arange(qo_indptr[-1], dtype=np.int32) + np.repeat(starts - qo_indptr[:-1], lengths),
        qo_indptr=qo_indptr,
        kv_indptr=_indptr(-(-seq_lens // page_size)),
        kv_indices=np.concatenate([row.page_table for row in rows]),
        last_page_len=(seq_lens - 1) % page_size + 1,
    )


def _indptr(counts: IntArray) -> IntArray:
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def fa3_list_bytes(num_spans: int, num_tokens: int, num_heads: int, head_dim: int, num_processors: int) -> int:
    """Bytes that `PrefillSM90Plan` allots at most, also for a graph, to up to `num_spans` spans of query tokens.

    Args:
        num_tokens: of all spans together.
        num_processors: streaming multiprocessors.
    """
    num_tiles = num_spans + num_tokens // FA3_TILE_TOKENS[head_dim]
    num_items = max(num_tiles, min(num_tiles, FA3_TILES_WITH_HEADS) * num_heads)
    return num_items * FA3_ITEM_BYTES + (num_processors + 1) * 4 + ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Bytes that FlashInfer's planners (`PrefillPlan`, `PrefillSM90Plan` of its scheduler.cuh) allot at most.

    They raise where a workspace is too small, in the midst of a run; so these are bounds for every step of a model on a
    device, for up to `max_num_rows` rows and, in all, `max_num_tokens` new tokens.
    """

    num_processors: int  # streaming multiprocessors
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_num_rows: int
    max_num_tokens: int

    @property
    def float_bytes(self) -> int:
        """FA2's partial results: float32 outputs and log-sum-exps of all query heads. FA3 has none.

        Keys are split only while every item finds a place in two blocks on each multiprocessor, so their number is
        known beforehand, whatever the step.
        """
        num_tokens = -(-self._max_split_items * FA2_TILE_ROWS // self._gqa_ratio)
        return num_tokens * self.num_q_heads * (self.head_dim + 1) * 4 + ALIGNMENT_BYTES

    def int_bytes(self, kernel: Kernel) -> int:
        """The list of items, and indptr of rows and tokens."""
        if kernel == "fa3":
            rows = (self.max_num_rows, self.max_num_tokens)
            return fa3_list_bytes(*rows, self.num_q_heads, self.head_dim, self.num_processors)
        return self._fa2_list_bytes + ALIGNMENT_BYTES

    @property
    def _fa2_list_bytes(self) -> int:
        """A tile is chosen that the mean row fills, or 128: a last tile for every row, and as many as full ones are."""
        num_full = max(self.max_num_rows, self.max_num_tokens * self._gqa_ratio // FA2_TILE_ROWS)
        num_items = max(self._max_split_items, self.max_num_rows + num_full)
        num_split_tokens = self._max_split_items * FA2_TILE_ROWS // self._gqa_ratio
        return num_items * FA2_ITEM_BYTES + (self.max_num_rows + num_split_tokens + 3) * 4

    @property
    def _max_split_items(self) -> int:
        return 2 * self.num_processors // self.num_kv_heads

    @property
    def _gqa_ratio(self) -> int:
        return self.num_q_heads // self.num_kv_heads
