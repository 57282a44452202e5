"""Room on the disk for a run's last words."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from p99lab.errors import BadParameterError
from p99lab.lab.run_folder import UnwritableError

_RESERVED_BYTES = 4 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def disk_reserve(run_dir: Path) -> Iterator[None]:
    """Hold 4 MiB of the disk until leaving, so that the end of a run can be written though its cells filled the disk.

    The file has no name, so none is left when the runner is killed. On a disk without that much room nothing is held.
    """
    with contextlib.ExitStack() as held:
        try:
            _reserve(held.enter_context(tempfile.TemporaryFile(dir=run_dir)))
        except OSError:
            held.close()
        yield


def make_writable(folder: Path) -> None:
    """Make a folder where there is none, and see that it takes files and has the room that a run holds.

    Raises:
        BadParameterError: it cannot be made, or not be written.
        UnwritableError: the disk is too full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file)
    except OSError as error:
        if error.errno in _FULL:
            raise UnwritableError(f"no room for 4 MiB in {folder}: {error.strerror}") from None
        raise BadParameterError(f"cannot write to {folder}: {error.strerror}") from None


def _reserve(file: IO[bytes]) -> None:
    """Take the room, where the disk can promise any."""
    try:
        if sys.platform == "linux":
            os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
        else:
            file.write(bytes(_RESERVED_BYTES))
            file.flush()
    except OSError as error:
        if error.errno in _FULL:
            raise
