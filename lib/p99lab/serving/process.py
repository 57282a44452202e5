"""A server in a process of its own, as load is best measured against: nothing of the client slows it."""

from __future__ import annotations

import contextlib
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from p99lab.errors import P99labError
from p99lab.serving import child

END_TIMEOUT_S = 10.0


class ServerProcessError(P99labError):
    """A server did not come up."""


@contextlib.contextmanager
def server_process(arguments: Sequence[str] = (), *, ready_timeout_s: float = 120.0) -> Iterator[str]:
    """`p99lab serve` with these arguments, on a free port of its own choice; yields its URL, which ends in `/v1`.

    The child dies with this process. On leaving it is told to end, and killed if it has not after 10 seconds.

    Raises:
        ServerProcessError: it has not come up; with the last line that it wrote to stderr.
    """
    command = child.command("p99lab.cli", ["serve", *arguments, "--port", "0"])
    with (
        tempfile.TemporaryFile() as stderr,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        try:
            yield _await_url(process, stderr, ready_timeout_s)
        finally:
            _end(process)


def _await_url(process: subprocess.Popen[bytes], stderr: IO[bytes], timeout_s: float) -> str:
    """The end of the one line that a server writes when it is ready."""
    assert process.stdout is not None
    began_s = time.monotonic()
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    line = process.stdout.readline().decode() if readable else ""
    if line.startswith("serving "):
        return line.rpartition(" at ")[2].strip()
    waited_s = time.monotonic() - began_s
    stderr.seek(0)
    said = [text for text in stderr.read().decode(errors="replace").splitlines() if text.strip()]
    reason = said[-1].removeprefix("p99lab: ") if said else "it gave no reason"
    raise ServerProcessError(f"no server after {waited_s:.0f} s: {reason}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
