from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from p99lab.lab.watchdog import Limits, Watchdog, file_age_s

pytestmark = pytest.mark.light


class Times:
    """A clock that is set, and the age of the run's newest file."""

    now_s = 0.0
    file_written_s = -1000.0

    def watch(self, limits: Limits) -> Watchdog:
        return Watchdog(limits, lambda: self.now_s - self.file_written_s, lambda: self.now_s)


@pytest.fixture
def times() -> Times:
    return Times()


def test_without_limits_nothing_is_passed(times: Times) -> None:
    watchdog = times.watch(Limits())
    watchdog.cell_started()
    times.now_s = 1e9
    assert watchdog.passed() is None


def test_a_deadline_counts_from_the_start_and_everywhere(times: Times) -> None:
    watchdog = times.watch(Limits(deadline_s=10.0))
    times.now_s = 9.9
    assert watchdog.passed() is None
    watchdog.cell_started()
    times.now_s = 10.0
    assert watchdog.passed() == "the run's deadline of 10 s has passed"


def test_a_cell_has_its_own_time(times: Times) -> None:
    watchdog = times.watch(Limits(cell_s=5.0))
    times.now_s = 100.0
    watchdog.cell_started()
    times.now_s = 104.0
    watchdog.progressed()
    assert watchdog.passed() is None
    times.now_s = 105.0
    assert watchdog.passed() == "ran longer than 5 s"
    watchdog.cell_ended()
    assert watchdog.passed() is None


def test_output_cells_and_files_are_progress(times: Times) -> None:
    watchdog = times.watch(Limits(stall_s=5.0))
    times.now_s = 100.0
    assert watchdog.passed() is None  # no cell yet
    watchdog.cell_started()
    times.now_s = 104.0
    watchdog.progressed()
    times.now_s = 108.0
    assert watchdog.passed() is None
    times.file_written_s = 108.5
    times.now_s = 113.0
    assert watchdog.passed() is None
    times.now_s = 113.5
    assert watchdog.passed() == "no output, no finished cell and no file for 5 s"


def test_waiting_ends_with_the_limit_that_was_passed(times: Times) -> None:
    watchdog = times.watch(Limits(deadline_s=10.0))
    times.now_s = 11.0
    assert "deadline of 10 s" in asyncio.run(watchdog.wait())


def test_the_age_of_a_runs_newest_file(tmp_path: Path) -> None:
    assert file_age_s(tmp_path) > 1e6
    for name, age_s in {"metrics/a.json": 50.0, "b.csv": 500.0, "notebook.ipynb": 0.0, ".draft": 0.0}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        os.utime(path, (time.time() - age_s,) * 2)
    assert 50.0 <= file_age_s(tmp_path) < 500.0  # the runner's own saves are no progress
