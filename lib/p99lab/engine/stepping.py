"""Drives an engine in a thread of its own, so that asyncio clients can await its tokens."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from p99lab.engine.events import TokenEvent
from p99lab.engine.interrupts import uninterrupted

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine

POLL_S = 0.2  # how soon an idle thread notices that the engine or the interpreter is going
GIVE_WAY_S = 50e-6  # in which a thread that waits for the engine's lock gets it
IDLE_CHECK_S = 5.0  # idle for so long, the engine proves its accounts; sooner would fall between a client's requests

OnEvent = Callable[[TokenEvent], None]
Add = Callable[["Engine", OnEvent], str]
Command = Callable[["Engine"], object]


class StepLoop:
    """A thread that applies commands and steps while there is work, and sleeps on its inbox otherwise.

    It begins with the first command. The clients' event loops never wait for a step: they only put commands into the
    inbox. An idle thread keeps neither the engine nor the process alive. It is no daemon: the interpreter kills those
    inside a kernel of torch, and aborts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # a command comes before `stop`, or is refused; never held through a step

    def submit(self, command: Command) -> None:
        """Have `command` applied before the next step, after those submitted so far.

        Raises:
            EngineClosedError, EngineFailedError: the engine cannot be used; the command is not applied then.
        """
        with self._lock:
            engine = self._engine()
            if engine is not None and (failure := engine.failure) is not None:
                raise failure
            if self._thread is None:
                self._start()
            self._inbox.put(command)

    def stop(self) -> None:
        """End the thread, after the step in hand and the commands submitted so far. Does not wait for it.

        The engine refuses to be used by then.
        """
        with self._lock:
            self._inbox.put(None)

    def wait_for_inbox(self) -> None:
        """Return once every command submitted so far has been applied, or the thread has ended."""
        if self._thread is None:
            return
        applied = threading.Event()
        self._inbox.put(lambda engine: applied.set())
        while self._thread.is_alive() and not applied.wait(POLL_S):
            pass

    def stream(self, add: Add) -> AsyncGenerator[TokenEvent, None]:
        """Submit a request now; its events are to be awaited in the running event loop.

        `add(engine, on_event)` enters it into the engine, in this loop's thread, and returns its id; what it raises,
        the stream raises. Leaving the iteration early cancels the request. Errors as `submit`.
        """
        client = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent | Exception] = asyncio.Queue()
        entered: list[str] = []

        def deliver(event: TokenEvent | Exception) -> None:
            try:
                client.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the client's event loop is closed, and the client gone with it
                self._inbox.put(cancel)

        def enter(engine: Engine) -> None:
            try:
                entered.append(add(engine, deliver))
            except Exception as error:
                deliver(error)

        def cancel(engine: Engine) -> None:  # commands keep their order: by then the request has entered
            for request_id in entered:
                engine.cancel(request_id)

        self.submit(enter)
        return self._await(events, cancel)

    async def _await(
        self, events: asyncio.Queue[TokenEvent | Exception], cancel: Command
    ) -> AsyncGenerator[TokenEvent, None]:
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = isinstance(event, Exception) or event.finish_reason is not None
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not finished:
                self._inbox.put(cancel)

    def _start(self) -> None:
        with uninterrupted():
            thread = threading.Thread(target=self._run, name="p99lab-step-loop")
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        running, idle_s, checked = True, 0.0, True
        while running and self._engine() is not None and threading.main_thread().is_alive():
            wait_s = self._step()
            try:
                command = self._inbox.get(timeout=wait_s or POLL_S)
            except queue.Empty:
                idle_s += 0.0 if wait_s else POLL_S
                if idle_s >= IDLE_CHECK_S and not checked:
                    checked = self._check()
            else:
                idle_s, checked = 0.0, False
                running = self._obey(command)

    def _step(self) -> float:
        """Step until a command has come or no request is left (0), or while there is time to wait for one (seconds)."""
        engine = self._engine()
        if engine is None:
            return 0.0
        with _failing(engine):
            while self._inbox.empty() and engine.has_requests and threading.main_thread().is_alive():
                if spare_s := engine.spare_s:
                    return spare_s
                if engine.is_awaited:
                    time.sleep(GIVE_WAY_S)
                engine.advance()
        return 0.0

    def _obey(self, command: Command | None) -> bool:
        """Apply a command. False: stop."""
        engine = self._engine()
        if command is None or engine is None:
            return False
        with _failing(engine):  # clients' own errors go to their streams
            command(engine)
        return True

    def _check(self) -> bool:
        engine = self._engine()
        if engine is not None:
            with _failing(engine):
                engine.check()
        return True


@contextmanager
def _failing(engine: Engine) -> Iterator[None]:
    """What raises in here ends the engine, which tells its clients: no thread would go on with their requests."""
    try:
        yield
    except Exception as error:
        engine.fail(error)
