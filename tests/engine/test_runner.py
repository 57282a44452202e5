"""What a step's time on the device is counted from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.engine import Engine
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.model import LlamaModel
from p99lab.engine.request import SamplingParams
from p99lab.engine.runner import DeviceSpan
from p99lab.engine.stats import DEVICE_BOUNDS_S

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a step does, in its order, on a device that says of each step that it took 30 ms."""
    happened: list[str] = []

    def begin(device: Any) -> Any:
        happened.append("begin")
        ended = SimpleNamespace(record=lambda: happened.append("end"), synchronize=lambda: None)
        return SimpleNamespace(ended=ended, seconds=lambda: 0.03)

    def noted(owner: type, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            if name != "copy_pages" or args[1]:
                happened.append(what)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(DeviceSpan, "begin", begin)
    noted(KVPool, "copy_pages", "copy")
    noted(ReferenceAttention, "plan", "plan")
    noted(LlamaModel, "forward", "compute")
    return happened


def test_it_begins_with_computing_or_where_pages_are_copied_with_that(engine: Engine, happened: list[str]) -> None:
    engine.generate([[1, 2, 3, 4, 5, 6, 7]], ONE)
    assert happened == ["plan", "begin", "compute", "end"]
    happened.clear()
    engine.generate([[1, 2, 3, 4, 5, 6, 8]], ONE)  # shares half a page
    assert happened == ["begin", "copy", "plan", "compute", "end"]
    stats = engine.stats()
    assert stats.device_s == pytest.approx(0.06)
    assert stats.num_by_device_s[DEVICE_BOUNDS_S.index(0.03)] == 2
