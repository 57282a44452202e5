"""Virtual environments for other projects' tools, so that their packages and ours never meet."""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from p99lab.engine.model_store import cache_dir
from p99lab.errors import P99labError

DONE_FILE = "p99lab-requirements.txt"  # written last: what lies beside it is whole


class PeerEnvironmentError(P99labError):
    """An environment of another project's tools could not be made."""


def environment(name: str, requirements: Sequence[str], constraints: Sequence[str] = ()) -> Path:
    """The Python of an environment that holds `requirements`, made on first use, below `cache_dir()/peers`.

    Made anew when either list or this Python's version changes. One process at a time makes one, others wait.

    Args:
        requirements: what pip installs.
        constraints: versions for what these bring along; installed only where something needs it.

    Raises:
        PeerEnvironmentError: pip has failed; with its last line.
    """
    folder = cache_dir() / "peers" / name
    wanted = _wanted(requirements, constraints)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / DONE_FILE
        if not done.is_file() or done.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)])
            limits = folder / "constraints.txt"
            limits.write_text("".join(f"{one}\n" for one in constraints))
            options = ("--no-input", "--disable-pip-version-check", "--quiet", "--prefer-binary")
            _run([str(_python(folder)), "-m", "pip", "install", *options, "--constraint", str(limits), *requirements])
            done.write_text(wanted)
    return _python(folder)


def _wanted(requirements: Sequence[str], constraints: Sequence[str]) -> str:
    limits = [f"# constraint: {one}" for one in constraints]
    return "\n".join([f"# Python {platform.python_version()}", *limits, *requirements, ""])


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _run(command: Sequence[str]) -> None:
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        lines = [line for line in made.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise PeerEnvironmentError(f"{' '.join(command[1:4])} has failed: {lines[-1].strip()}")
