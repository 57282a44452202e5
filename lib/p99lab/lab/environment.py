"""What notebook 00 draws and sums up: the roofline of a machine, and its limits in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from p99lab.lab import plots
from p99lab.observe.ceilings import Ceiling
from p99lab.observe.hardware import Capability

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# FLOP per byte read, with 16-bit weights: two operations per weight and sequence (or prompt token).
INTENSITIES: Mapping[str, float] = MappingProxyType(
    {"decode, batch 1": 1, "decode, batch 16": 16, "prefill, 512 tokens": 512}
)


@dataclass(frozen=True)
class Roofline:
    """The two limits that bound a kernel, of the GPU where one was measured, else of the CPU.

    `matmul_gflop_s`: a rate per number format.
    """

    place: str  # as its ceilings are named: "device ", or nothing for the CPU
    read_gb_s: float
    matmul_gflop_s: Mapping[str, float]

    @classmethod
    def of(cls, ceilings: Iterable[Ceiling]) -> Roofline:
        """Read it from a machine's measured ceilings."""
        best = {ceiling.name: ceiling.best for ceiling in ceilings if ceiling.best is not None}
        place = "device " if "device read" in best else ""
        start = f"{place}matmul "
        rates = {name.removeprefix(start): rate for name, rate in best.items() if name.startswith(start)}
        return cls(place, best["device read" if place else "memory read"], rates)

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on arithmetic is the limit and no longer memory."""
        return max(self.matmul_gflop_s.values()) / self.read_gb_s

    def draw(self) -> Figure:
        return plots.roofline(self.read_gb_s, self.matmul_gflop_s, INTENSITIES)


def summary(machine: str, roofline: Roofline, capabilities: Iterable[Capability]) -> pd.DataFrame:
    """`what` and `here`: the machine's label, its limits, and the names of what cannot be observed on it."""
    import pandas as pd

    missing = [capability.name for capability in capabilities if not capability.available]
    rows = [
        ("machine", machine),
        (f"{roofline.place or 'memory '}read", f"{roofline.read_gb_s:,.0f} GB/s"),
        *((f"{roofline.place}matmul {name}", f"{rate:,.0f} GFLOP/s") for name, rate in roofline.matmul_gflop_s.items()),
        ("ridge", f"{roofline.ridge:,.0f} FLOP per byte"),
        ("cannot be measured here", ", ".join(missing) or "nothing on the list"),
    ]
    return pd.DataFrame(rows, columns=["what", "here"])
