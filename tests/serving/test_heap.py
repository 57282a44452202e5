"""What glibc does with freed blocks is a process's own: it is watched in one."""

from __future__ import annotations

import subprocess
import sys

import pytest

WATCH = """
import resource, sys
import numpy as np
from p99lab.serving.heap import keep_freed_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        blocks = [np.ones(1 << 17) for _ in range(6)]  # 1 MiB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    assert keep_freed_memory()
faults(4)
print(faults(50))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_blocks_are_used_again_without_the_kernel() -> None:
    usual, kept = (
        int(subprocess.run([sys.executable, "-c", WATCH, how], check=True, capture_output=True, text=True).stdout)
        for how in ("usual", "kept")
    )
    assert kept < 300 < 50 * 256 < usual  # a block has 256 pages
