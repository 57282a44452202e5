"""Turns at a lock that one thread takes again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Tells the thread that does nothing but step that another waits for `lock`, so that it gives way.

    Else it may take the lock every time: who has just let it go is the first to ask for it.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: set[object] = set()

    @property
    def is_awaited(self) -> bool:
        """Whether some thread waits for its turn, or has it."""
        return bool(self._waiting)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The lock, asked for aloud."""
        me = object()
        self._waiting.add(me)
        try:
            with self._lock:
                yield
        finally:
            self._waiting.discard(me)
