"""Gateways around an engine of this process: HTTP, JSON, tokenising and text in processes of their own.

They die with this process, and share one listening socket, so that each accepts what the others have no time for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import orjson

from p99lab.serving import child, sockets
from p99lab.serving.engine_service import engine_service
from p99lab.serving.gateway_config import FAILED, READY, GatewayConfig
from p99lab.serving.process import ServerProcessError

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine

START_TIMEOUT_S = 60.0
SHUTDOWN_GRACE_S = 10.0  # beyond the drain's own time-out
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "tokenizers")  # by gateways, and not by this process


@contextlib.contextmanager
def serve_from_process(
    engine: Engine,
    *,
    model: str | None = None,
    api_key: str | None = None,
    drain_timeout_s: float = 5.0,
    num_gateways: int = 1,
    on_loss: Callable[[], object] | None = None,
) -> Iterator[str]:
    """Serve an engine on a free port of the loopback; yields the URL, which ends in `/v1`.

    HTTP, JSON, tokenising and text cost other processes, not this one, which steps the engine. The engine is the
    caller's: it is open before and after, and may be reconfigured between requests. On leaving, running requests have
    `drain_timeout_s` to finish.

    Args:
        model: the name to clients; the engine's own when None.
        on_loss: called in a thread as soon as a gateway has ended by itself: its clients may wait for ever.

    Raises:
        ServerProcessError: a gateway has not come up, or (on leaving, whatever was raised within) has ended by itself.
        ModuleNotFoundError: a package of the extra `serve` is missing.
    """
    with contextlib.closing(sockets.bind("127.0.0.1", 0)) as listening:
        name = model or engine.config.model.name
        with gateways(engine, name, listening, drain_timeout_s, api_key, num_gateways) as running:
            running.await_ready()
            with running.watched(on_loss) if on_loss is not None else contextlib.nullcontext():
                try:
                    yield sockets.url(listening)
                except Exception:
                    running.check()
                    raise
                running.check()


def require_packages() -> None:
    """
    Raises:
        ModuleNotFoundError: a package that gateways need is missing.
    """
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"no package '{package}'", name=package)


@contextlib.contextmanager
def gateways(
    engine: Engine,
    model: str,
    listening: socket.socket,
    drain_timeout_s: float,
    api_key: str | None = None,
    num_gateways: int = 1,
) -> Iterator[Gateways]:
    """Start gateways on a bound socket. On leaving they are told to drain, and killed if they take too long.

    Raises:
        BadParameterError: the address cannot be listened on, or see `engine_service`.
        ModuleNotFoundError: a package that gateways need is missing.
    """
    require_packages()
    sockets.listen(listening)
    with engine_service(engine, num_gateways) as address, contextlib.ExitStack() as leaving:
        config = GatewayConfig(
            address=address,
            listening_fd=listening.fileno(),
            model=model,
            drain_timeout_s=drain_timeout_s,
            api_key=api_key,
        )
        numbers = range(1, num_gateways + 1) if num_gateways > 1 else (None,)
        configs = [config.model_copy(update={"gateway": number}) for number in numbers]
        processes = [leaving.enter_context(_started(each)) for each in configs]
        running = leaving.enter_context(contextlib.closing(Gateways(processes, drain_timeout_s)))
        try:
            yield running
        finally:
            running.end()


class Gateways:
    """The running gateways of one engine. A gateway's stdout closes when it ends: that is how its end is noticed."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], drain_timeout_s: float) -> None:
        self._processes = processes
        self._drain_timeout_s = drain_timeout_s
        self._num_stops = 0
        self._deadline_s = float("inf")  # by then they have ended, or are killed
        self._told, self._tell = os.pipe()  # a byte each stop, for who waits

    def close(self) -> None:
        os.close(self._told)
        os.close(self._tell)

    def await_ready(self) -> bool:
        """Return once all take requests. False: they were stopped before.

        Raises:
            ServerProcessError: one has not come up.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for process in self._processes:
            line = _next_line(process, deadline_s)
            if self._num_stops:
                return False
            if line is None:
                raise ServerProcessError(f"no gateway after {START_TIMEOUT_S:.0f} s")
            if line != READY:
                raise ServerProcessError(f"no gateway: {line.removeprefix(FAILED)}" if line else self._end_of(process))
        return True

    def stop(self) -> None:
        """Take no new requests, let the others finish; called again: give them up. Safe in a signal handler."""
        number = signal.SIGUSR1 if self._num_stops else signal.SIGTERM
        patience_s = SHUTDOWN_GRACE_S + (0.0 if self._num_stops else self._drain_timeout_s)
        self._deadline_s = min(self._deadline_s, time.monotonic() + patience_s)
        self._num_stops += 1
        for process in self._processes:
            process.send_signal(number)
        os.write(self._tell, b"!")

    def wait(self) -> None:
        """Return when all have ended, as they were asked to.

        Raises:
            ServerProcessError: one has ended by itself, or has not ended in time; the others still run.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._told, selectors.EVENT_READ)
            _register(selector, self._processes)
            while len(selector.get_map()) > 1:
                ready = selector.select(self._patience_s())
                if not ready and time.monotonic() >= self._deadline_s:
                    raise ServerProcessError("a gateway does not end and is killed: its clients' requests are lost")
                for key, _ in ready:
                    if key.data is None:
                        os.read(self._told, 1)
                    else:
                        self._require_asked(key.data)
                        selector.unregister(key.fileobj)

    @contextlib.contextmanager
    def watched(self, on_loss: Callable[[], object]) -> Iterator[None]:
        """Have `on_loss` called in a thread, once, as soon as `wait` would raise. On leaving they are ended."""

        def watch() -> None:
            try:
                self.wait()
            except ServerProcessError:
                on_loss()

        watching = threading.Thread(target=watch, name="p99lab-gateway-watch", daemon=True)
        watching.start()
        try:
            yield
        finally:
            self.end()
            watching.join()

    def check(self) -> None:
        """
        Raises:
            ServerProcessError: one has ended by itself.
        """
        for process in _readable(self._processes, 0.0):
            self._require_asked(process)

    def end(self) -> None:
        """Stop all and wait for them; those that take longer than the drain allows are killed."""
        if not self._num_stops:
            self.stop()
        for process in self._processes:
            try:
                process.wait(self._patience_s())
            except subprocess.TimeoutExpired:
                process.kill()

    def _patience_s(self) -> float | None:
        """Until the deadline; None before the first stop."""
        return max(0.0, self._deadline_s - time.monotonic()) if self._num_stops else None

    def _require_asked(self, process: subprocess.Popen[bytes]) -> None:
        if not self._num_stops:
            raise ServerProcessError(self._end_of(process))

    def _end_of(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"a gateway has ended by itself ({how}): its clients' requests are lost"


@contextlib.contextmanager
def _started(config: GatewayConfig) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway's process, killed on leaving if it has not ended by then."""
    command = child.command("p99lab.serving.gateway", ())
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[config.listening_fd]
    ) as process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # one that has died says so itself
                pipe.write(orjson.dumps(config.model_dump()) + b"\n")
            yield process
        finally:
            process.kill()


def _next_line(process: subprocess.Popen[bytes], deadline_s: float) -> str | None:
    """The next line of a process; empty: it has ended; None: there was none in time."""
    if not _readable([process], max(0.0, deadline_s - time.monotonic())):
        return None
    assert process.stdout is not None
    return process.stdout.readline().decode(errors="replace").strip()


def _readable(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float | None) -> list[subprocess.Popen[bytes]]:
    """Those whose stdout can be read: what has said all that it had to say is readable only when it has ended."""
    with selectors.DefaultSelector() as selector:
        _register(selector, processes)
        return [key.data for key, _ in selector.select(timeout_s)]


def _register(selector: selectors.BaseSelector, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ, process)
