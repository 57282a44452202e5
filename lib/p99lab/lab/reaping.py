"""What a run has outside its folder (processes, shared memory, cgroups, sockets), and how it goes, whoever has died.

A run owns what it can be known by: processes carry its folder in their environment; shared memory and cgroups are named
after it, or the memory came into being during the run in the hands of its processes and in nobody else's. The runner
clears this away at its end. Should the runner be killed, a guardian does, a process that waits for just that; should
both be killed, the next run does. Linux only: elsewhere there is no /proc to learn from, and processes alone are found.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, Self

import psutil

from p99lab.lab import cgroups
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE

_PREFIX = "p99lab-kernel-"
_OWNER = "owner"
_NOTED = "shared-memory"
_SHARED_MEMORY = Path("/dev/shm")
_SOCKET_PATH_LIMIT = 100  # sun_path holds 108 bytes, and the channel's number is appended
_UNBORN_S = 60.0  # a folder without an owner this old has lost it before it was written
_EXEC_PATIENCE_S = 1.0
_KILL_PATIENCE_S = 5.0
_TRACKER_PATIENCE_S = 2.0
_MAX_SCAN_SHARE = 0.02  # of the time, however busy /dev/shm is


class Segment(NamedTuple):
    """A piece of POSIX shared memory. Names are used again, so the inode belongs to its identity."""

    inode: int
    name: str


def name_of(run_dir: Path) -> str:
    """What shared memory (as a prefix) and cgroups of a run are called."""
    return f"p99lab-{run_dir.name}"


class Belongings:
    """Of one run. `folder` is private, short enough for socket names, and locked as long as the runner lives."""

    def __init__(self, folder: Path, owner: IO[str], run_dir: Path, before: Iterable[Segment]) -> None:
        self.folder = folder
        self._owner = owner
        self._run_dir = run_dir
        self._before = frozenset(before)
        self._guardian: subprocess.Popen[bytes] | None = None
        self._last_change_ns = 0
        self._next_scan_s = 0.0

    @classmethod
    def claim(cls, run_dir: Path) -> Self:
        """Those of a run that begins; what runners left that were killed is cleared away first."""
        sweep()
        folder = _private_folder()
        owner = (folder / _OWNER).open("w")
        fcntl.flock(owner, fcntl.LOCK_EX)
        claimed = cls(folder, owner, run_dir, _segments())
        json.dump({"run_dir": str(run_dir), "before": sorted(claimed._before)}, owner)
        owner.flush()
        claimed._guardian = _start_guardian(folder)
        return claimed

    @classmethod
    def abandoned(cls, folder: Path, wait: bool = False) -> Self | None:
        """Those of a runner that is dead; None while it lives (unless told to `wait`), and once they are gone."""
        with contextlib.ExitStack() as opened:
            try:
                owner = opened.enter_context((folder / _OWNER).open("r+"))
                fcntl.flock(owner, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                told = json.load(owner)
            except (OSError, ValueError):  # held, gone, or empty: its runner was killed, or is, as it writes
                return None
            opened.pop_all()
            return cls(folder, owner, Path(told["run_dir"]), (Segment(*segment) for segment in told["before"]))

    def note_shared_memory(self) -> None:
        """Write down what shared memory the run's processes hold: a killed process can no longer be asked."""
        held = {segment for process in processes_of(self._run_dir) for segment in _held_by(process.pid)}
        new = held - self._before - self._noted()
        with contextlib.suppress(OSError), (self.folder / _NOTED).open("a") as file:  # a full disk costs the note
            file.writelines(f"{json.dumps(segment)}\n" for segment in sorted(new))

    def note_shared_memory_if_changed(self) -> None:
        """The same, to be called often: it costs nothing while no shared memory comes or goes on this machine."""
        change_ns = _SHARED_MEMORY.stat().st_mtime_ns if _SHARED_MEMORY.is_dir() else 0
        if change_ns == self._last_change_ns or time.monotonic() < self._next_scan_s:
            return
        began_s = time.monotonic()
        self._last_change_ns = change_ns
        self.note_shared_memory()
        self._next_scan_s = time.monotonic() + (time.monotonic() - began_s) / _MAX_SCAN_SHARE

    def clear(self) -> None:
        """Processes, shared memory, cgroups, folder: none is left. Belongings of other runs are not touched."""
        self.note_shared_memory()
        reap(self._run_dir)
        for segment in self._owned_segments():
            _SHARED_MEMORY.joinpath(segment.name).unlink(missing_ok=True)
        cgroups.remove(name_of(self._run_dir))
        if self._guardian is not None:
            self._guardian.kill()
            self._guardian.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._owner.close()

    def _noted(self) -> set[Segment]:
        with contextlib.suppress(OSError):
            return {Segment(*json.loads(line)) for line in (self.folder / _NOTED).read_text().splitlines()}
        return set()

    def _owned_segments(self) -> set[Segment]:
        """Those that were noted, are still there, are this user's, and are in no living process's hands."""
        here = _segments()
        named = {segment for segment in here if segment.name.startswith(f"{name_of(self._run_dir)}-")}
        noted = self._noted() & here
        if noted:
            noted -= {segment for pid in psutil.pids() for segment in _held_by(pid)}
        return named | noted


def sweep() -> None:
    """Clear away what runs left whose runners were killed."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            _sweep_one(folder)


def left_by(run_dir: Path) -> list[str]:
    """What there still is of a run outside its folder, one line each; nothing, once it has ended."""
    name = name_of(run_dir)
    return [
        *(f"process {process.pid}" for process in processes_of(run_dir)),
        *(f"shared memory {segment.name}" for segment in _segments() if segment.name.startswith(f"{name}-")),
        *(f"cgroup {group}" for group in cgroups.named(name)),
        *(f"socket folder {folder}" for folder in _folders() if _tells_of(run_dir, folder)),
    ]


def _sweep_one(folder: Path) -> None:
    if (left := Belongings.abandoned(folder)) is not None:
        left.clear()
    elif not _has_owner(folder) and time.time() - folder.stat().st_mtime > _UNBORN_S:
        shutil.rmtree(folder, ignore_errors=True)


def _folders() -> Iterator[Path]:
    """Those of this user's runs. What others may have put in a shared /tmp is not read."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(parent).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.geteuid():
                    yield folder


def _tells_of(run_dir: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((folder / _OWNER).read_text())["run_dir"] == str(run_dir))
    return False


def _has_owner(folder: Path) -> bool:
    owner = folder / _OWNER
    return owner.is_file() and owner.stat().st_size > 0


def processes_of(run_dir: Path) -> Iterator[psutil.Process]:
    """Every process whose environment says it belongs to this run, orphans in sessions of their own included."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and _environment(process).get(ENVIRONMENT_VARIABLE) == str(run_dir):
                yield process


def _environment(process: psutil.Process) -> dict[str, str]:
    """A process that is replacing its program (exec) shows neither arguments nor environment: it is asked again.

    Kernel threads never show any; they have no program either.
    """
    until = time.monotonic() + _EXEC_PATIENCE_S
    while not (environment := process.environ()) and not process.cmdline() and process.exe():
        if time.monotonic() > until:
            break
        time.sleep(0.001)
    return environment


def reap(run_dir: Path) -> None:
    """Kill the run's processes and wait until they are gone.

    Python's resource trackers go last: once those they work for are dead, they unlink what those left, and end.
    """
    _until_none(lambda: [one for one in processes_of(run_dir) if not _is_tracker(one)], _kill, _KILL_PATIENCE_S)
    _until_none(lambda: list(processes_of(run_dir)), lambda _: None, _TRACKER_PATIENCE_S)
    _until_none(lambda: list(processes_of(run_dir)), _kill, _KILL_PATIENCE_S)


def _until_none(
    remaining: Callable[[], list[psutil.Process]], act: Callable[[psutil.Process], None], patience_s: float
) -> None:
    """Looks again each time: what is being killed may have just started another."""
    until = time.monotonic() + patience_s
    while (found := remaining()) and time.monotonic() < until:
        for process in found:
            act(process)
        time.sleep(0.02)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    return False


def _segments() -> set[Segment]:
    """All shared memory of this user's."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(_SHARED_MEMORY):
            with contextlib.suppress(OSError):  # gone since it was listed
                if entry.is_file(follow_symlinks=False) and entry.stat().st_uid == os.geteuid():
                    found.add(Segment(entry.inode(), entry.name))
    return found


def _held_by(pid: int) -> set[Segment]:
    """The shared memory that a process has mapped or open; nothing for one that is gone or not ours to look into."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
        names |= {line.split(None, 5)[5] for line in maps if f" {_SHARED_MEMORY}/" in line}
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                names.add(os.readlink(descriptor.path))
    return {segment for name in names if (segment := _segment(Path(name))) is not None}


def _segment(path: Path) -> Segment | None:
    """What stands directly in /dev/shm, as POSIX names do; files in folders there are somebody's files."""
    with contextlib.suppress(OSError):
        return Segment(path.stat().st_ino, path.name) if path.parent == _SHARED_MEMORY else None
    return None


def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    if len(folder) > _SOCKET_PATH_LIMIT - len("/k-1"):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
    return Path(folder)


def _start_guardian(folder: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, and not one of the run's processes: nothing aimed at runner or kernel hits it too."""
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-m", "p99lab.lab.reaping", str(folder)]
    return subprocess.Popen(
        command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    )


def guard(folder: Path) -> None:
    """Wait until the runner is dead, however it died, and clear away what it left."""
    if (left := Belongings.abandoned(folder, wait=True)) is not None and folder.is_dir():
        left.clear()


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
