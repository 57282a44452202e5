"""The limits that a run may be given, and the watch over them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 0.25


@dataclass(frozen=True)
class Limits:
    """What a run may take, in seconds; None: as long as it needs.

    `cell_s`: one cell. `deadline_s`: all of it, the kernel's start included. `stall_s`: the time without output, a
    finished cell or a file written in the run folder. There are no defaults: a silent cell may well be at work.
    """

    cell_s: float | None = None
    deadline_s: float | None = None
    stall_s: float | None = None


class Watchdog:
    """Knows when a run has passed one of its limits. `file_age_s` tells how long ago a file of the run changed."""

    def __init__(
        self, limits: Limits, file_age_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._file_age_s = file_age_s
        self._clock = clock
        self._began_s = clock()
        self._cell_began_s: float | None = None
        self._last_progress_s = self._began_s

    def cell_started(self) -> None:
        self._cell_began_s = self._clock()
        self.progressed()

    def cell_ended(self) -> None:
        self._cell_began_s = None
        self.progressed()

    def progressed(self) -> None:
        self._last_progress_s = self._clock()

    def passed(self) -> str | None:
        """Which limit has been passed, in words. A run can stall in a cell only: a kernel's start has its own limit."""
        cell_s, deadline_s, stall_s = self._limits.cell_s, self._limits.deadline_s, self._limits.stall_s
        if deadline_s is not None and self._clock() - self._began_s >= deadline_s:
            return f"the run's deadline of {deadline_s:g} s has passed"
        if self._cell_began_s is None:
            return None
        if cell_s is not None and self._clock() - self._cell_began_s >= cell_s:
            return f"ran longer than {cell_s:g} s"
        if stall_s is not None and self._silence_s(stall_s) >= stall_s:
            return f"no output, no finished cell and no file for {stall_s:g} s"
        return None

    async def wait(self) -> str:
        """Return once a limit has been passed: which."""
        while (limit := self.passed()) is None:
            await asyncio.sleep(_TICK_S)
        return limit

    def _silence_s(self, enough_s: float) -> float:
        """Files are looked at only once there was no other sign for `enough_s`."""
        if self._clock() - self._last_progress_s >= enough_s:
            self._last_progress_s = max(self._last_progress_s, self._clock() - self._file_age_s())
        return self._clock() - self._last_progress_s


def file_age_s(run_dir: Path) -> float:
    """Seconds since a file under `run_dir` was last written, the notebook that the runner itself saves left aside."""
    times = [
        _modified(path) for path in run_dir.rglob("*") if not path.name.startswith(".") and path.suffix != ".ipynb"
    ]
    return time.time() - max(times, default=0.0)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime if path.is_file() else 0.0
    except OSError:  # gone since it was listed
        return 0.0
