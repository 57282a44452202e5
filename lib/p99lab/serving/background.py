"""A server in a thread of this process, for notebooks that own the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from p99lab.serving.server import Server
from p99lab.serving.sockets import bind

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine


@contextlib.contextmanager
def serve_in_thread(
    engine: Engine, *, model: str | None = None, api_key: str | None = None, drain_timeout_s: float = 5.0
) -> Iterator[str]:
    """Serve an engine on a free port of the loopback; yields the URL, which ends in `/v1`.

    The engine is the caller's: it is open before and after. Signals are not touched. On leaving, running requests have
    `drain_timeout_s` to finish. Server and engine share one interpreter: for exploring. What is measured goes through
    `serve_from_process`.

    Args:
        model: the name to clients; the engine's own when None.
    """
    up: Future[asyncio.AbstractEventLoop] = Future()
    with contextlib.closing(bind("127.0.0.1", 0)) as listening:
        server = Server(engine, model or engine.config.model.name, listening, drain_timeout_s, api_key)
        thread = threading.Thread(target=_run, args=(server, up), name="p99lab-server")
        thread.start()
        try:
            up.result()
            yield server.url
        finally:
            with contextlib.suppress(Exception):  # it did not come up, or has ended already
                up.result().call_soon_threadsafe(server.stop)
            thread.join()


def _run(server: Server, up: Future[asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        await server.run(lambda: up.set_result(loop))

    try:
        asyncio.run(run())
    except BaseException as error:
        if up.done():
            raise
        up.set_exception(error)
