"""The tensors behind the pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p99lab.caches.pages import PageCopy, PageMoves
from p99lab.engine import kv_pool
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import KVPool, page_bytes

GEOMETRY = Geometry(
    architecture="llama",
    num_layers=3,
    hidden_size=32,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=16,
    vocab_size=16,
    max_position_embeddings=64,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_is_zeroed_contiguous_and_as_large_as_said(dtype: torch.dtype) -> None:
    pool = KVPool.allocate(GEOMETRY, 5, 4, dtype, CPU)
    for tensor in (pool.k, pool.v):
        assert tensor.shape == (3, 5, 4, 2, 8)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.any()
    assert pool.page_size == 4
    assert pool.k.data_ptr() != pool.v.data_ptr()
    assert pool.k.nbytes + pool.v.nbytes == 5 * page_bytes(GEOMETRY, 4, dtype)
    assert page_bytes(GEOMETRY, 4, dtype) == 4 * GEOMETRY.kv_bytes_per_token(dtype.itemsize)


def test_copies_touch_their_first_tokens_in_all_layers_and_happen_in_order() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn((3, 5, 4, 2, 8), generator=generator) for _ in range(2))
    pool = KVPool(k.clone(), v.clone())
    pool.copy_pages([PageCopy(source=0, target=3, num_tokens=2), PageCopy(source=3, target=4, num_tokens=1)])
    for before, after in ((k, pool.k), (v, pool.v)):
        expected = before.clone()
        expected[:, 3, :2] = before[:, 0, :2]
        expected[:, 4, :1] = before[:, 0, :1]
        torch.testing.assert_close(after, expected, rtol=0, atol=0)


def test_moves_carry_whole_pages_in_all_layers_and_happen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "MOVED_AT_ONCE", 2)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn((3, 9, 4, 2, 8), generator=generator) for _ in range(2))
    pool = KVPool(k.clone(), v.clone())
    first, second = ([0, 2, 5], [7, 1, 8]), ([7], [3])
    pool.move_pages([PageMoves(*(np.array(pages, np.int32) for pages in moves)) for moves in (first, second)])
    for before, after in ((k, pool.k), (v, pool.v)):
        expected = before.clone()
        expected[:, [7, 1, 8, 3]] = before[:, [0, 2, 5, 0]]
        torch.testing.assert_close(after, expected, rtol=0, atol=0)


def test_no_copies_change_nothing() -> None:
    pool = KVPool.allocate(GEOMETRY, 2, 4, torch.float32, CPU)
    pool.copy_pages(())
    assert not pool.k.any()


def test_an_impossible_pool_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        KVPool.allocate(GEOMETRY, 10**12, 64, torch.float32, CPU)
