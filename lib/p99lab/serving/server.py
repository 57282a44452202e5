"""A server on a socket: how it comes up, and how it goes down without dropping what it has begun."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from p99lab.serving import sockets
from p99lab.serving.engine_client import EngineClient
from p99lab.serving.openai_api.app import make_app
from p99lab.serving.openai_api.service import Service

KEEP_ALIVE_S = 120  # a client's connection may idle so long; a load with think time comes back on it
SHUTDOWN_GRACE_S = 2  # for requests that were given up to answer their clients


class Server:
    """An engine behind a bound socket. The engine is the caller's and stays open.

    Args:
        drain_timeout_s: how long `stop` lets running requests finish.
        api_key: what clients must show; None: nothing.
        gateway: see `Service`.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: str,
        listening: socket.socket,
        drain_timeout_s: float,
        api_key: str | None = None,
        gateway: int | None = None,
    ) -> None:
        self.url = sockets.url(listening)
        self._service = Service(engine, model, api_key, gateway)
        self._listening = listening
        self._drain_timeout_s = drain_timeout_s
        self._stopping = asyncio.Event()
        config = uvicorn.Config(
            make_app(self._service),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            backlog=sockets.BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
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
        sockets.listen(self._listening)
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
