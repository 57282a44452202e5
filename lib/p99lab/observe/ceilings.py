"""The most this machine does: memory, arithmetic, disk, host link, launches; what a measured speed is compared with.

Each ceiling is the best of a few repeats (nothing makes hardware faster by accident) with the median beside it.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

_MIB = 2**20
_GRAPH_LENGTH = 100  # kernels per captured graph


@dataclass(frozen=True)
class Ceiling:
    """A measured limit, `best` and `median` of its repeats in `unit`; both None where it cannot be measured here."""

    name: str
    unit: str
    best: float | None
    median: float | None
    how: str


@dataclass(frozen=True)
class Sizes:
    """How much each measurement moves; `buffer_mib` should be several times the last-level cache."""

    buffer_mib: int
    matmul_size: int
    disk_mib: int
    launches: int
    repeats: int


def ceilings(sizes: Sizes, scratch: Path) -> list[Ceiling]:
    """Measure them all, on the GPU too where torch sees one. `scratch` is a folder on the disk to be measured."""
    return [*_memory(sizes), *_matmul(sizes), *_disk(sizes, scratch), *device_ceilings(sizes)]


def device_ceilings(sizes: Sizes) -> list[Ceiling]:
    """Those of the GPU alone; where torch sees none, rows that say so."""
    return _device(sizes) if _has_cuda() else _no_device()


# --- host -----------------------------------------------------------------------------------------------------------


def _memory(sizes: Sizes) -> list[Ceiling]:
    num_bytes = sizes.buffer_mib * _MIB
    read, copy, how = _host_kernels(num_bytes)
    return [
        _rate(
            "memory read", "GB/s", num_bytes / 1e9, _timed(read, sizes.repeats), f"{how} sum, {sizes.buffer_mib} MiB"
        ),
        _rate(
            "memory copy", "GB/s", 2 * num_bytes / 1e9, _timed(copy, sizes.repeats), f"{how}, read and write counted"
        ),
    ]


def _host_kernels(num_bytes: int) -> tuple[Callable[[], object], Callable[[], object], str]:
    """Reading and copying `num_bytes`, on all of torch's threads, or on one with numpy."""
    if _has_torch():
        import torch

        source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
        return source.sum, lambda: target.copy_(source), f"torch, {torch.get_num_threads()} threads"
    array, other = np.ones(num_bytes // 4, np.float32), np.zeros(num_bytes // 4, np.float32)
    return array.sum, lambda: np.copyto(other, array), "numpy, 1 thread"


def _matmul(sizes: Sizes) -> list[Ceiling]:
    n = sizes.matmul_size
    flops = 2 * n**3
    if not _has_torch():
        square = np.ones((n, n), np.float32)
        seconds = _timed(lambda: square @ square, sizes.repeats)
        return [_rate("matmul fp32", "GFLOP/s", flops / 1e9, seconds, f"numpy, {n}×{n}")]
    import torch

    rows = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.ones(n, n, dtype=dtype), torch.ones(n, n, dtype=dtype)
        seconds = _timed(lambda a=a, b=b: a @ b, sizes.repeats)  # type: ignore[misc]
        how = f"torch, {n}×{n}, {torch.get_num_threads()} threads"
        rows.append(_rate(f"matmul {name}", "GFLOP/s", flops / 1e9, seconds, how))
    return rows


def _disk(sizes: Sizes, scratch: Path) -> list[Ceiling]:
    file = scratch / f".ceiling-{os.getpid()}"
    block = np.random.default_rng(0).bytes(_MIB)  # random, so that no file system compresses it
    gigabytes = sizes.disk_mib * _MIB / 1e9
    try:
        written = [_write_synced(file, block, sizes.disk_mib) for _ in range(sizes.repeats)]
        read = [_read_cold(file) for _ in range(sizes.repeats)]
    finally:
        file.unlink(missing_ok=True)
    return [
        _rate("disk write", "GB/s", gigabytes, written, f"{sizes.disk_mib} MiB sequential, fsync counted"),
        _rate("disk read", "GB/s", gigabytes, read, "sequential, the file's pages dropped first; the host may cache"),
    ]


def _write_synced(file: Path, block: bytes, blocks: int) -> float:
    started_s = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for _ in range(blocks):
            out.write(block)
        os.fsync(out.fileno())
    return time.perf_counter() - started_s


def _read_cold(file: Path) -> float:
    buffer = bytearray(_MIB)
    with file.open("rb", buffering=0) as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = time.perf_counter()
        while source.readinto(buffer):
            pass
        return time.perf_counter() - started_s


# --- device ---------------------------------------------------------------------------------------------------------


def _no_device() -> list[Ceiling]:
    why = "not testable here: takes a CUDA device and a torch that sees it"
    names = {
        "device read": "GB/s",
        "device copy": "GB/s",
        "device matmul fp32": "GFLOP/s",
        "device matmul bf16": "GFLOP/s",
        "host to device": "GB/s",
        "device to host": "GB/s",
        "launch eager": "µs",
        "launch graph": "µs",
    }
    return [Ceiling(name, unit, None, None, why) for name, unit in names.items()]


def _device(sizes: Sizes) -> list[Ceiling]:
    return [*_device_memory(sizes), *_device_matmul(sizes), *_host_link(sizes), *_launches(sizes)]


def _device_memory(sizes: Sizes) -> list[Ceiling]:
    import torch

    num_bytes = sizes.buffer_mib * _MIB
    source = torch.ones(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    read = _timed_on_device(source.sum, sizes.repeats)
    copy = _timed_on_device(lambda: target.copy_(source), sizes.repeats)
    return [
        _rate("device read", "GB/s", num_bytes / 1e9, read, f"torch sum, {sizes.buffer_mib} MiB"),
        _rate("device copy", "GB/s", 2 * num_bytes / 1e9, copy, "read and write counted"),
    ]


def _device_matmul(sizes: Sizes) -> list[Ceiling]:
    import torch

    n = sizes.matmul_size
    rows = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(n, n, device="cuda").to(dtype)  # zeros or ones draw less power, and clock higher
        b = torch.randn(n, n, device="cuda").to(dtype)
        seconds = _timed_on_device(lambda a=a, b=b: a @ b, sizes.repeats)  # type: ignore[misc]
        how = f"torch, {n}×{n}" + (", TF32 off" if name == "fp32" and not _tf32() else "")
        rows.append(_rate(f"device matmul {name}", "GFLOP/s", 2 * n**3 / 1e9, seconds, how))
    return rows


def _host_link(sizes: Sizes) -> list[Ceiling]:
    import torch

    num_bytes = sizes.buffer_mib * _MIB
    host = torch.ones(num_bytes // 4, pin_memory=True)
    device = torch.ones(num_bytes // 4, device="cuda")
    up = _timed_on_device(lambda: device.copy_(host, non_blocking=True), sizes.repeats)
    down = _timed_on_device(lambda: host.copy_(device, non_blocking=True), sizes.repeats)
    return [
        _rate("host to device", "GB/s", num_bytes / 1e9, up, f"pinned memory, {sizes.buffer_mib} MiB"),
        _rate("device to host", "GB/s", num_bytes / 1e9, down, f"pinned memory, {sizes.buffer_mib} MiB"),
    ]


def _launches(sizes: Sizes) -> list[Ceiling]:
    import torch

    one = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    one.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_LENGTH):
            one.add_(1)
    replays = -(-sizes.launches // _GRAPH_LENGTH)
    eager = _timed_on_device(_times(sizes.launches, lambda: one.add_(1)), sizes.repeats)
    replayed = _timed_on_device(_times(replays, graph.replay), sizes.repeats)
    return [
        _cost("launch eager", eager, sizes.launches, "per kernel of one element, back to back"),
        _cost("launch graph", replayed, replays * _GRAPH_LENGTH, f"per kernel, graphs of {_GRAPH_LENGTH}"),
    ]


def _times(count: int, work: Callable[[], object]) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(count):
            work()

    return repeated


def _tf32() -> bool:
    import torch

    return bool(torch.backends.cuda.matmul.allow_tf32)


# --- timing ---------------------------------------------------------------------------------------------------------


def _timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat, after one that warms up."""
    work()
    return list(_repeat(work, repeats, lambda: None))


def _timed_on_device(work: Callable[[], object], repeats: int) -> list[float]:
    """Likewise, each repeat until the device is idle again."""
    import torch

    work()
    torch.cuda.synchronize()
    return list(_repeat(work, repeats, torch.cuda.synchronize))


def _repeat(work: Callable[[], object], repeats: int, finish: Callable[[], object]) -> Iterator[float]:
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        finish()
        yield time.perf_counter() - started_s


def _rate(name: str, unit: str, amount: float, seconds: list[float], how: str) -> Ceiling:
    return Ceiling(name, unit, amount / min(seconds), amount / median(seconds), how)


def _cost(name: str, seconds: list[float], count: int, how: str) -> Ceiling:
    return Ceiling(name, "µs", min(seconds) / count * 1e6, median(seconds) / count * 1e6, how)


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _has_cuda() -> bool:
    if not _has_torch():
        return False
    import torch

    return torch.cuda.is_available()
