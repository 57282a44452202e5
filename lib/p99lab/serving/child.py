"""Child processes that do not outlive their parent, however it ends.

Executed as a module (`python -m p99lab.serving.child PARENT MODULE …`) this *is* such a child: it ties itself to its
parent and becomes MODULE.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a child of this process. Linux counts the *thread* that starts it as the parent."""
    return [sys.executable, "-m", "p99lab.serving.child", str(os.getpid()), module, *arguments]


def tie_to_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent ends (prctl(2)); elsewhere nothing is done."""
    if sys.platform != "linux":
        return
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent ended before its child began")


def _main() -> None:
    parent_pid, module, *arguments = sys.argv[1:]
    tie_to_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
