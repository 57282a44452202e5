"""How many pages a device's memory allows."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from p99lab.engine import device_memory
from p99lab.engine.device_memory import CPU_SHARE, affordable_pages
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import page_bytes

GEOMETRY = Geometry.named("tiny-128k")
CPU = torch.device("cpu")


@pytest.mark.parametrize("available", [0, 10**6, 10**9])
def test_a_share_of_the_memory_left_is_taken_and_never_less_than_two_pages(
    monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    num_pages = affordable_pages(GEOMETRY, 16, torch.float32, CPU)
    num_bytes = num_pages * page_bytes(GEOMETRY, 16, torch.float32)
    assert num_pages == 2 or available * CPU_SHARE - page_bytes(GEOMETRY, 16, torch.float32) < num_bytes
    assert num_pages == 2 or num_bytes <= available * CPU_SHARE


def test_a_containers_limit_bounds_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    monkeypatch.setattr(device_memory, "_container_memory_left", lambda: 2.0**20)
    pages = affordable_pages(GEOMETRY, 4, torch.float32, CPU)
    assert pages == int(2**20 * CPU_SHARE) // page_bytes(GEOMETRY, 4, torch.float32)
