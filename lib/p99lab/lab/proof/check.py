"""One line of proof."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """What was to be, what was found, and whether the one is the other. `note`: how, or why they differ."""

    name: str
    expected: str
    found: str
    passed: bool
    note: str = ""
