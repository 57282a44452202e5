"""The kernel of a run: this very interpreter, over a private socket, gone when its run is.

Executed as a module (`python -m p99lab.lab.kernel`) it *is* that kernel: ipykernel, tied to its parent's life.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager

_PR_SET_PDEATHSIG = 1
_SOCKET_PATH_LIMIT = 100  # sun_path holds 108 bytes, and the channel's number is appended
_HISTORY_OFF = "--HistoryManager.enabled=False"  # one SQLite file that all kernels would share


@contextlib.asynccontextmanager
async def run_kernel(run_dir: Path, environment: Mapping[str, str]) -> AsyncIterator[AsyncKernelManager]:
    """A started kernel with `environment` on top of this process's; on leaving, it and all it started are gone."""
    sockets = Path(_socket_folder())
    manager = _manager(sockets)
    try:
        await manager.start_kernel(env={**os.environ, **environment, ENVIRONMENT_VARIABLE: str(run_dir)})
        try:
            yield manager
        finally:
            if manager.has_kernel:
                await manager.shutdown_kernel(now=not await manager.is_alive())
    finally:
        reap(run_dir)
        shutil.rmtree(sockets, ignore_errors=True)


def reap(run_dir: Path) -> None:
    """Kill every process whose environment says it belongs to this run, orphans in sessions of their own included."""
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error):
            if process.environ().get(ENVIRONMENT_VARIABLE) == str(run_dir):
                process.kill()


def _manager(sockets: Path) -> AsyncKernelManager:
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(KernelSpecManager):
        """Knows one kernel, whatever a notebook's metadata names."""

        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "p99lab.lab.kernel", "-f", "{connection_file}", _HISTORY_OFF]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    return AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=ThisInterpreter(),
        connection_file=str(sockets / "kernel.json"),
        transport="ipc",
        ip=str(sockets / "k"),
    )


def _socket_folder() -> str:
    """A private folder whose path is absolute and short enough for a socket's name."""
    folder = tempfile.mkdtemp(prefix="p99lab-")
    if len(folder) <= _SOCKET_PATH_LIMIT - len("/k-1"):
        return folder
    Path(folder).rmdir()
    return tempfile.mkdtemp(prefix="p99lab-", dir="/tmp")


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends (prctl(2))."""
    if sys.platform != "linux":
        return
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get("JPY_PARENT_PID", os.getppid())):
        sys.exit("the runner ended before its kernel began")


if __name__ == "__main__":
    _die_with_parent()
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
