"""The gateway's side: an engine in another process, offered as if it were here. Without torch.

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
from p99lab.engine.events import OutputText, TokenEvent
from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import load_tokenizer
from p99lab.engine.prompts import Prompt
from p99lab.engine.request import FinishReason, IntArray, SamplingParams
from p99lab.engine.stats import EngineStats
from p99lab.errors import EngineClosedError
from p99lab.serving.protocol import engine_pb2 as pb
from p99lab.serving.protocol.link import OPTIONS, PATHS
from p99lab.serving.protocol.messages import Wanted, read_events, write_add, write_cancel

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
        with grpc.insecure_channel(address, options=OPTIONS) as waiting:  # for calls from threads
            engine = RemoteEngine(waiting)
            call = channel.stream_stream(PATHS["Serve"], pb.FromGateway.SerializeToString, pb.FromEngine.FromString)()
            tasks = [asyncio.create_task(engine.read(call)), asyncio.create_task(engine.write(call))]
            try:
                yield engine
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class RemoteEngine:
    """What a server needs of an engine (`OfferedEngine`), over one gRPC stream. Made by `remote_engine`.

    `gone`: set when the stream has ended; every later request raises EngineClosedError.
    """

    def __init__(self, waiting: grpc.Channel) -> None:
        self._ask_stats = _question(waiting, "Stats")
        described = _ask(_question(waiting, "Describe"))
        self.clock = time.perf_counter  # the engine's own, which processes of a machine share
        self.config = EngineConfig.parse(described["config"])
        self.geometry = Geometry.parse(described["geometry"])
        self.tokenizer = load_tokenizer(self.config.model.name)
        self.gone = asyncio.Event()
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Queue[TokenEvent | Exception]] = {}
        self._outgoing: asyncio.Queue[pb.FromGateway] = asyncio.Queue()

    def encode(self, prompt: Prompt) -> IntArray:
        """Token ids of a prompt, [num_prompt_tokens] int32; raises as `Engine.encode`."""
        return prompts.encode(prompt, self.tokenizer, self.geometry.vocab_size)

    def stats(self) -> EngineStats:
        """As `Engine.stats`; waits for the reply.

        Raises:
            EngineClosedError: there is none.
        """
        return EngineStats(**_ask(self._ask_stats))

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
        """As `Engine.stream`. A stop string ends the request one step after its last token: that step is billed to its
        timeline, but its tokens are not counted.

        Raises:
            EngineClosedError: the engine is closed, or its process has ended.
            P99labError: as `Engine.stream`.
        """
        arrival_s = self.clock() if arrival_s is None else arrival_s
        sampling = sampling or SamplingParams()
        number = next(self._numbers)
        wanted = Wanted(number, self.encode(prompt), sampling, arrival_s, request_id, priority, deadline_s)
        message = write_add(wanted)
        if self.gone.is_set():
            raise EngineClosedError(GONE)
        answer = Answer(request_id or f"request-{number}", OutputText(self.tokenizer.detokenizer(), sampling.stop))
        arriving = self._answers[number] = asyncio.Queue()
        self._outgoing.put_nowait(message)
        ended = False  # in the engine
        try:
            while not ended:
                item = await arriving.get()
                ended = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                was_stopped = answer.is_stopped
                if (event := answer.take(item)) is not None:
                    yield event
                elif answer.is_stopped and not was_stopped:
                    self._outgoing.put_nowait(write_cancel(number))
        finally:
            del self._answers[number]
            if not ended:
                self._outgoing.put_nowait(write_cancel(number))

    async def read(self, call: Any) -> None:
        """Pass on what the engine tells, until it tells no more."""
        try:
            async for message in call:
                if message.HasField("config"):
                    self.config = EngineConfig.parse(orjson.loads(message.config))
                for number, item in read_events(message):
                    if (answer := self._answers.get(number)) is not None:
                        answer.put_nowait(item)
        except grpc.aio.AioRpcError:
            pass  # told below
        finally:
            self.gone.set()
            for answer in self._answers.values():
                answer.put_nowait(EngineClosedError(GONE))

    async def write(self, call: Any) -> None:
        """Send what is asked of the engine, one message at a time."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `read` tells
            while True:
                await call.write(await self._outgoing.get())


class Answer:
    """A request's events with their text. The event that completes a stop string is held until the bill is here."""

    def __init__(self, request_id: str, text: OutputText) -> None:
        self._request_id = request_id
        self._text = text
        self._num_tokens = 0
        self._last: TokenEvent | None = None  # completes a stop string

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete: the engine need not go on."""
        return self._last is not None

    def take(self, event: TokenEvent) -> TokenEvent | None:
        """The engine's next event, as a client sees it; None: nothing to see yet."""
        if self._last is None:
            event = self._told(event)
            if not self._text.stopped:
                return event
            self._last = event
        return None if event.usage is None else self._stopped(self._last, event)

    def _told(self, event: TokenEvent) -> TokenEvent:
        text = ""
        if event.token_id is not None:
            self._num_tokens += 1
            if event.finish_reason is not FinishReason.STOP:  # an end-of-sequence or stop id is no text
                text = self._text.push(event.token_id)
            if event.finish_reason is not None:
                text += self._text.flush()
        return replace(event, request_id=self._request_id, text=text)

    def _stopped(self, last: TokenEvent, end: TokenEvent) -> TokenEvent:
        assert end.usage is not None  # the caller has seen it
        usage = replace(end.usage, num_output_tokens=self._num_tokens)
        return replace(last, time_s=end.time_s, finish_reason=FinishReason.STOP, usage=usage)


def _question(channel: grpc.Channel, name: str) -> Any:
    return channel.unary_unary(PATHS[name], pb.Nothing.SerializeToString, pb.Json.FromString)


def _ask(question: Any) -> Any:
    try:
        return orjson.loads(question(pb.Nothing(), timeout=REPLY_TIMEOUT_S).value)
    except grpc.RpcError:
        raise EngineClosedError(GONE) from None
