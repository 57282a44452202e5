"""The gateway's side: the client of an engine in another process. Without torch.

Text is made here: the engine sends token ids alone, and stop strings are looked for where the text is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import orjson

from p99lab.engine import prompts
from p99lab.engine.config import EngineConfig
from p99lab.engine.events import TokenEvent
from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import load_tokenizer
from p99lab.engine.output_text import OutputText
from p99lab.engine.prompts import Prompt
from p99lab.engine.request import FinishReason, IntArray, SamplingParams
from p99lab.engine.stats import EngineStats
from p99lab.errors import EngineClosedError, P99labError
from p99lab.serving.protocol import engine_pb2 as pb
from p99lab.serving.protocol.link import OPTIONS, PATHS
from p99lab.serving.protocol.messages import EngineRequest, read_error, read_events, write_add, write_cancel

REPLY_TIMEOUT_S = 10.0  # of what is asked beside the stream
GONE = "the engine's process has ended"


@contextlib.asynccontextmanager
async def remote_engine(address: str) -> AsyncIterator[RemoteEngine]:
    """The engine that `engine_service` serves at `address`, for the running event loop.

    Raises:
        EngineClosedError: nothing answers there.
        ModelError: its tokenizer cannot be read here.
    """
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        with grpc.insecure_channel(address, options=OPTIONS) as blocking:  # for calls from threads
            engine = RemoteEngine(blocking)
            call = channel.stream_stream(PATHS["Serve"], pb.FromGateway.SerializeToString, pb.FromEngine.FromString)()
            tasks = [asyncio.create_task(engine.read(call)), asyncio.create_task(engine.write(call))]
            try:
                yield engine
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class RemoteEngine:
    """An `EngineClient` over one gRPC stream. Made by `remote_engine`.

    `gone`: set when the stream has ended; every later request raises EngineClosedError. `failure`: as `Engine.failure`.
    """

    def __init__(self, blocking: grpc.Channel) -> None:
        self._stats = _unary(blocking, "Stats")
        described = _call(_unary(blocking, "Describe"))
        self.clock = time.perf_counter  # the engine's own, which processes of a machine share
        self.config = EngineConfig.parse(described["config"])
        self.geometry = Geometry.parse(described["geometry"])
        self.tokenizer = load_tokenizer(self.config.model.name)
        self.failure: P99labError | None = None
        self.gone = asyncio.Event()
        self._numbers = itertools.count()
        self._arriving: dict[int, asyncio.Queue[TokenEvent | Exception]] = {}
        self._outgoing: asyncio.Queue[pb.FromGateway] = asyncio.Queue()

    def encode(self, prompt: Prompt) -> IntArray:
        """Token ids of a prompt, [num_prompt_tokens] int32; raises as `Engine.encode`."""
        return prompts.encode(prompt, self.tokenizer, self.geometry.vocab_size)

    def stats(self) -> EngineStats:
        """As `Engine.stats`; waits for the reply.

        Raises:
            EngineClosedError: there is none.
        """
        return EngineStats(**_call(self._stats))

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        arrival_s: float | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """As `Engine.stream`. A stop string ends the request one step after its last token: that step is in its
        timeline, but its tokens are not counted.

        Raises:
            EngineClosedError: the engine is closed, or its process has ended.
            P99labError: as `Engine.stream`.
        """
        arrival_s = self.clock() if arrival_s is None else arrival_s
        sampling = sampling or SamplingParams()
        number = next(self._numbers)
        request = EngineRequest(number, self.encode(prompt), sampling, arrival_s, request_id, priority, deadline_s)
        message = write_add(request)
        if self.gone.is_set():
            raise EngineClosedError(GONE)
        text = OutputText(self.tokenizer.detokenizer(), sampling.stop)
        output = RemoteOutput(request_id or f"request-{number}", text)
        arriving = self._arriving[number] = asyncio.Queue()
        self._outgoing.put_nowait(message)
        ended = False  # in the engine
        try:
            while not ended:
                item = await arriving.get()
                ended = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                was_stopped = output.is_stopped
                if (event := output.add(item)) is not None:
                    yield event
                elif output.is_stopped and not was_stopped:
                    self._outgoing.put_nowait(write_cancel(number))
        finally:
            del self._arriving[number]
            if not ended:
                self._outgoing.put_nowait(write_cancel(number))

    async def read(self, call: Any) -> None:
        """Pass on what the engine sends, until the stream ends."""
        try:
            async for message in call:
                if message.HasField("config"):
                    self.config = EngineConfig.parse(orjson.loads(message.config))
                if message.HasField("failure"):
                    self.failure = read_error(message.failure)
                for number, item in read_events(message):
                    if (arriving := self._arriving.get(number)) is not None:
                        arriving.put_nowait(item)
        except grpc.aio.AioRpcError:
            pass  # clients get an error of their own
        finally:
            self.failure = self.failure or EngineClosedError(GONE)
            self.gone.set()
            for arriving in self._arriving.values():
                arriving.put_nowait(EngineClosedError(GONE))

    async def write(self, call: Any) -> None:
        """Send what is asked of the engine, one message at a time."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `read` notices
            while True:
                await call.write(await self._outgoing.get())


class RemoteOutput:
    """A request's events with their text. The event that completes a stop string is held until the usage is here."""

    def __init__(self, request_id: str, text: OutputText) -> None:
        self._request_id = request_id
        self._text = text
        self._num_tokens = 0
        self._last: TokenEvent | None = None  # completes a stop string

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete: the engine need not go on."""
        return self._last is not None

    def add(self, event: TokenEvent) -> TokenEvent | None:
        """The engine's next event, as a client sees it; None: nothing to see yet."""
        if self._last is None:
            event = self._with_text(event)
            if not self._text.stopped:
                return event
            self._last = event
        return None if event.usage is None else self._stopped(self._last, event)

    def _with_text(self, event: TokenEvent) -> TokenEvent:
        text = ""
        if event.token_id is not None:
            self._num_tokens += 1
            text = self._text.add(event.token_id, event.finish_reason)
        return replace(event, request_id=self._request_id, text=text)

    def _stopped(self, last: TokenEvent, end: TokenEvent) -> TokenEvent:
        assert end.usage is not None  # the caller has seen it
        usage = replace(end.usage, num_output_tokens=self._num_tokens)
        return replace(last, time_s=end.time_s, finish_reason=FinishReason.STOP, usage=usage)


def _unary(channel: grpc.Channel, name: str) -> Any:
    return channel.unary_unary(PATHS[name], pb.Nothing.SerializeToString, pb.Json.FromString)


def _call(method: Any) -> Any:
    try:
        return orjson.loads(method(pb.Nothing(), timeout=REPLY_TIMEOUT_S).value)
    except grpc.RpcError:
        raise EngineClosedError(GONE) from None
