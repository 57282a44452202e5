"""What the routes of one server share: the engine, its name to clients, and whether the server is going down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, cast

import numpy as np

from p99lab.engine.events import TokenEvent
from p99lab.engine.prompts import Prompt
from p99lab.engine.request import FinishReason, IntArray
from p99lab.errors import BadParameterError, did_you_mean
from p99lab.serving.engine_client import EngineClient
from p99lab.serving.metrics import Metrics
from p99lab.serving.openai_api.choices import ChoiceRequest
from p99lab.serving.openai_api.errors import ApiError
from p99lab.serving.openai_api.fields import MAX_CHOICES, RawPrompt
from p99lab.serving.openai_api.logprobs import TokenTexts

SHORT_TEXT = 1000  # characters that are tokenised at once; a longer text goes to a thread, so that others' tokens flow


class Service:
    """One engine, served as `model`. The engine is the caller's, who closes it after the server has ended.

    `draining`: no new requests. `closing`: set when those that still run are to be given up. `gateway`: the number of
    the process, where clients reach others at the same address; None: there are none.
    """

    def __init__(
        self, engine: EngineClient, model: str, api_key: str | None = None, gateway: int | None = None
    ) -> None:
        self.engine = engine
        self.model = model
        self.api_key = api_key
        self.created = int(time.time())
        self.gateway = gateway
        self.metrics = Metrics(engine, {} if gateway is None else {"gateway": str(gateway)})
        self.token_texts = TokenTexts(engine.tokenizer)
        self.context_len = context_len(engine)
        self.draining = False
        self.closing = asyncio.Event()
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """A request that a shutdown waits for."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    def require_model(self, model: str) -> None:
        """
        Raises:
            ApiError: 404, another model than the one served.
        """
        if model != self.model:
            problem = f"no model '{model}' here{did_you_mean(model, [self.model])} (served: {self.model})"
            raise ApiError(404, problem, param="model", code="model_not_found")

    @property
    def max_choices(self) -> int:
        """How many a request may have over all its prompts: not more than may wait."""
        return min(MAX_CHOICES, self.engine.config.scheduler.max_num_waiting or MAX_CHOICES)

    async def encode(self, prompt: RawPrompt | list[dict[str, str]], param: str) -> IntArray:
        """Token ids of a prompt, [num_prompt_tokens] int32.

        Raises:
            ApiError: 400, a prompt that the engine refuses; `param` is the field it came in.
        """
        is_short = isinstance(prompt, np.ndarray) or (isinstance(prompt, str) and len(prompt) <= SHORT_TEXT)
        given = cast(Prompt, prompt)  # ids of any width: a narrower one would wrap before they are checked
        try:
            return self.engine.encode(given) if is_short else await asyncio.to_thread(self.engine.encode, given)
        except BadParameterError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None

    def require_room(self, num_prompt_tokens: int, max_tokens: int, param: str) -> None:
        """
        Raises:
            ApiError: 400, prompt and answer together are longer than model and page pool allow.
        """
        if num_prompt_tokens + max_tokens > self.context_len:
            wanted = f"{num_prompt_tokens} prompt tokens and {max_tokens} to generate"
            problem = f"{wanted} exceed this model's context of {self.context_len}"
            raise ApiError(400, problem, param=param, code="context_length_exceeded")

    async def events(
        self, requests: Sequence[ChoiceRequest], arrival_s: float
    ) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """The events of all choices as they come, each with its choice's number. Leaving early cancels all of them.

        Raises:
            P99labError: what `Engine.stream` raises for any of them; the others are cancelled.
        """
        streams = [self._choice(one, arrival_s) for one in requests]
        async with aclosing(_merged(streams) if len(streams) > 1 else _numbered(streams[0])) as events:
            async for event in events:
                yield event

    async def _choice(self, request: ChoiceRequest, arrival_s: float) -> AsyncGenerator[TokenEvent, None]:
        watch = self.metrics.watch(len(request.token_ids), arrival_s)
        async with aclosing(self.engine.stream(request.token_ids, request.sampling, arrival_s=arrival_s)) as events:
            async for event in events:
                if event.finish_reason is FinishReason.CANCELLED:  # by the engine's owner, behind the server's back
                    raise ApiError(503, "the request was cancelled", kind="server_error", code="cancelled")
                watch.add(event)
                yield event


def context_len(engine: EngineClient) -> int:
    """The longest prompt and answer together that the model has positions and the pool has pages for."""
    stats = engine.stats()
    num_pages = stats.num_free_pages + stats.num_cached_pages + stats.num_active_pages
    in_pool = num_pages * engine.config.cache.page_size + 1  # the last token is never computed
    return min(engine.geometry.max_position_embeddings, in_pool)


async def _numbered(stream: AsyncGenerator[TokenEvent, None]) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    async with aclosing(stream) as events:
        async for event in events:
            yield 0, event


async def _merged(
    streams: Sequence[AsyncGenerator[TokenEvent, None]],
) -> AsyncGenerator[tuple[int, TokenEvent], None]:
    """Several streams as one; when one fails, the others are closed and its error is raised."""
    arrived: asyncio.Queue[tuple[int, TokenEvent] | asyncio.Task[Any]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[TokenEvent, None]) -> None:
        async with aclosing(stream) as events:
            async for event in events:
                arrived.put_nowait((number, event))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        num_left = len(tasks)
        while num_left:
            item = await arrived.get()
            if isinstance(item, asyncio.Task):
                item.result()
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
