"""A gateway's process: HTTP, JSON and text, for an engine in its parent.

Executed as a module by `gateways`, which writes its configuration to stdin as one line of JSON. One line on stdout
answers: `ready`, or why not. SIGTERM: no new requests, running ones finish; again, as SIGUSR1: at once. Ctrl-C, which
reaches every process of a terminal, is the parent's to act on.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

from p99lab.errors import P99labError
from p99lab.serving.gateway_config import FAILED, READY, GatewayConfig
from p99lab.serving.heap import keep_freed_memory
from p99lab.serving.remote_engine import remote_engine
from p99lab.serving.server import Server


def main() -> None:
    """Serve until told to end, or until the engine has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    config = GatewayConfig.parse(orjson.loads(sys.stdin.buffer.readline()))
    try:
        asyncio.run(_serve(config))
    except P99labError as error:
        _write_line(f"{FAILED}{error}")
        sys.exit(error.exit_code)


async def _serve(config: GatewayConfig) -> None:
    async with remote_engine(config.address) as engine:
        listening = socket.socket(fileno=config.listening_fd)
        server = Server(engine, config.model, listening, config.drain_timeout_s, config.api_key, config.gateway)
        with _stopping(server):
            watching = asyncio.create_task(_stop_with(engine.gone, server))
            await server.run(lambda: _write_line(READY))
            watching.cancel()


@contextmanager
def _stopping(server: Server) -> Iterator[None]:
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGUSR1)
    for number in numbers:
        loop.add_signal_handler(number, server.stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _stop_with(gone: asyncio.Event, server: Server) -> None:
    """A gateway without its engine has nothing to offer: its clients are told, and it ends."""
    await gone.wait()
    server.stop()


def _write_line(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
