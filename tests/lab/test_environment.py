from __future__ import annotations

import matplotlib.figure
import pytest

from p99lab.lab.environment import Roofline, summary
from p99lab.observe.ceilings import Ceiling
from p99lab.observe.hardware import Capability

ABSENT = "not testable here: takes a CUDA device"
HOST = [
    Ceiling("memory read", "GB/s", 20.0, 19.0, "torch sum"),
    Ceiling("memory copy", "GB/s", 30.0, 29.0, "torch"),
    Ceiling("matmul fp32", "GFLOP/s", 100.0, 90.0, "torch"),
    Ceiling("matmul bf16", "GFLOP/s", 60.0, 50.0, "torch"),
]
NO_DEVICE = [Ceiling(name, "GB/s", None, None, ABSENT) for name in ("device read", "device matmul bf16")]
DEVICE = [
    Ceiling("device read", "GB/s", 4000.0, 3900.0, "torch sum"),
    Ceiling("device matmul fp32", "GFLOP/s", 50_000.0, 49_000.0, "torch"),
    Ceiling("device matmul bf16", "GFLOP/s", 800_000.0, 790_000.0, "torch"),
]


def test_a_machine_without_a_gpu_is_bound_by_its_cpu() -> None:
    assert Roofline.of([*HOST, *NO_DEVICE]) == Roofline("", 20.0, {"fp32": 100.0, "bf16": 60.0})


def test_a_gpu_comes_before_the_cpu() -> None:
    roofline = Roofline.of([*HOST, *DEVICE])
    assert roofline == Roofline("device ", 4000.0, {"fp32": 50_000.0, "bf16": 800_000.0})
    assert roofline.ridge == 200.0


@pytest.mark.parametrize("ceilings", [[*HOST, *NO_DEVICE], [*HOST, *DEVICE]])
def test_it_can_be_drawn(ceilings: list[Ceiling]) -> None:
    assert isinstance(Roofline.of(ceilings).draw(), matplotlib.figure.Figure)


def test_the_summary_names_the_limits_of_the_place_that_counts() -> None:
    capabilities = [Capability("Nsight Compute", False, "no ncu", "ncu"), Capability("perf", True, "perf_event_open")]
    rows = dict(summary("a machine", Roofline.of([*HOST, *DEVICE]), capabilities).itertuples(index=False))
    assert rows == {
        "machine": "a machine",
        "device read": "4,000 GB/s",
        "device matmul fp32": "50,000 GFLOP/s",
        "device matmul bf16": "800,000 GFLOP/s",
        "ridge": "200 FLOP per byte",
        "cannot be measured here": "Nsight Compute",
    }


def test_a_machine_where_everything_can_be_observed_says_so() -> None:
    rows = dict(summary("a machine", Roofline.of(HOST), []).itertuples(index=False))
    assert rows["memory read"] == "20 GB/s"
    assert rows["cannot be measured here"] == "nothing on the list"
