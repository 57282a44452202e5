"""How the C library keeps memory, for processes that handle prompts of 0.8 MB again and again."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
KEPT_BYTES = 64 << 20  # some ten prompts in hand
LARGEST_BYTES = 32 << 20  # the most that every glibc takes


def keep_freed_memory() -> None:
    """Have glibc keep what is freed instead of giving it back to the kernel, in all of this process; else nothing.

    By default megabytes that are free at the heap's end go back, so that each of their pages is cleared and faulted in
    anew: for the copies and arrays that a 128K-token prompt goes through, that takes as long as to read its digits.
    """
    if sys.platform != "linux":
        return
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
