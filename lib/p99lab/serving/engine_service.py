"""The engine's side: its requests come from gateways in other processes, through a Unix socket.

Next to the step loop, and in its way as little as can be. Messages are read and written by gRPC's own threads; a prompt
is one buffer that the loop copies once; a step's tokens are handed over together, by one call, and become a message in
a thread that is not the loop's. The engine makes no text of these tokens.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import orjson

from p99lab.engine.events import TokenEvent
from p99lab.engine.request import FinishReason
from p99lab.errors import BadParameterError, EngineClosedError, EngineFailedError, P99labError
from p99lab.serving import private_socket
from p99lab.serving.protocol import engine_pb2 as pb
from p99lab.serving.protocol.link import OPTIONS, SERVICE_NAME
from p99lab.serving.protocol.messages import EngineRequest, Numbered, read_add, write_events

if TYPE_CHECKING:
    from p99lab.engine.config import EngineConfig
    from p99lab.engine.engine import Engine

LOGGER = logging.getLogger(__name__)
NUM_UNARY_THREADS = 2  # for what gateways ask beside their streams


@contextlib.contextmanager
def engine_service(engine: Engine, num_gateways: int = 1) -> Iterator[str]:
    """Serve an engine to at most `num_gateways` gateways at a time; yields the socket's address for gRPC.

    Only this user can reach the socket. On leaving, gateways lose their streams and what they had asked for is
    cancelled; the engine is the caller's and stays open.

    Raises:
        BadParameterError: the engine's clock is not `time.perf_counter`, the one that other processes share.
    """
    if engine.clock is not time.perf_counter:
        raise BadParameterError("an engine with a clock of its own cannot be served from another process")
    executor = ThreadPoolExecutor(num_gateways + NUM_UNARY_THREADS, thread_name_prefix="p99lab-gateway")
    server = grpc.server(executor, options=OPTIONS)
    server.add_generic_rpc_handlers((_handlers(engine),))
    with private_socket.listening(lambda path: server.add_insecure_port(f"unix:{path}")) as path:
        server.start()
        try:
            yield f"unix:{path}"
        finally:
            server.stop(grace=None).wait()
            executor.shutdown()


def _handlers(engine: Engine) -> Any:
    def serve(messages: Iterable[pb.FromGateway], context: grpc.ServicerContext) -> Iterator[pb.FromEngine]:
        session = Session(engine)
        reading = threading.Thread(target=session.read, args=(messages,), name="p99lab-gateway-reader")
        with engine.listening(session.flush):
            reading.start()
            yield from session.messages()
        reading.join()

    def describe(request: pb.Nothing, context: grpc.ServicerContext) -> pb.Json:
        return pb.Json(value=orjson.dumps({"config": _plain(engine.config), "geometry": _plain(engine.geometry)}))

    def stats(request: pb.Nothing, context: grpc.ServicerContext) -> pb.Json:
        return pb.Json(value=orjson.dumps(engine.stats().as_dict()))

    def unary(method: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(method, pb.Nothing.FromString, pb.Json.SerializeToString)

    stream = grpc.stream_stream_rpc_method_handler(serve, pb.FromGateway.FromString, pb.FromEngine.SerializeToString)
    methods = {"Serve": stream, "Describe": unary(describe), "Stats": unary(stats)}
    return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)


def _plain(model: Any) -> Any:
    return model.model_dump(mode="json")


class Session:
    """One gateway: which of its requests are in the engine, and which of their events it is still to get.

    `read` and `messages` each run in a thread of gRPC's or the session's; all else runs in the thread that steps,
    cancels or closes.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._name = uuid.uuid4().hex
        self._request_ids: dict[int, str] = {}  # by number; of those that have not ended
        self._events: list[Numbered] = []  # since the last flush
        self._config: EngineConfig | None = None  # as the gateway knows it
        self._outgoing: queue.SimpleQueue[tuple[list[Numbered], bytes | None] | None] = queue.SimpleQueue()

    def read(self, messages: Iterable[pb.FromGateway]) -> None:
        """Do what the gateway says, until it says no more; then give up its requests."""
        try:
            for message in messages:
                if message.WhichOneof("what") == "add":
                    self._add(message.add)
                else:
                    self._submit(partial(self._cancel, message.cancel))
        except grpc.RpcError:
            LOGGER.debug("a gateway has ended")
        finally:
            self._submit(self._cancel_all)
            self._outgoing.put(None)

    def messages(self) -> Iterator[pb.FromEngine]:
        """What goes to the gateway, a message a step; ends with the session."""
        yield write_events([], self._new_config(), self._engine.failure)
        while (batch := self._outgoing.get()) is not None:
            items, config = batch
            failure = self._engine.failure
            yield write_events([(number, _explained(item, failure)) for number, item in items], config, failure)

    def flush(self) -> None:
        """The events of a step are complete: send them. Called with the engine's lock held."""
        events, self._events = self._events, []
        config = self._new_config()
        if events or config is not None or self._engine.failure is not None:
            self._outgoing.put((events, config))

    def _new_config(self) -> bytes | None:
        """The configuration, where the gateway knows another."""
        config = self._engine.config
        if config is self._config:
            return None
        self._config = config
        return orjson.dumps(_plain(config))

    def _add(self, add: pb.Add) -> None:
        try:
            request = read_add(add)
            self._engine.submit(partial(self._enter, request))
        except (P99labError, ValueError) as error:
            self._refuse(add.number, error)

    def _submit(self, command: Any) -> None:
        with contextlib.suppress(EngineClosedError, EngineFailedError):  # its requests have ended already
            self._engine.submit(command)

    def _enter(self, request: EngineRequest, engine: Engine) -> None:
        number = request.number
        self._request_ids[number] = request.request_id or f"{self._name}-{number}"
        try:
            engine.add(
                request.token_ids,
                request.sampling,
                request_id=self._request_ids[number],
                priority=request.priority,
                deadline_s=request.deadline_s,
                arrival_s=request.arrival_s,
                on_event=partial(self._on_event, number),
                detokenize=False,
            )
        except Exception as error:
            del self._request_ids[number]
            self._refuse(number, error)

    def _on_event(self, number: int, event: TokenEvent) -> None:
        self._events.append((number, event))
        if event.finish_reason is not None:
            del self._request_ids[number]

    def _refuse(self, number: int, error: Exception) -> None:
        if not isinstance(error, P99labError):
            LOGGER.error("a gateway's request has failed", exc_info=error)
        self._outgoing.put(([(number, error)], None))

    def _cancel(self, number: int, engine: Engine) -> None:
        if (request_id := self._request_ids.get(number)) is not None:
            engine.cancel(request_id)

    def _cancel_all(self, engine: Engine) -> None:
        for request_id in list(self._request_ids.values()):
            engine.cancel(request_id)


def _explained(item: TokenEvent | Exception, failure: P99labError | None) -> TokenEvent | Exception:
    """Requests that end with the engine end with its own word for why."""
    if isinstance(item, Exception) or item.finish_reason is not FinishReason.ERROR:
        return item
    assert failure is not None  # nothing else ends a request with an error
    return failure
