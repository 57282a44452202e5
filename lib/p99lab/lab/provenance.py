"""What code and what packages a run was made with. No host or user names, no absolute paths."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = "outputs"  # of a checkout: what was measured, no code


def environment() -> dict[str, Any]:
    """Python and every installed package with its version."""
    packages = {
        distribution.metadata["Name"]: distribution.version for distribution in importlib.metadata.distributions()
    }
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


@dataclass(frozen=True)
class GitState:
    """The revision that ran, and how the working tree differed from it: `patch` in tracked files, others by name."""

    revision: str | None
    untracked: tuple[str, ...] = ()
    patch: str = ""

    @property
    def is_dirty(self) -> bool:
        return bool(self.untracked or self.patch)

    def as_record(self) -> dict[str, Any]:
        return {"revision": self.revision, "dirty": self.is_dirty, "untracked": list(self.untracked)}


def git_state(root: Path) -> GitState:
    """The state of the checkout at `root`; revision None where there is no git, no commit, or no repository there.

    New files below `outputs/` are none of the code's: a run that was published leaves it clean.
    A repository that merely encloses `root` is a stranger's: an installed package may lie inside one.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    revision = _git(root, "rev-parse", "HEAD")
    if top is None or revision is None or Path(top.removesuffix("\n")).resolve() != root.resolve():
        return GitState(None)
    code = ("--", ".", f":(exclude){RESULTS}")
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", *code) or ""
    patch = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color", *code) or ""
    return GitState(revision.strip(), tuple(untracked.splitlines()), patch)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape").encode(errors="replace").decode()


def short_revision(record: Mapping[str, Any]) -> str:
    """Of the code that a run's record names, short; `+` where the working tree had changes. Empty: none is named."""
    revision = record.get("revision")
    return f"{str(revision)[:12]}{'+' if record.get('dirty') else ''}" if revision else ""
