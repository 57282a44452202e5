"""Room on the disk for a run's last words."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_RESERVED_BYTES = 4 << 20


@contextlib.contextmanager
def disk_reserve(run_dir: Path) -> Iterator[None]:
    """Hold 4 MiB of the disk until leaving, so that the end of a run can be written though its cells filled the disk.

    The file has no name, so none is left when the runner is killed. On a disk without that much room nothing is held.
    """
    with contextlib.ExitStack() as held:
        try:
            file = held.enter_context(tempfile.TemporaryFile(dir=run_dir))
            os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
        except OSError:
            held.close()
        yield
