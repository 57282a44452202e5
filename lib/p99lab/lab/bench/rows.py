"""The row every benchmark reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One figure, beside what the hardware would allow and what someone else reaches, where there is either.

    `floor` is in `unit` like `value`. `ratio_to_floor` is 1 at the floor and larger when worse; `ratio_to_peer` is
    above 1 where this project is better.
    """

    name: str
    value: float
    unit: str
    floor: float | None = None
    ratio_to_floor: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    ratio_to_peer: float | None = None
