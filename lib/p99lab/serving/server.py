"""A server on a socket: how it comes up, and how it goes down without dropping what it has begun."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from p99lab.engine import model_store
from p99lab.errors import BadParameterError
from p99lab.serving.openai_api.app import make_app
from p99lab.serving.openai_api.service import Service
from p99lab.serving.options import Ready, ServeOptions

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine
from p99lab.engine.interpreter import shared_interpreter

KEEP_ALIVE_S = 120  # a client's connection may idle so long; a load with think time comes back on it
FAREWELL_S = 2  # for requests that were given up to tell their clients
BACKLOG = 2048


def serve(options: ServeOptions, on_ready: Callable[[Ready], None]) -> None:
    """Make an engine and serve it until SIGTERM or SIGINT, then drain; a second signal gives running requests up.

    Args:
        on_ready: called once requests are taken.

    Raises:
        BadParameterError: the address cannot be had, the key's variable is not set, or as `Engine` raises it.
        ModelError: as `Engine` raises it.
    """
    api_key = options.read_api_key()
    model_store.check(options.model)
    with contextlib.closing(bind(options.host, options.port)) as listening:
        from p99lab.engine.engine import Engine  # imports torch: only now that the rest is known to be right

        with Engine(options.engine_config) as engine, shared_interpreter():
            server = Server(engine, options.name, listening, options.drain_timeout, api_key)
            ready = Ready(options.name, server.url, api_key is None and not _is_loopback(listening))
            asyncio.run(_until_signalled(server, lambda: on_ready(ready)))


async def _until_signalled(server: Server, on_ready: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.run(on_ready)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Port 0: any that is free.

    Raises:
        BadParameterError: no such host, or the address is in use or not to be had.
    """
    with contextlib.ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise BadParameterError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        undo.pop_all()
        return bound


def _listen(bound: socket.socket) -> None:
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise BadParameterError(f"cannot listen on {_address(bound)}: {error.strerror}") from None


class Server:
    """An engine behind a bound socket. The engine is the caller's and stays open.

    Args:
        drain_timeout_s: how long `stop` lets running requests finish.
        api_key: what clients must show; None: nothing.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        listening: socket.socket,
        drain_timeout_s: float,
        api_key: str | None = None,
    ) -> None:
        self.url = f"http://{_address(listening)}/v1"
        self._service = Service(engine, model, api_key)
        self._listening = listening
        self._drain_timeout_s = drain_timeout_s
        self._stopping = asyncio.Event()
        config = uvicorn.Config(
            make_app(self._service),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=FAREWELL_S,
        )
        self._uvicorn = _Uvicorn(config)

    def stop(self) -> None:
        """Take no new requests, let the others finish; called again: give them up. From the server's event loop."""
        if self._stopping.is_set():
            self._service.closing.set()
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until stopped and drained; the socket is closed then.

        Raises:
            BadParameterError: another process has begun to listen on the address meanwhile.
        """
        _listen(self._listening)
        self._uvicorn.on_ready = on_ready
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._listening]))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await self._drain()
            self._uvicorn.should_exit = True
        stopping.cancel()
        await serving

    async def _drain(self) -> None:
        """Connections are still accepted meanwhile: a load balancer must be able to see that this server goes."""
        service = self._service
        service.draining = True
        waiting = [asyncio.create_task(service.wait_until_idle()), asyncio.create_task(service.closing.wait())]
        await asyncio.wait(waiting, timeout=self._drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        service.closing.set()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs it, and says when it listens."""

    on_ready: Callable[[], None]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
