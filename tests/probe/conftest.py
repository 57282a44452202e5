"""A virtual clock, a target of known latencies, and a small HTTP server of known behaviour."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from p99lab.engine.request import Timeline
from p99lab.lab.proof import virtual_clock
from p99lab.probe.documents import Document
from p99lab.probe.load import drive
from p99lab.probe.targets import Chunk, Served
from p99lab.probe.workload import Query, Workload, make_documents, queries


@dataclass
class FakeTarget:
    """Serves `slots` requests at a time; `plan(query)` gives (seconds to the first token, seconds per token after)."""

    plan: Callable[[Query], tuple[float, float]] = lambda query: (0.1, 0.01)
    slots: int = 10_000
    cached: float = 1.0  # share of the document
    fail: Callable[[Query], Exception | None] = lambda query: None
    name: str = "fake"
    transport: str = "in-process"
    tokenize: Any = None
    primed: list[int] = field(default_factory=list)
    num_sent: int = 0
    num_closed_early: int = 0

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def prime(self, documents: Sequence[Document]) -> None:
        self.primed += [document.index for document in documents]

    async def counters(self) -> dict[str, int]:
        return {}

    async def send(self, query: Query) -> AsyncGenerator[Chunk, None]:
        self.num_sent += 1
        loop = asyncio.get_running_loop()
        arrival_s, ended = loop.time(), False
        try:
            async with self._free:
                admitted_s = loop.time()
                first_s, each_s = self.plan(query)
                await asyncio.sleep(first_s)
                if (error := self.fail(query)) is not None:
                    raise error
                for number in range(query.max_tokens):
                    if number:
                        await asyncio.sleep(each_s)
                    if number + 1 < query.max_tokens:
                        yield Chunk()
                    else:
                        timeline = Timeline(arrival_s, queue_s=admitted_s - arrival_s, prefill_s=first_s)
                        timeline.decode_s = loop.time() - admitted_s - first_s
                        cached = int(self.cached * query.num_document_tokens)
                        served = Served(query.prompt.num_tokens, query.max_tokens, cached, timeline)
                        ended = True
                        yield Chunk(1, served)
        finally:
            self.num_closed_early += not ended


@pytest.fixture
def fake_target() -> type[FakeTarget]:
    return FakeTarget


@pytest.fixture
def virtual() -> Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]:
    """Run a coroutine function to its end on a virtual clock."""
    return virtual_clock.run


SMALL = Workload(
    num_documents=3, document_tokens=(200, 300), question_tokens=(20, 30), answer_tokens=(4, 4), vocab_size=997
)


@pytest.fixture
def drive_virtually(virtual: Any) -> Callable[..., Any]:
    """Drive a load against a target on a virtual clock, with small synthetic documents."""

    def run(target_of: Callable[[], Any], load: Any, workload: Workload = SMALL, **options: Any) -> Any:
        async def main() -> Any:
            target, clock = target_of(), asyncio.get_running_loop().time
            sequence = queries(workload, make_documents(workload), load)
            return target, await drive(target, load, sequence, clock=clock, spin_s=0.0, **options)

        return virtual(main)

    return run


# --- an HTTP server -------------------------------------------------------------------------------------------------

Behaviour = Callable[[dict[str, Any], asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass
class Listening:
    url: str
    bodies: list[dict[str, Any]]
    headers: list[str]


@pytest.fixture
def serve() -> Callable[..., Any]:
    """`async with serve(behave, models) as served`: one request per connection, `behave` writes the answer."""

    @asynccontextmanager
    async def serving(behave: Behaviour, models: Sequence[str] = ("tiny",)) -> AsyncIterator[Listening]:
        served = Listening("", [], [])

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            served.headers.append(head)
            if head.startswith("GET"):
                listed = json.dumps({"data": [{"id": model} for model in models]}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(listed) + listed
                )
            else:
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                served.bodies.append(json.loads(await reader.readexactly(length)))
                with suppress(ConnectionError):  # a client may leave early
                    await behave(served.bodies[-1], writer)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield served

    return serving
