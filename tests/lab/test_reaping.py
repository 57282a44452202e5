"""What is a run's goes with it, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from p99lab.lab import reaping
from p99lab.lab.reaping import Belongings
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE

pytestmark = [
    pytest.mark.light,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked into by /proc"),
]

HOLD = """
import sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
held = [SharedMemory(name) for name in sys.argv[1:]] + [SharedMemory(create=True, size=4096)]
for segment in held:
    resource_tracker.unregister(segment._name, "shared_memory")
print(held[-1].name, flush=True)
time.sleep(600)
"""
TRACKED = """
import time
from multiprocessing.shared_memory import SharedMemory
print((held := SharedMemory(create=True, size=4096)).name, flush=True)
time.sleep(600)
"""
RUNNER = """
import os, subprocess, sys, time
from pathlib import Path
from p99lab.lab.reaping import Belongings
belongings = Belongings.claim(Path(sys.argv[1]))
server = subprocess.Popen(["sleep", "600"], start_new_session=True, env={**os.environ, "P99LAB_RUN_DIR": sys.argv[1]})
print(belongings.folder, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files of this test's own: runs that begin elsewhere on this machine sweep, too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / f"20260101-000000-000-{os.getpid():x}"
    folder.mkdir()
    return folder


@pytest.fixture
def untracked() -> Iterator[list[SharedMemory]]:
    """Shared memory of this process's, which its resource tracker does not know of."""
    made = [SharedMemory(create=True, size=4096) for _ in range(2)]
    for segment in made:
        resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    yield made
    for segment in made:
        segment.close()
        Path("/dev/shm", segment.name).unlink(missing_ok=True)


def start(script: str, *arguments: str, run_dir: Path | None = None) -> tuple[subprocess.Popen[str], str]:
    """A Python process, of that run where one is named, and its first word."""
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    if run_dir is not None:
        environment[ENVIRONMENT_VARIABLE] = str(run_dir)
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def exists(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def until_nothing_is_left(run_dir: Path) -> list[str]:
    until = time.monotonic() + 30.0
    while (left := reaping.left_by(run_dir)) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def test_shared_memory_that_came_with_the_run_goes_with_it_and_no_other(
    run_dir: Path, untracked: list[SharedMemory]
) -> None:
    older, held = untracked
    older.close()  # nobody holds it, but it was there before the run
    os.rename(f"/dev/shm/{held.name}", f"/dev/shm/{held.name}-away")
    belongings = Belongings.claim(run_dir)
    os.rename(f"/dev/shm/{held.name}-away", f"/dev/shm/{held.name}")  # came during the run; this process has it mapped
    process, own = start(HOLD, older.name, held.name, run_dir=run_dir)
    belongings.note_shared_memory_if_changed()
    process.kill()
    process.wait()
    assert exists(own)
    belongings.clear()
    assert [exists(name) for name in (own, older.name, held.name)] == [False, True, True]
    assert reaping.left_by(run_dir) == []


def test_shared_memory_named_after_the_run_needs_no_witness(run_dir: Path) -> None:
    belongings = Belongings.claim(run_dir)
    names = [f"{reaping.name_of(run_dir)}-pages", f"{reaping.name_of(run_dir)}0-pages"]
    for name in names:
        Path("/dev/shm", name).touch()
    try:
        assert reaping.left_by(run_dir) == [f"shared memory {names[0]}", f"socket folder {belongings.folder}"]
        belongings.clear()
        assert [exists(name) for name in names] == [False, True]
    finally:
        Path("/dev/shm", names[1]).unlink()


def test_a_resource_tracker_may_do_its_work(run_dir: Path) -> None:
    process, name = start(TRACKED, run_dir=run_dir)
    assert exists(name)
    reaping.reap(run_dir)
    process.wait()
    assert not exists(name)
    assert list(reaping.processes_of(run_dir)) == []


class Replaced(psutil.Process):
    """A process in the middle of an exec: the kernel has taken its old arguments and environment away."""

    looks = 0

    def environ(self) -> dict[str, str]:
        self.looks += 1
        return {} if self.looks < 3 else super().environ()

    def cmdline(self) -> list[str]:
        return [] if self.looks < 3 else super().cmdline()


def test_a_process_that_is_just_being_started_is_found(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, _ = start(TRACKED, run_dir=run_dir)
    replaced = Replaced(process.pid)
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "process_iter", lambda: iter([replaced]))
        found = list(reaping.processes_of(run_dir))
    reaping.reap(run_dir)
    process.wait()
    assert (found, replaced.looks) == ([replaced], 3)


def test_what_a_killed_runner_leaves_is_cleared_by_its_guardian(run_dir: Path) -> None:
    runner, folder = start(RUNNER, str(run_dir))
    assert len(reaping.left_by(run_dir)) == 2  # a server, a folder
    runner.kill()
    runner.wait()
    assert until_nothing_is_left(run_dir) == []
    assert not Path(folder).exists()


def test_what_both_leave_is_cleared_by_the_next_run_and_a_living_run_is_not_touched(
    run_dir: Path, tmp_path: Path
) -> None:
    living_dir = tmp_path / f"{run_dir.name}-living"
    living, _ = start(RUNNER, str(living_dir))
    runner, folder = start(RUNNER, str(run_dir))
    (guardian,) = (child for child in psutil.Process(runner.pid).children() if "p99lab.lab.reaping" in child.cmdline())
    guardian.send_signal(signal.SIGKILL)
    runner.kill()
    runner.wait()
    assert len(reaping.left_by(run_dir)) == 2
    reaping.sweep()
    assert reaping.left_by(run_dir) == []
    assert not Path(folder).exists()
    assert len(reaping.left_by(living_dir)) == 2
    living.kill()
    living.wait()
    assert until_nothing_is_left(living_dir) == []


def test_a_folder_without_an_owner_is_left_to_the_one_that_is_making_it(run_dir: Path, tmp_path: Path) -> None:
    belongings = Belongings.claim(run_dir)
    young = belongings.folder.with_name("p99lab-kernel-test-young")
    old = belongings.folder.with_name("p99lab-kernel-test-old")
    for folder in (young, old):
        folder.mkdir()
        (folder / "owner").touch()
    os.utime(old, (0, 0))
    try:
        reaping.sweep()
        assert young.is_dir()
        assert not old.exists()
    finally:
        belongings.clear()
        (young / "owner").unlink()
        young.rmdir()
