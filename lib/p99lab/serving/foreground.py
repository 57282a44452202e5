"""`p99lab serve`: the engine in this process, its gateways in children, until a signal says otherwise."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from p99lab.engine import model_store
from p99lab.engine.interpreter import shared_interpreter
from p99lab.serving import sockets
from p99lab.serving.gateways import Gateways, gateways
from p99lab.serving.options import Ready, ServeOptions


def serve(options: ServeOptions, on_ready: Callable[[Ready], None]) -> None:
    """Make an engine and serve it until SIGTERM or SIGINT, then drain; a second signal gives running requests up.

    Args:
        on_ready: called once requests are taken.

    Raises:
        BadParameterError: the address cannot be had, the key's variable is not set, or as `Engine` raises it.
        ModelError: as `Engine` raises it.
        ServerProcessError: a gateway has not come up, or has ended by itself.
    """
    api_key = options.read_api_key()
    model_store.check(options.model)
    with contextlib.closing(sockets.bind(options.host, options.port)) as listening:
        from p99lab.engine.engine import Engine  # imports torch: only now that the rest is known to be right

        with (
            Engine(options.engine_config) as engine,
            shared_interpreter(),
            gateways(engine, options.name, listening, options.drain_timeout, api_key, options.gateways) as running,
            _stopped_by_signals(running),
        ):
            if running.await_ready():
                is_exposed = api_key is None and not sockets.is_loopback(listening)
                on_ready(Ready(options.name, sockets.url(listening), is_exposed))
                running.wait()


@contextlib.contextmanager
def _stopped_by_signals(running: Gateways) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: running.stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
