"""An event loop whose time is what was slept: minutes pass in milliseconds, through the code of a real run."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """asyncio asks it to wait until the next timer, once nothing else is ready; it jumps there and waits not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only as timers are waited for. For code that waits for nothing else."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """A coroutine function's result, its time virtual."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
