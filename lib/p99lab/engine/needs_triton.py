"""Triton for the kernels' modules, or one line that says what is missing: they take it from here."""

from __future__ import annotations

from p99lab.errors import P99labError

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise P99labError(
        f"the CUDA kernels need the package '{error.name}', which torch for CUDA on Linux brings along"
    ) from None

__all__ = ["tl", "triton"]
