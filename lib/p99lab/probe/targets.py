"""What is measured: targets, which answer queries with chunks, and one of them, the engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol, runtime_checkable

from p99lab.engine.interpreter import shared_interpreter as shared_interpreter
from p99lab.engine.request import FinishReason, IntArray, SamplingParams
from p99lab.errors import P99labError
from p99lab.probe.answers import Chunk as Chunk
from p99lab.probe.answers import RequestError as RequestError
from p99lab.probe.answers import Served as Served
from p99lab.probe.documents import Document, Tokenize
from p99lab.probe.records import Outcome
from p99lab.probe.tokenizer import without_special_tokens
from p99lab.probe.workload import Query


class TargetError(P99labError):
    """The target cannot be reached, or refuses to be measured at all."""

    exit_code = 5


class Target(Protocol):
    """A thing that answers queries. `counters` gives running totals, empty where the target reports none.

    `send` makes a request of the query, which may take a millisecond; it goes out when the first chunk is asked for.
    What it gives is `Outgoing` as well where requests are written to connections.
    """

    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> Literal["in-process", "http"]: ...
    @property
    def tokenize(self) -> Tokenize | None: ...

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def prime(self, documents: Sequence[Document]) -> None: ...
    async def counters(self) -> dict[str, int]: ...
    def send(self, query: Query) -> AsyncGenerator[Chunk, None]: ...


@runtime_checkable
class Outgoing(Protocol):
    """An answer's other side: its request, which is written to a connection. One that is held back connects when the
    first chunk is asked for, and sends nothing before it is released.

    `first_byte_s`, `last_byte_s`: when the transport had taken the request's first and its last byte, by the clock of
    `prepare`; None before.
    """

    @property
    def first_byte_s(self) -> float | None: ...
    @property
    def last_byte_s(self) -> float | None: ...
    def prepare(self, now: Callable[[], float], *, hold: bool) -> None:
        """Before the first chunk is asked for: the clock, and whether to hold the request back."""

    def release(self) -> None:
        """Let the request go: where there is a connection, its first byte is sent when this returns."""


async def prime(target: Target, documents: Sequence[Document]) -> None:
    """Send each document once, one after the other, so that its prefix is in the target's cache.

    Raises:
        TargetError: the target does not answer one of them.
    """
    for document in documents:
        query = Query(-1, document.index, document.passage, document.passage.num_tokens, max_tokens=1, ignore_eos=True)
        try:
            async with aclosing(target.send(query)) as chunks:
                async for _ in chunks:
                    pass
        except RequestError as error:
            raise TargetError(f"{target.name} failed while document {document.index} was primed: {error}") from None


class StreamingEngine(Protocol):
    """The part of `engine.engine.Engine` that a client needs; named here so that no torch is imported."""

    @property
    def tokenizer(self) -> Any: ...
    def stream(
        self,
        prompt: str | list[dict[str, str]] | IntArray,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> AsyncIterator[Any]: ...
    def stats(self) -> Any: ...


class InProcessTarget:
    """An engine in the client's own process: no transport, a shared interpreter. Its figures are labelled so.

    The caller owns the engine; `close` leaves it running.
    """

    transport: Literal["in-process", "http"] = "in-process"

    def __init__(self, engine: StreamingEngine, name: str = "engine") -> None:
        self.name = name
        self._engine = engine

    @property
    def tokenize(self) -> Tokenize | None:
        """The engine's own, without the special tokens that it begins a text with."""
        return without_special_tokens(self._engine.tokenizer)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def prime(self, documents: Sequence[Document]) -> None:
        await prime(self, documents)

    async def counters(self) -> dict[str, int]:
        stats = self._engine.stats().as_dict()
        return {name: int(stats[name]) for name in ("num_queried_tokens", "num_cached_tokens")}

    async def send(self, query: Query) -> AsyncGenerator[Chunk, None]:
        ids = query.prompt.token_ids
        params = SamplingParams(max_tokens=query.max_tokens, ignore_eos=query.ignore_eos)
        events, finish = self._engine.stream(query.prompt.text if ids is None else ids, params), None
        try:
            async for event in events:
                finish = event.finish_reason or finish
                if finish in (FinishReason.ERROR, FinishReason.CANCELLED):
                    raise RequestError(Outcome.ERROR, f"finish_reason {finish}")
                yield Chunk(int(event.token_id is not None and event.token_id >= 0), _served(event.usage))
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()  # a client that leaves cancels its request
        if finish is None:
            raise RequestError(Outcome.CUT, "no finish_reason")


def _served(usage: Any) -> Served | None:
    if usage is None:
        return None
    return Served(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens, usage.timeline)
