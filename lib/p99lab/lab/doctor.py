"""`p99lab doctor`: what this machine can measure, and what each missing thing would take.

It looks, and times itself for a second; it changes nothing. Works on the base install.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from p99lab import project
from p99lab.engine import model_store
from p99lab.errors import P99labError
from p99lab.lab.job import prepare
from p99lab.lab.parameters import CONTRACTS
from p99lab.observe import hardware
from p99lab.probe.intervals import percentile
from p99lab.probe.stats import LATENESS_LIMIT_S

PACKAGE = "p99lab"
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
BY_HAND = {"jupyterlab"}  # of the extra lab: `p99lab run` does without
EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        "engine": "models run in this process",
        "lab": "notebooks run, plots, reports",
        "serve": "p99lab serve",
        "gpu": "GPU kernels and counters",
        "batch": "runs spread over nodes",
        "dev": "make test, make proof",
    }
)
NEWEST_FIRST = ("h200", "laptop", "smoke")  # tiers, from the one that shows most
MIN_FREE_BYTES = 2 * 2**30  # a model with its conversion, and a few hundred runs
MIN_MEMORY_BYTES = 4 * 2**30
MAX_BUSY_SHARE = 0.10
NUM_SLEEPS, SLEEP_S = 400, 0.001  # enough for a P99 with its interval


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `is_needed`: without it a run is prevented or spoilt, so `--strict` asks for it; else good to have."""

    area: str
    name: str
    is_ok: bool
    found: str
    takes: str = ""
    is_needed: bool = False

    @property
    def hinders(self) -> bool:
        return self.is_needed and not self.is_ok

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def examine(outputs: Path) -> list[Finding]:
    """Everything that is worth knowing before a measurement, in the order of a page."""
    fingerprint, capabilities = hardware.fingerprint(), hardware.capabilities()
    has_gpu = any(one.name == "GPU" and one.available for one in capabilities)
    return [
        *_notebooks(has_gpu),
        *_software(has_gpu),
        *_places(outputs),
        *_processor(fingerprint["cpu"]),
        *_now(),
        *(Finding("to observe or control", one.name, one.available, one.why, one.takes) for one in capabilities),
    ]


# --- what runs ------------------------------------------------------------------------------------------------------


def _notebooks(has_gpu: bool) -> Iterator[Finding]:
    """A notebook is fine when a tier beyond smoke can run; what the others would take stands beside it."""
    for notebook in CONTRACTS:
        files = (project.params_dir() / notebook).glob("*.yaml")
        tiers = sorted((path.stem for path in files), key=lambda tier: (tier not in NEWEST_FIRST, tier))
        lacks = {tier: _lacks(notebook, tier, has_gpu) for tier in tiers}
        fine = [tier for tier, lack in lacks.items() if not lack]
        found = f"{', '.join(fine)} can run" if fine else "no tier can run"
        reasons = dict.fromkeys(lack for lack in lacks.values() if lack)
        takes = "; ".join(f"{', '.join(tier for tier in tiers if lacks[tier] == why)}: {why}" for why in reasons)
        yield Finding("notebooks", notebook, bool(set(fine) - {"smoke"}), found, takes, is_needed=True)


def _lacks(notebook: str, tier: str, has_gpu: bool) -> str:
    """What keeps a tier of a notebook from running here; empty where nothing does."""
    if set(missing_packages("lab")) - BY_HAND:
        return _how_to_install("lab")
    try:
        parameters: Any = prepare(notebook, tier).parameters
    except P99labError as error:
        return str(error)
    if hasattr(parameters, "model") and missing_packages("engine"):
        return _how_to_install("engine")
    if getattr(parameters, "transport", None) == "http" and missing_packages("serve"):
        return _how_to_install("serve")
    is_for_gpu = tier == "h200" or str(getattr(parameters, "device", "cpu")).startswith("cuda")
    return "an NVIDIA GPU" if is_for_gpu and not has_gpu else ""


# --- software and places --------------------------------------------------------------------------------------------


def missing_packages(extra: str) -> list[str]:
    """The packages of an extra that are not installed, by what the installed p99lab says of itself."""
    stated = importlib.metadata.requires(PACKAGE) or []
    named = (line for line in stated if re.search(rf"extra == ['\"]{extra}['\"]", line))
    names = (re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in named)
    return [name for name in names if not _is_installed(name)]


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _how_to_install(extra: str) -> str:
    return f"pip install '.[{extra}]' in the checkout"


def _software(has_gpu: bool) -> Iterator[Finding]:
    area = "software"
    is_recent = sys.version_info >= (3, 11)
    yield Finding(area, "Python", is_recent, platform.python_version(), "Python 3.11 or newer" * (not is_recent), True)
    for extra, what in EXTRAS.items():
        if extra == "gpu" and not has_gpu:
            continue
        absent = missing_packages(extra)
        found = f"{what}: missing {', '.join(absent)}" if absent else what
        yield Finding(area, f"extra '{extra}'", not absent, found, _how_to_install(extra) if absent else "")
    for model in model_store.list_models():
        if model.state == "not fetched":
            yield Finding(area, f"model {model.name}", False, "not fetched", f"p99lab models fetch {model.name}")
        elif model.state == "fetched":
            yield Finding(area, f"model {model.name}", True, "fetched")


def _places(outputs: Path) -> Iterator[Finding]:
    area = "places"
    for name, folder in (("disk for runs", outputs), ("disk for models", model_store.cache_dir())):
        free = shutil.disk_usage(_existing(folder)).free
        is_enough = free >= MIN_FREE_BYTES
        takes = "" if is_enough else f"{_gib(MIN_FREE_BYTES)} free, or another folder"
        yield Finding(area, name, is_enough, f"{_gib(free)} free", takes, True)
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Finding(area, "loopback", True, "a server may listen on a free port of 127.0.0.1", "", True)
    except OSError as error:
        takes = "permission to listen on 127.0.0.1"
        yield Finding(area, "loopback", False, f"no server may listen: {error.strerror}", takes, True)


def _existing(folder: Path) -> Path:
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


# --- processor, clock and the load of now ---------------------------------------------------------------------------


def _processor(cpu: Mapping[str, Any]) -> Iterator[Finding]:
    area, usable, quota = "processor and clock", int(cpu["usable"]), cpu["quota_cpus"]
    takes = "" if usable >= 2 else "two CPUs: clients and engine on one would wait for each other"
    yield Finding(
        area, "CPUs", usable >= 2, f"{usable} usable, for an engine and the clients that load it", takes, True
    )
    if quota is not None:
        found = f"a quota of {quota:g} CPUs, which stops everything for a while when it is used up"
        yield Finding(area, "CPU quota", False, found, "a cpuset in its place: quotas lengthen tails")
    if governor := _governor():
        is_fixed = governor == "performance"
        takes = "" if is_fixed else "cpupower frequency-set -g performance"
        yield Finding(area, "CPU frequency", is_fixed, f"governor {governor}", takes)
    clock_s = time.get_clock_info("monotonic").resolution
    yield Finding(
        area, "clock", clock_s <= 1e-6, f"steps of {clock_s * 1e9:.0f} ns", "" if clock_s <= 1e-6 else "Linux"
    )
    yield _timer(area, asyncio.run(sleep_lateness()))


def _governor() -> str:
    """Empty where the kernel shows none, as in most virtual machines."""
    try:
        return GOVERNOR.read_text().strip()
    except OSError:
        return ""


async def sleep_lateness(num_sleeps: int = NUM_SLEEPS, sleep_s: float = SLEEP_S) -> np.ndarray[Any, Any]:
    """How much later than asked an event loop's timers fire, as an open load's client has them; seconds, [sleeps]."""
    late_s = np.empty(num_sleeps)
    for number in range(num_sleeps):
        began = time.perf_counter()
        await asyncio.sleep(sleep_s)
        late_s[number] = time.perf_counter() - began - sleep_s
    return late_s


def _timer(area: str, late_s: np.ndarray[Any, Any]) -> Finding:
    p99 = percentile(late_s, 0.99)
    assert p99.value is not None  # NUM_SLEEPS is enough for it
    bounds = f" [{_ms(p99.low)}, {_ms(p99.high)}]"
    found = f"late by {_ms(float(np.median(late_s)))} ms in the middle, P99 {_ms(p99.value)}{bounds}"
    is_prompt = p99.value <= LATENESS_LIMIT_S
    takes = (
        "" if is_prompt else f"less load or a quieter machine: open loads are void beyond {_ms(LATENESS_LIMIT_S)} ms"
    )
    return Finding(area, "timers", is_prompt, found, takes, True)


def _now() -> Iterator[Finding]:
    area, shares = "just now", psutil.cpu_times_percent(interval=0.5)
    busy, steal = 1 - (shares.idle + getattr(shares, "iowait", 0.0)) / 100, getattr(shares, "steal", 0.0) / 100
    is_quiet = busy <= MAX_BUSY_SHARE
    takes = "" if is_quiet else "wait, or end what else is running: it is in every tail"
    yield Finding(area, "other load", is_quiet, f"{busy:.0%} of all CPUs busy, {steal:.1%} stolen", takes, True)
    free = psutil.virtual_memory().available
    is_enough = free >= MIN_MEMORY_BYTES
    takes = "" if is_enough else f"{_gib(MIN_MEMORY_BYTES)} for a small model in float32"
    yield Finding(area, "memory", is_enough, f"{_gib(free)} available", takes, True)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:.2f}"


# --- for a terminal -------------------------------------------------------------------------------------------------


def page(findings: Sequence[Finding]) -> Table:
    """For a terminal, one section per area."""
    table = Table(
        "",
        "",
        "found here",
        "what it would take",
        box=SIMPLE,
        pad_edge=False,
        caption=_count(findings),
        caption_justify="left",
    )
    for area, group in groupby(findings, key=lambda finding: finding.area):
        table.add_section()
        table.add_row("", escape(area), style="bold")
        for one in group:
            style = "red" if one.hinders else "yellow" if not one.is_ok else None
            mark = f"[{style}]missing[/]" if style else "ok"
            table.add_row(mark, *map(escape, (one.name, one.found, one.takes)))
    return table


def _count(findings: Iterable[Finding]) -> str:
    findings = list(findings)
    missing = sum(not one.is_ok for one in findings)
    names = [one.name for one in findings if one.hinders]
    named = f": {escape(', '.join(names))}" if names else ""
    hindering = f"{len(names)} of them would prevent or spoil a run here{named}"
    return f"{len(findings) - missing} ok, {missing} missing; {hindering}"
