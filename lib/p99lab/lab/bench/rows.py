"""The row every benchmark reports."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure, beside what the hardware would allow, what someone else reaches and what it must reach, where there
    is any of them.

    `floor` and `bar` are in `unit` like `value`; `value` may be at most `bar`. `ratio_to_floor` is 1 at the floor and
    larger when worse; `ratio_to_peer` is above 1 where this project is better. `n`: how many measurements are behind
    it. `note`: what a reader must know, such as why a peer has no figure, or why there is no value (NaN). `detail`: one
    of many behind another row, which files have and tables leave out.
    """

    name: str
    value: float
    unit: str
    floor: float | None = None
    ratio_to_floor: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    ratio_to_peer: float | None = None
    n: int | None = None
    bar: float | None = None
    note: str | None = None
    detail: bool = False

    @property
    def verdict(self) -> str | None:
        """Whether the bar is held; None without one, or without a value."""
        if self.bar is None or math.isnan(self.value):
            return None
        return "held" if self.value <= self.bar else "missed"
