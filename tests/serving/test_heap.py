"""What glibc does with freed blocks is a process's own: it is watched in one."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

WATCH = """
import ctypes, resource, sys
import numpy as np
from p99lab.serving.heap import keep_freed_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [np.ones(1 << 17) for _ in range(6)]  # 1 MiB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: with huge pages there is little to see
if sys.argv[1] == "kept":
    keep_freed_memory()
faults(4)
print(faults(50))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_freed_blocks_are_used_again_without_the_kernel() -> None:
    usual, kept = (
        int(subprocess.run([sys.executable, "-c", WATCH, how], check=True, capture_output=True, text=True).stdout)
        for how in ("usual", "kept")
    )
    pages = (6 << 20) // resource.getpagesize()
    assert kept < pages < 40 * pages < usual
