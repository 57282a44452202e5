"""Drives an engine in a thread of its own, so that asyncio clients can await its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from p99lab.engine.events import TokenEvent

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine

Command = Callable[[], object]
OnEvent = Callable[[TokenEvent], None]


class StepLoop:
    """A daemon thread that applies commands and steps while there is work, and sleeps on its inbox otherwise.

    The event loop never waits for a step: it only puts commands into the inbox.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._streams: dict[str, Callable[[TokenEvent | BaseException], None]] = {}
        self._thread = threading.Thread(target=self._run, name="p99lab-step-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step in hand and end the thread; open streams end with an error."""
        self._inbox.put(None)
        self._thread.join()

    def wait_for_inbox(self) -> None:
        """Return once every command submitted so far has been applied."""
        applied = threading.Event()
        self._submit(applied.set)
        while not applied.wait(timeout=0.1):
            if not self._thread.is_alive():
                raise RuntimeError("the engine's step loop has ended") from self._error

    async def stream(self, add: Callable[[OnEvent], str]) -> AsyncGenerator[TokenEvent, None]:
        """Events of one request. `add(on_event)` enters it into the engine, in this loop's thread, and returns its id.

        Leaving the iteration early cancels the request.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent | BaseException] = asyncio.Queue()
        entered: list[str] = []

        def deliver(event: TokenEvent | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the client's event loop is gone, and the client with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        def enter() -> None:
            try:
                entered.append(add(deliver))
                self._streams[entered[0]] = deliver
            except Exception as error:
                deliver(error)

        self._submit(enter)
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = isinstance(event, BaseException) or event.finish_reason is not None
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            if not finished:  # commands keep their order: by then the request has entered
                self._submit(lambda: [self._engine.cancel(request_id) for request_id in entered])

    def _submit(self, command: Command) -> None:
        if self._error is not None:
            raise RuntimeError("the engine's step loop has died") from self._error
        self._inbox.put(command)

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    for event in self._engine.step():
                        if event.finish_reason is not None:
                            self._streams.pop(event.request_id, None)
        except BaseException as error:
            self._error = error
        self._end_streams(self._error or RuntimeError("the engine was closed"))

    def _obey(self) -> bool:
        """Apply all waiting commands; without work, wait for one. False: stop."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False

    def _end_streams(self, error: BaseException) -> None:
        for deliver in self._streams.values():
            deliver(error)
        self._streams.clear()
