from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path
from unittest import mock

import pytest

from p99lab.observe import hardware

pytestmark = pytest.mark.light


def test_the_fingerprint_is_plain_and_names_nobody() -> None:
    text = json.dumps(hardware.fingerprint())
    assert platform.node() not in text
    assert str(Path.home()) not in text
    if len(getpass.getuser()) > 4:
        assert getpass.getuser() not in text


def test_the_fingerprint_knows_this_machine() -> None:
    machine = hardware.fingerprint()
    assert machine["cpu"]["usable"] == len(os.sched_getaffinity(0))
    assert machine["memory_bytes"] > 2**28
    assert machine["python"] == platform.python_version()
    assert len(machine["id"]) == 12


def test_the_id_depends_on_the_hardware_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hardware.fingerprint()["id"]
    monkeypatch.setattr(platform, "python_version", lambda: "9.9.9")
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: mock.Mock(total=2**40))  # it may grow with use
    assert hardware.fingerprint()["id"] == before
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    assert hardware.fingerprint()["id"] != before


def test_the_label_is_one_line() -> None:
    cpu = {"model": "EPYC", "usable": 16}
    assert hardware.label({"cpu": cpu, "gpus": []}) == "EPYC, 16 CPUs, no GPU"
    assert hardware.label({"cpu": cpu, "gpus": [{"name": "NVIDIA H200"}] * 2}) == "EPYC, 16 CPUs, 2× NVIDIA H200"


def test_every_capability_has_its_reason_and_every_no_its_remedy() -> None:
    rows = hardware.capabilities()
    assert len({row.name for row in rows}) == len(rows)
    assert {"CPU counters", "NUMA placement", "cgroup limits", "green contexts", "MIG"} <= {row.name for row in rows}
    for row in rows:
        assert row.why
        assert row.available or row.takes


def test_without_a_driver_nothing_of_the_gpu_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    machine = hardware.fingerprint()
    assert machine["gpus"] == []
    assert machine["nvidia_driver"] is None
    rows = {row.name: row for row in hardware.capabilities()}
    assert not any(rows[name].available for name in ("GPU", "GPU counters", "green contexts", "MIG", "MPS", "NVLink"))


@pytest.mark.parametrize(("driver", "listed", "expected"), [(True, None, True), (True, "", False), (False, "0", False)])
def test_without_nvml_a_driver_tells_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, listed: str | None, expected: bool
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setattr(hardware, "_DRIVER", (tmp_path / "none", tmp_path if driver else tmp_path / "none"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert hardware.has_gpu() is expected


class TwoGpus:
    """Of NVML, what lists them."""

    @staticmethod
    def nvmlDeviceGetCount() -> int:  # noqa: N802
        return 2

    @staticmethod
    def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
        return index

    @staticmethod
    def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}{handle}"


@pytest.mark.parametrize(
    ("listed", "usable"),
    [(None, [0, 1]), ("1", [1]), ("1, 0", [1, 0]), ("GPU-11", [1]), ("", []), ("-1", []), ("0,7,1", [0])],
)
def test_the_gpus_are_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, usable: list[int]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert hardware._usable_gpus(TwoGpus) == usable
