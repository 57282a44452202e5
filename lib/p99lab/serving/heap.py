"""How the C library keeps memory, for processes that handle prompts of 0.8 MB again and again."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
KEPT_BYTES = 64 << 20  # some ten prompts in hand
LARGEST_BYTES = 32 << 20  # the most that every glibc takes


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed instead of giving it back to the kernel; whether it does so. For a whole process.

    By default megabytes that are free at the heap's end go back, so that each of their pages is cleared and faulted in
    anew: for the copies and arrays that a 128K-token prompt goes through, that takes as long as to read its digits.
    """
    if sys.platform != "linux":
        return False
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and all(
        mallopt(name, value) == 1
        for name, value in ((_M_MMAP_THRESHOLD, LARGEST_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES))
    )
