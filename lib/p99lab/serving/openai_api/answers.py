"""How events become an HTTP answer, whole or as a stream, and what ends one early.

A streamed chunk is built once per event, and only where there is text to show or an end: a client that takes
chunks for tokens then times what its reader sees. Tokens that show nothing (half a character, the beginning of a
possible stop string) come with the next chunk, their log-probabilities too. A client that asks for token ids gets a
chunk for each of those as well.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from p99lab.errors import P99labError
from p99lab.serving.openai_api.choices import Choice, ChoiceRequest, Piece, usage
from p99lab.serving.openai_api.errors import ApiError, api_error, shutting_down
from p99lab.serving.openai_api.service import Service

Json = dict[str, Any]
Result = TypeVar("Result")

STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class ClientDisconnectedError(Exception):
    """The client has gone: nobody reads an answer."""


class Shape(Protocol):
    """How one endpoint writes its choices. An object writes a single answer: it may count what it has written."""

    @property
    def prefix(self) -> str:
        """Of the answer's id."""
        ...

    @property
    def object_name(self) -> str: ...
    @property
    def chunk_name(self) -> str: ...

    def opening(self, index: int) -> Json | None:
        """A choice's first chunk, before any text; None: there is none."""
        ...

    def chunk(self, piece: Piece) -> Json: ...
    def whole(self, piece: Piece) -> Json: ...


@dataclass(slots=True)
class Job:
    """A request that was found sound: what to ask of the engine, and how to write its answer."""

    service: Service
    path: str
    requests: list[ChoiceRequest]  # prompt by prompt, `num_per_prompt` of each
    num_per_prompt: int
    shape: Shape
    arrival_s: float  # on the engine's clock
    streams: bool
    include_usage: bool
    choices: list[Choice] = field(init=False)
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice(index, request) for index, request in enumerate(self.requests)]
        self.id = f"{self.shape.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    async def whole(self) -> bytes:
        """The answer in one piece.

        Raises:
            P99labError, ApiError: any of its choices has failed.
        """
        async with aclosing(self.service.events(self.requests, self.arrival_s)) as events:
            async for index, event in events:
                self.choices[index].add(event)
        written = [self.shape.whole(choice.take()) for choice in self.choices]
        return self._dump(self.shape.object_name, written, usage=usage(self.choices, self.num_per_prompt))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. Raises as `whole`; what fails before the first token, before any event."""
        async with aclosing(self.service.events(self.requests, self.arrival_s)) as events:
            async for index, event in events:
                choice = self.choices[index]
                if not choice.began and (opening := self.shape.opening(index)) is not None:
                    yield self._chunk([opening])
                choice.add(event)
                if choice.has_news:
                    yield self._chunk([self.shape.chunk(choice.take())])
        if self.include_usage:
            yield self._chunk([], usage(self.choices, self.num_per_prompt))
        yield sse(b"[DONE]")

    def _chunk(self, choices: list[Json], final_usage: Json | None = None) -> bytes:
        """Where usage is asked for, each chunk has it: null until the last."""
        extra = {"usage": final_usage} if self.include_usage else {}
        return sse(self._dump(self.shape.chunk_name, choices, **extra))

    def _dump(self, name: str, choices: list[Json], **extra: Any) -> bytes:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.service.model}
        return orjson.dumps({**head, "choices": choices, **extra})


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class GenerationResponse(Response):
    """Runs a job when it is sent, and no longer than its client listens."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, path = self._job.service, self._job.path
        work = self._stream(send) if self._job.streams else self._job.whole()
        try:
            body = await unless_ended(receive, service.closing, work)
        except ClientDisconnectedError:
            service.metrics.count(path, "hung_up")
        except (ApiError, P99labError) as error:
            if not self._begun:
                raise  # it gets a status of its own
            service.metrics.count(path, "failed")
            await _send(send, sse(api_error(error).body()), more=False)
        else:
            service.metrics.count(path, "ok")
            if body is not None:
                await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._job.chunks()) as chunks:
            async for chunk in chunks:
                if not self._begun:
                    self._begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})
                await _send(send, chunk, more=True)
        await _send(send, b"", more=False)


async def _send(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def unless_ended(receive: Receive, closing: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client hangs up or the server closes.

    The request's body must have been read: what `receive` gives then is the end of the connection.

    Raises:
        ClientDisconnectedError: the client has gone.
        ApiError: 503, the server is closing.
    """
    working = asyncio.create_task(work)
    leaving, ending = asyncio.create_task(_disconnected(receive)), asyncio.create_task(closing.wait())
    tasks: tuple[asyncio.Task[Any], ...] = (working, leaving, ending)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError if leaving.done() else shutting_down()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
