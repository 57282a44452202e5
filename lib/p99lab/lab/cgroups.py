"""Control groups, versions 1 and 2, as /proc tells of them: whom the OOM killer took, and groups left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")
_REMOVAL_PATIENCE_S = 2.0  # a group stays busy for a moment after its last process was killed


@dataclass(frozen=True)
class Hierarchy:
    """One mounted tree. `root`: which group is visible at `mount`. Version 2 has no `controllers` in its name."""

    mount: Path
    root: PurePosixPath
    controllers: frozenset[str]

    def lineage(self, group: PurePosixPath) -> list[Path]:
        """The directories of a group and of its visible ancestors, its own first; of the top alone for one outside."""
        inside = group.relative_to(self.root) if group.is_relative_to(self.root) else PurePosixPath()
        steps = [step for step in (inside, *inside.parents) if ".." not in step.parts]
        return [self.mount / step for step in steps] or [self.mount]


class OomKills:
    """How often the OOM killer has struck in a process's memory group since this was made.

    Linux counts a kill in the victim's own group, whichever limit was hit: `oom_kill` in memory.oom_control (version
    1, of that group alone) or in memory.events (version 2, of that group and those below). What an ancestor of the
    group counts may be somebody else's, so it is asked only where the group itself has no counter.
    Source: the kernel's admin-guide, cgroup-v1/memory.rst and cgroup-v2.rst.
    """

    def __init__(self, pid: int, proc: Path = _PROC) -> None:
        self._counter = next(_counters(pid, proc), None)
        self._before = self._count()

    def happened(self) -> bool:
        """Whether one was counted; False also where nothing counts them."""
        return self._count() > self._before

    def _count(self) -> int:
        return 0 if self._counter is None else _oom_kills(self._counter) or 0


def named(name: str, proc: Path = _PROC) -> list[Path]:
    """Groups of this name that stand at the top, or beside this process's own group or above it."""
    parents = (
        parent for tree in hierarchies(proc) for parent in (*tree.lineage(_group_of("self", tree, proc)), tree.mount)
    )
    return [parent / name for parent in dict.fromkeys(parents) if (parent / name).is_dir()]


def remove(name: str, proc: Path = _PROC) -> None:
    """Remove the groups of this name and those below them; they must be empty, or about to be."""
    until = time.monotonic() + _REMOVAL_PATIENCE_S
    for group in named(name, proc):
        for directory, _, _ in os.walk(group, topdown=False):
            while not _removed(Path(directory)) and time.monotonic() < until:
                time.sleep(0.02)


def _counters(pid: int, proc: Path) -> Iterator[Path]:
    """Files that count OOM kills for a process, the nearest first."""
    trees = hierarchies(proc)
    version_1 = [tree for tree in trees if "memory" in tree.controllers]
    for tree in version_1 or [tree for tree in trees if not tree.controllers]:
        for directory in tree.lineage(_group_of(pid, tree, proc)):
            for counter in (directory / "memory.oom_control", directory / "memory.events"):
                if _oom_kills(counter) is not None:
                    yield counter


def _oom_kills(counter: Path) -> int | None:
    try:
        fields = dict(line.split() for line in counter.read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(fields["oom_kill"]) if fields.get("oom_kill", "").isdigit() else None


def hierarchies(proc: Path = _PROC) -> list[Hierarchy]:
    """What is mounted here, from /proc/self/mountinfo; nothing where there is no such file."""
    try:
        lines = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return []
    return [tree for line in lines if (tree := _hierarchy(line)) is not None]


def _hierarchy(line: str) -> Hierarchy | None:
    where, _, what = line.partition(" - ")
    kind, _, options = what.split(" ", 2)
    if kind not in ("cgroup", "cgroup2"):
        return None
    root, mount = (field.replace("\\040", " ") for field in where.split()[3:5])
    controllers = frozenset(options.split(",")) - {"rw", "ro"} if kind == "cgroup" else frozenset[str]()
    return Hierarchy(Path(mount), PurePosixPath(root), controllers)


def _group_of(pid: int | str, tree: Hierarchy, proc: Path) -> PurePosixPath:
    """A process's group in a tree; the tree's root where it cannot be told."""
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if tree.controllers.intersection(controllers.split(",")) or not (controllers or tree.controllers):
                return PurePosixPath(group)
    return tree.root


def _removed(directory: Path) -> bool:
    """False while a process in it is still on its way out; what cannot be removed at all stays."""
    try:
        directory.rmdir()
    except OSError as error:
        return error.errno != errno.EBUSY
    return True
