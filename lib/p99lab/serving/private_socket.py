"""A Unix socket that only this user can reach, and of which nothing is left, however this process ends.

Its name is taken away as soon as it is listened on; others reach it through a handle of this process's in /proc. Where
that cannot be done, it keeps a name in a directory that only this user may enter, and what a killed process left of
that is cleared away by the next.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_PREFIX = "p99lab-"
_NAME = "engine.sock"
_MAX_PATH = 100  # sun_path holds 108 bytes
_UNBORN_S = 60.0  # a younger socket may be about to be listened on


@contextlib.contextmanager
def listening(listen: Callable[[Path], object]) -> Iterator[Path]:
    """Make a socket; yields the path, of at most 100 bytes, by which this user's processes connect to it.

    Args:
        listen: binds the path that it is given and listens on it; called again where the first socket is out of reach.
    """
    _sweep()
    with contextlib.ExitStack() as kept:
        path = _new_directory(kept) / _NAME
        listen(path)
        if (nameless := _handle(path, kept)) is not None:
            path.unlink()
            if _is_reached_by_others(nameless):
                path.parent.rmdir()
                path = nameless
            else:
                listen(path)
        yield path


def _handle(path: Path, kept: contextlib.ExitStack) -> Path | None:
    """Another way to a socket than by its name; None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        handle = os.open(path, os.O_PATH)
    except OSError:
        return None
    kept.callback(os.close, handle)
    return Path(f"/proc/{os.getpid()}/fd/{handle}")


def _is_reached_by_others(path: Path) -> bool:
    """Whether another process of this user connects by it: this one's own handles are always open to itself."""
    trial = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    command = [sys.executable, "-I", "-S", "-c", trial, str(path)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _new_directory(kept: contextlib.ExitStack) -> Path:
    """Under /tmp where the directory for temporary files has too long a path."""
    fits = len(tempfile.gettempdir()) + len(f"/{_PREFIX}12345678/{_NAME}") <= _MAX_PATH
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=None if fits else "/tmp", ignore_cleanup_errors=True)
    return Path(kept.enter_context(made))


def _sweep() -> None:
    """Remove this user's sockets that nobody listens on any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_NAME}"):
        with contextlib.suppress(OSError):
            is_ours = path.parent.lstat().st_uid == os.geteuid()
            is_old = time.time() - path.lstat().st_mtime > _UNBORN_S
            if is_ours and is_old and _connect(path) == errno.ECONNREFUSED:
                path.unlink()
                path.parent.rmdir()


def _connect(path: Path) -> int:
    """0, or the error's number."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)
        return trial.connect_ex(str(path))
