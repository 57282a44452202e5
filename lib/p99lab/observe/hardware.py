"""The machine: what it is, and which observations it allows.

`fingerprint` describes it (no host or user names), `capabilities` says which observations it allows and what a missing
one would take, `ceilings` in `observe.ceilings` measures its limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "sve2", "bf16")  # what decides matmul rates
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # capability.h
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}  # system call numbers
_GREEN_CONTEXTS_SINCE = 12040  # CUDA driver API version
_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # on Linux, and in WSL


# --- fingerprint ----------------------------------------------------------------------------------------------------


def fingerprint() -> dict[str, Any]:
    """The machine and the software that decides its speed, as plain values; `id` is a digest of the hardware alone."""
    machine = {
        "cpu": _cpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": _cgroup_memory_limit(),
        "numa_nodes": len(_numa_nodes()),
        "gpus": _gpus(),
    }
    return {
        "id": _digest(machine),
        **machine,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "nvidia_driver": _nvidia_driver(),
    }


def label(fingerprint: dict[str, Any]) -> str:
    """One line for a table and a key for the ledger: `AMD EPYC, 2 CPUs, no GPU`."""
    cpu, gpus = fingerprint["cpu"], fingerprint["gpus"]
    gpu = f"{len(gpus)}× {gpus[0]['name']}" if gpus else "no GPU"
    return f"{cpu['model']}, {cpu['usable']} CPUs, {gpu}"


def has_gpu() -> bool:
    """Whether CUDA may find an NVIDIA GPU for this process; where NVML is not installed, whether there is a driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    with _nvml() as nvml:
        return any(path.exists() for path in _DRIVER) if nvml is None else nvml.nvmlDeviceGetCount() > 0


def _digest(machine: dict[str, Any]) -> str:
    """Stable on one machine: the host's memory is left out, for a virtual machine's total may grow as it is used."""
    gpus = [(gpu["name"], gpu["memory_bytes"]) for gpu in machine["gpus"]]
    cpu = machine["cpu"]
    parts = (cpu["model"], cpu["usable"], machine["numa_nodes"], gpus)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def num_usable_cpus() -> int:
    """CPUs that this process may run on; elsewhere than on Linux all there are."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1


def _cpu() -> dict[str, Any]:
    info = _read("/proc/cpuinfo")
    flags = set(_first_match(r"^(?:flags|Features)\s*:\s*(.*)$", info).split())
    return {
        "model": _first_match(r"^model name\s*:\s*(.*)$", info) or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable": num_usable_cpus(),
        "quota_cpus": _cgroup_cpu_quota(),
        "caches": _caches(),
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
    }


def _caches() -> dict[str, str]:
    """The caches that the first CPU sees: `{"L1d": "32K", …}`."""
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        suffix = {"Data": "d", "Instruction": "i"}.get(_read(folder / "type"), "")
        caches[f"L{_read(folder / 'level')}{suffix}"] = _read(folder / "size")
    return caches


def _cgroup_cpu_quota() -> float | None:
    """CPUs' worth of time this process may use, None without a limit (cgroup v2, then v1)."""
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not period:
        quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _cgroup_memory_limit() -> int | None:
    """Bytes this process may use, None without a limit."""
    text = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return int(text) if text.isdigit() and int(text) < psutil.virtual_memory().total else None


def _numa_nodes() -> list[Path]:
    return sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The NVML module while it is initialised, or None where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or any of NVML's errors: there is nothing to ask
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> list[dict[str, Any]]:
    with _nvml() as nvml:
        return [] if nvml is None else [_gpu(nvml, handle) for handle in _usable_gpus(nvml)]


def _usable_gpus(nvml: Any) -> list[Any]:
    """Handles of those that this process may use: all, or what CUDA_VISIBLE_DEVICES lists up to the first unknown."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return handles
    by_name = {str(i): handle for i, handle in enumerate(handles)}
    by_name |= {str(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    names = (name.strip() for name in listed.split(","))
    return [by_name[name] for name in takewhile(by_name.__contains__, names)]


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).total,
        "compute_capability": list(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "max_sm_clock_mhz": _ask(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        "max_memory_clock_mhz": _ask(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)),
        "power_limit_w": _ask(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "pcie": _ask(nvml, lambda: _pcie(nvml, handle)),
        "mig": _ask(nvml, lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
    }


def _pcie(nvml: Any, handle: Any) -> str:
    generation, width = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    return f"gen {generation} x{width}"


def _ask(nvml: Any, question: Any) -> Any:
    """The answer, or None where this GPU or driver does not give one."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def _nvidia_driver() -> str | None:
    with _nvml() as nvml:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


# --- capabilities ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Capability:
    """One thing that may or may not be observed or controlled here. `why` is the evidence, `takes` what is missing."""

    name: str
    available: bool
    why: str
    takes: str = ""


def capabilities() -> list[Capability]:
    """Everything the notebooks would like to observe or control, each with a yes or a no and its reason.

    Only looks: system calls that open a counter or a namespace do so in this process or a child of it, and close it.
    """
    return [
        _cpu_counters(),
        _numa(),
        _cgroups(),
        _affinity(),
        _network_namespace(),
        _traffic_control(),
        _page_cache(),
        _pressure(),
        _locked_memory(),
        _shared_memory(),
        *_gpu_capabilities(),
    ]


def _cpu_counters() -> Capability:
    name = "CPU counters"
    number = _PERF_EVENT_OPEN.get(platform.machine())
    level = _read("/proc/sys/kernel/perf_event_paranoid") or "absent"
    if number is None or sys.platform != "linux":
        return Capability(name, False, f"no perf_event_open on {platform.machine()}", "Linux on x86-64 or Arm")
    error = _open_cycle_counter(number)
    if error is None:
        return Capability(name, True, f"a cycle counter opened (perf_event_paranoid {level})")
    takes = "a machine or VM that exposes its PMU" if error in ("ENOENT", "EOPNOTSUPP") else "perf_event_paranoid ≤ 2"
    return Capability(name, False, f"perf_event_open: {error} (perf_event_paranoid {level})", takes)


def _open_cycle_counter(number: int) -> str | None:
    """None when a hardware cycle counter of this process opens, else the error's name (perf_event_open(2))."""
    import errno
    import struct

    flags = 1 << 0 | 1 << 5 | 1 << 6  # disabled, exclude_kernel, exclude_hv
    attributes = struct.pack("IIQQQQQ", 0, 112, 0, 0, 0, 0, flags).ljust(112, b"\0")  # type hardware, config cycles
    libc: Any = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(number, ctypes.create_string_buffer(attributes), 0, -1, -1, 0)
    if descriptor < 0:
        return errno.errorcode.get(ctypes.get_errno(), "unknown error")
    os.close(descriptor)
    return None


def _numa() -> Capability:
    nodes = _numa_nodes()
    if len(nodes) > 1:
        return Capability("NUMA placement", True, f"{len(nodes)} nodes")
    return Capability("NUMA placement", False, "one memory node: there is no remote memory", "two sockets, or NPS > 1")


def _cgroups() -> Capability:
    name, root = "cgroup limits", Path("/sys/fs/cgroup")
    controllers = _read(root / "cgroup.controllers")
    version = "v2" if controllers else "v1"
    if not controllers:
        controllers = " ".join(sorted(path.name for path in root.glob("*") if (path / "tasks").exists()))
    if not controllers:
        return Capability(name, False, "no cgroup file system is mounted", "a mounted cgroup v2 hierarchy")
    if not os.access(root, os.W_OK) or _is_read_only(root):
        return Capability(name, False, f"{version} ({controllers}), read-only here", "root, or a delegated subtree")
    return Capability(name, True, f"{version}: {controllers}")


def _affinity() -> Capability:
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if cpus > 1:
        return Capability("CPU pinning", True, f"{cpus} CPUs may be divided between processes")
    return Capability("CPU pinning", False, "one usable CPU", "two CPUs or more")


def _network_namespace() -> Capability:
    name = "network namespaces"
    if shutil.which("unshare") is None:
        return Capability(name, False, "the unshare command is not installed", "util-linux")
    for how, flags in (("as this user", ["--net"]), ("in a user namespace", ["--map-root-user", "--net"])):
        done = subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False, timeout=10)
        if done.returncode == 0:
            return Capability(name, True, f"one was made {how}")
    return Capability(name, False, "the kernel refuses", "CAP_SYS_ADMIN, or unprivileged user namespaces")


def _traffic_control() -> Capability:
    name = "network shaping"
    if shutil.which("tc") is None and _version("pyroute2") is None:
        return Capability(name, False, "neither tc nor pyroute2 is installed", "iproute2 or pyroute2, CAP_NET_ADMIN")
    if not _has_capability(_CAP_NET_ADMIN):
        return Capability(name, False, "this process lacks CAP_NET_ADMIN", "CAP_NET_ADMIN")
    return Capability(name, True, "tc or pyroute2 is there, with CAP_NET_ADMIN")


def _page_cache() -> Capability:
    control = Path("/proc/sys/vm/drop_caches")
    if os.access(control, os.W_OK) and _has_capability(_CAP_SYS_ADMIN):
        return Capability("cold page cache", True, "drop_caches is writable")
    why = "drop_caches is not writable; single files can still be dropped (posix_fadvise)"
    return Capability("cold page cache", False, why, "root outside a container")


def _pressure() -> Capability:
    if _read("/proc/pressure/io"):
        return Capability("stall accounting (PSI)", True, "/proc/pressure is there")
    return Capability(
        "stall accounting (PSI)", False, "no /proc/pressure", "a kernel with CONFIG_PSI, booted with psi=1"
    )


def _locked_memory() -> Capability:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= 2**30:
        size = "without limit" if limit == resource.RLIM_INFINITY else f"up to {limit / 2**30:.0f} GiB"
        return Capability("pinned host memory", True, f"may be locked {size}")
    return Capability(
        "pinned host memory", False, f"at most {limit / 2**20:.0f} MiB may be locked", "ulimit -l unlimited"
    )


def _shared_memory() -> Capability:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Capability("shared memory", False, "no /dev/shm", "a tmpfs at /dev/shm")
    if free >= 2**30:
        return Capability("shared memory", True, f"{free / 2**30:.0f} GiB free in /dev/shm")
    return Capability("shared memory", False, f"only {free / 2**20:.0f} MiB in /dev/shm", "--shm-size in the container")


def _gpu_capabilities() -> list[Capability]:
    names = ("GPU", "GPU counters", "green contexts", "MIG", "MPS", "NVLink")
    with _nvml() as nvml:
        if nvml is None or nvml.nvmlDeviceGetCount() == 0:
            return [Capability(name, False, "no NVIDIA driver answers", "an NVIDIA GPU") for name in names]
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        return [
            Capability("GPU", True, f"{nvml.nvmlDeviceGetCount()}× {nvml.nvmlDeviceGetName(handle)}"),
            _gpu_counters(),
            _green_contexts(nvml),
            _mig(nvml, handle),
            _mps(),
            _nvlink(nvml, handle),
        ]


def _gpu_counters() -> Capability:
    name = "GPU counters"
    parameters = _read("/proc/driver/nvidia/params")
    restricted = "RmProfilingAdminOnly: 1" in parameters
    if shutil.which("ncu") is None:
        return Capability(name, False, "Nsight Compute (ncu) is not installed", "ncu in PATH")
    if restricted and not _has_capability(_CAP_SYS_ADMIN):
        return Capability(
            name, False, "the driver gives them to administrators only", "CAP_SYS_ADMIN, or the driver option"
        )
    return Capability(name, True, "ncu is installed and the driver lets this process profile")


def _green_contexts(nvml: Any) -> Capability:
    name, version = "green contexts", nvml.nvmlSystemGetCudaDriverVersion_v2()
    if version < _GREEN_CONTEXTS_SINCE:
        return Capability(
            name, False, f"the driver speaks CUDA {version / 1000:.1f}", "a driver for CUDA 12.4 or later"
        )
    if _version("cuda-bindings") is None:
        return Capability(name, False, "the Python package cuda-bindings is not installed", "pip install cuda-bindings")
    return Capability(name, True, f"driver for CUDA {version // 1000}.{version % 1000 // 10}, cuda-bindings installed")


def _mig(nvml: Any, handle: Any) -> Capability:
    mode = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if mode is None:
        return Capability("MIG", False, "this GPU has no MIG", "an A100, H100 or later data-centre GPU")
    if mode == nvml.NVML_DEVICE_MIG_ENABLE:
        return Capability("MIG", True, "enabled")
    return Capability("MIG", False, "supported, switched off", "an administrator to enable it; p99lab never does")


def _mps() -> Capability:
    if shutil.which("nvidia-cuda-mps-control") is None:
        return Capability("MPS", False, "nvidia-cuda-mps-control is not installed", "the driver's MPS tools in PATH")
    return Capability("MPS", True, "nvidia-cuda-mps-control is installed")


def _nvlink(nvml: Any, handle: Any) -> Capability:
    links = [_ask(nvml, lambda i=link: nvml.nvmlDeviceGetNvLinkState(handle, i)) for link in range(18)]
    active = sum(state == nvml.NVML_FEATURE_ENABLED for state in links)
    if active:
        return Capability("NVLink", True, f"{active} links active on the first GPU")
    return Capability("NVLink", False, "no active link on the first GPU", "two GPUs joined by NVLink")


# --- reading the system ---------------------------------------------------------------------------------------------


def _read(path: str | Path) -> str:
    """A small system file's text, empty where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""


def _version(package: str) -> str | None:
    """An installed package's version, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_capability(bit: int) -> bool:
    effective = _first_match(r"^CapEff:\s*([0-9a-f]+)$", _read("/proc/self/status"))
    return bool(int(effective or "0", 16) >> bit & 1)


def _is_read_only(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
