"""The kernel of a run: this very interpreter, over a private socket, gone when its run is.

Executed as a module (`python -m p99lab.lab.kernel STACKS …`) it *is* that kernel: ipykernel, tied to its parent's life,
with every thread's stack written to the file STACKS at a signal or at a fatal error.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from p99lab.lab.cgroups import OomKills
from p99lab.lab.reaping import Belongings
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager

_PR_SET_PDEATHSIG = 1
_HISTORY_OFF = "--HistoryManager.enabled=False"  # one SQLite file that all kernels would share
_DUMP_SIGNAL = signal.SIGUSR2
_DUMP_PATIENCE_S = 2.0
_NOTE_INTERVAL_S = 0.2


class Kernel:
    """A started kernel, seen from outside."""

    def __init__(self, manager: AsyncKernelManager, belongings: Belongings) -> None:
        self.manager = manager
        self._belongings = belongings
        self._process = cast(Any, manager.provisioner)  # jupyter_client's local one; its base class has no pid
        self._oom_kills = OomKills(self._process.pid)

    async def dump_stacks(self) -> None:
        """Have the kernel write down the stack of every thread; it does so inside C code and under a held GIL too."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, _DUMP_SIGNAL)
        until, seen = time.monotonic() + _DUMP_PATIENCE_S, ""
        while time.monotonic() < until and (not seen or seen != self.stacks()):
            seen = self.stacks()
            await asyncio.sleep(0.1)

    def stacks(self) -> str:
        """What has been dumped: when it was asked for, or as a fatal signal hit the kernel; empty where nothing was."""
        stacks = _stacks_in(self._belongings.folder)
        return stacks.read_text(errors="replace") if stacks.is_file() else ""

    async def cause_of_death(self) -> str | None:
        """`was killed by SIGKILL`, `exited with code 1`; None while it lives."""
        code = await self._process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    async def was_taken_for_memory(self) -> bool:
        """Whether it was killed, and its cgroup counted a kill for want of memory."""
        return await self._process.poll() == -signal.SIGKILL and self._oom_kills.happened()

    async def kill(self) -> None:
        """End it and its process group at once."""
        self._belongings.note_shared_memory()
        await self.manager.shutdown_kernel(now=True)


@contextlib.asynccontextmanager
async def run_kernel(run_dir: Path, environment: Mapping[str, str]) -> AsyncIterator[Kernel]:
    """A started kernel with `environment` on top of this process's; on leaving, it and all it started are gone."""
    belongings = Belongings.claim(run_dir)
    noting = asyncio.ensure_future(_note_regularly(belongings))
    try:
        manager = _manager(belongings.folder)
        await manager.start_kernel(env={**os.environ, **environment, ENVIRONMENT_VARIABLE: str(run_dir)})
        try:
            yield Kernel(manager, belongings)
        finally:
            if manager.has_kernel:
                await manager.shutdown_kernel(now=not await manager.is_alive())
    finally:
        noting.cancel()
        belongings.clear()


async def _note_regularly(belongings: Belongings) -> None:
    while True:
        belongings.note_shared_memory_if_changed()
        await asyncio.sleep(_NOTE_INTERVAL_S)


def _manager(folder: Path) -> AsyncKernelManager:
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(KernelSpecManager):
        """Knows one kernel, whatever a notebook's metadata names."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            module = [sys.executable, "-m", "p99lab.lab.kernel", str(_stacks_in(folder))]
            argv = [*module, "-f", "{connection_file}", _HISTORY_OFF]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    return AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=ThisInterpreter(),
        connection_file=str(folder / "kernel.json"),
        transport="ipc",
        ip=str(folder / "k"),
    )


def _stacks_in(folder: Path) -> Path:
    return folder / "stacks"


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends (prctl(2))."""
    if sys.platform != "linux":
        return
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get("JPY_PARENT_PID", os.getppid())):
        sys.exit("the runner ended before its kernel began")


def _dump_stacks_into(path: str) -> None:
    file = open(path, "a")  # noqa: SIM115  open as long as the process lives
    faulthandler.enable(file)
    faulthandler.register(_DUMP_SIGNAL, file)


if __name__ == "__main__":
    _die_with_parent()
    _dump_stacks_into(sys.argv.pop(1))
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
