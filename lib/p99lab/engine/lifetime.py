"""Whether an engine can still be used, and why not."""

from __future__ import annotations

import os
import traceback

from p99lab.errors import EngineClosedError, EngineFailedError


class Lifetime:
    """Ends by `close`, by `fail`, or in the other process by a fork. Any thread may ask, and waits for none."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_closed = False
        self._reason: traceback.TracebackException | None = None

    def close(self) -> None:
        self._is_closed = True

    def fail(self, error: BaseException) -> None:
        """End it because of `error`."""
        self._reason = traceback.TracebackException.from_exception(error)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one it began in: locks and threads are that one's."""
        return os.getpid() != self._pid

    @property
    def has_failed(self) -> bool:
        return self._reason is not None

    @property
    def end(self) -> EngineFailedError | EngineClosedError | None:
        """A new error that says how it has ended, a failure with the traceback as its note; None: it has not."""
        if self.is_forked:
            return EngineClosedError("an engine does not survive a fork: make one in this process")
        if self._reason is not None:
            reason = "".join(self._reason.format_exception_only()).splitlines()[0]
            error = EngineFailedError(f"this engine has failed, make a new one ({reason})")
            error.add_note("".join(self._reason.format()))
            return error
        return EngineClosedError("the engine is closed") if self._is_closed else None
