"""What is measured: the engine in this process, or any OpenAI-compatible endpoint. Both answer with chunks."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import httpx
import numpy as np
import orjson

from p99lab.engine.request import IntArray, SamplingParams, Timeline
from p99lab.errors import BadParameterError, P99labError, did_you_mean
from p99lab.probe.documents import Document, Tokenize
from p99lab.probe.records import Outcome
from p99lab.probe.workload import Query

Endpoint = Literal["completions", "chat"]
CONNECT_TIMEOUT_S = 10.0


class TargetError(P99labError):
    """The target cannot be reached, or refuses to be measured at all."""

    exit_code = 5


class RequestError(Exception):
    """One request failed: it is counted as `outcome`, with `kind` as the reason. Never the end of a run."""

    def __init__(self, outcome: Outcome, kind: str) -> None:
        super().__init__(kind)
        self.outcome = outcome
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Served:
    """The target's own account of a request, with its last chunk; None where it gives none."""

    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Something arrived. `num_tokens` is 0 for a chunk that shows the reader nothing; a chunk of text counts 1."""

    num_tokens: int = 1
    served: Served | None = None


class Target(Protocol):
    """A thing that answers queries. `counters` gives running totals, empty where the target reports none."""

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


# --- the engine in this process -------------------------------------------------------------------------------------


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


@contextmanager
def shared_interpreter() -> Iterator[None]:
    """For clients and engine in one process: a thread that waits for the interpreter gets it after 0.1 ms, not 5.

    Otherwise an open load is late by as long as the engine plans a step. Restored at the end.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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
        encode = self._engine.tokenizer.encode
        begins_with = len(encode(""))
        return lambda text: encode(text)[begins_with:]

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def prime(self, documents: Sequence[Document]) -> None:
        await _prime(self, documents)

    async def counters(self) -> dict[str, int]:
        stats = self._engine.stats().as_dict()
        return {name: int(stats[name]) for name in ("num_queried_tokens", "num_cached_tokens")}

    async def send(self, query: Query) -> AsyncGenerator[Chunk, None]:
        ids = query.prompt.token_ids
        params = SamplingParams(max_tokens=query.max_tokens, ignore_eos=query.ignore_eos)
        events = self._engine.stream(query.prompt.text if ids is None else ids, params)
        try:
            async for event in events:
                yield Chunk(int(event.token_id is not None and event.token_id >= 0), _served(event.usage))
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()  # a client that leaves cancels its request


def _served(usage: Any) -> Served | None:
    if usage is None:
        return None
    return Served(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens, usage.timeline)


# --- any OpenAI-compatible endpoint ---------------------------------------------------------------------------------


class OpenAITarget:
    """An endpoint behind `/v1/completions` or `/v1/chat/completions`, streaming, over HTTP.

    Token counts come from the server's `usage`. A chunk of text counts as one arrival, whatever it bundles. The key is
    read from the environment when a request is made and kept nowhere. Proxies of the environment are not used: they
    would be measured too.

    Args:
        base_url: with or without `/v1`.
        model: the endpoint's name for it; its only or first one when None.
        send_token_ids: prompts as ids (completions only), where the workload has them.
    """

    transport: Literal["in-process", "http"] = "http"
    tokenize: Tokenize | None = None

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        endpoint: Endpoint = "completions",
        api_key_env: str = "OPENAI_API_KEY",
        send_token_ids: bool = True,
    ) -> None:
        self.base_url = _v1(base_url)
        self.model = model
        self.endpoint = endpoint
        self._api_key_env = api_key_env
        self._send_token_ids = send_token_ids
        self._client: httpx.AsyncClient | None = None
        self._totals: dict[str, int] = {}

    @property
    def name(self) -> str:
        return f"{self.base_url} ({self.model}, {self.endpoint})"

    async def open(self) -> None:
        """Connect and settle the model's name.

        Raises:
            TargetError: nobody answers, or the key is refused.
            BadParameterError: the endpoint lists models, and this is none of them.
        """
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # the driver limits whole requests
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        try:
            self.model = await self._settle_model(self._client)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def prime(self, documents: Sequence[Document]) -> None:
        await _prime(self, documents)

    async def counters(self) -> dict[str, int]:
        return dict(self._totals)

    async def send(self, query: Query) -> AsyncGenerator[Chunk, None]:
        if self._client is None:
            raise RuntimeError("open() the target before sending to it")
        body = orjson.dumps(self._body(query), option=orjson.OPT_SERIALIZE_NUMPY)
        path = "completions" if self.endpoint == "completions" else "chat/completions"
        try:
            async with self._client.stream(
                "POST", f"{self.base_url}/{path}", content=body, headers=self._headers()
            ) as response:
                if response.status_code != 200:
                    raise RequestError(Outcome.ERROR, f"http {response.status_code}")
                async with aclosing(_chunks(response)) as chunks:
                    async for chunk in chunks:
                        self._count(chunk.served)
                        yield chunk
        except httpx.TimeoutException:
            raise RequestError(Outcome.TIMEOUT, "connect timeout") from None
        except httpx.ConnectError:
            raise RequestError(Outcome.ERROR, "connection refused") from None
        except httpx.TransportError:
            raise RequestError(Outcome.CUT, "connection lost") from None

    async def _settle_model(self, client: httpx.AsyncClient) -> str:
        try:
            response = await client.get(f"{self.base_url}/models", headers=self._headers(), timeout=CONNECT_TIMEOUT_S)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise TargetError(f"{self.base_url} does not answer: {error or type(error).__name__}") from None
        if response.status_code in (401, 403):
            raise TargetError(f"{self.base_url} refuses the key in ${self._api_key_env} (http {response.status_code})")
        names = _model_names(response)
        if self.model is None and not names:
            raise BadParameterError(f"{self.base_url} lists no models: name one with --model")
        if self.model is not None and names and self.model not in names:
            raise BadParameterError(f"{self.base_url} has no model '{self.model}'{did_you_mean(self.model, names)}")
        return self.model if self.model is not None else names[0]

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self._api_key_env)
        always = {"content-type": "application/json", "accept-encoding": "identity"}
        return {**always, "authorization": f"Bearer {key}"} if key else always

    def _body(self, query: Query) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": query.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if query.ignore_eos:
            body["ignore_eos"] = True  # understood by vLLM, SGLang and this project's server
        return {**body, **self._prompt(query)}

    def _prompt(self, query: Query) -> dict[str, Any]:
        ids, text = query.prompt.token_ids, query.prompt.text
        if self.endpoint == "completions" and ids is not None and (self._send_token_ids or not text):
            return {"prompt": np.ascontiguousarray(ids)}
        if not text:
            raise BadParameterError("documents of token ids cannot go to a chat endpoint: use completions")
        return {"prompt": text} if self.endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}

    def _count(self, served: Served | None) -> None:
        if served is not None and served.num_cached_tokens is not None and served.num_prompt_tokens is not None:
            for name, number in (
                ("num_queried_tokens", served.num_prompt_tokens),
                ("num_cached_tokens", served.num_cached_tokens),
            ):
                self._totals[name] = self._totals.get(name, 0) + number


async def _chunks(response: httpx.Response) -> AsyncGenerator[Chunk, None]:
    """Server-sent events to chunks.

    Raises:
        RequestError: the stream is malformed, reports an error, or ends before the answer does.
    """
    ended = False
    async with aclosing(_events(response)) as events:
        async for event in events:
            if event == b"[DONE]":
                return
            choice, served = _parse(event)
            ended = ended or choice.get("finish_reason") is not None
            yield Chunk(int(bool(_text(choice))), served)
    if not ended:
        raise RequestError(Outcome.CUT, "stream ended early")


async def _events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The `data:` fields of a stream of server-sent events, each one line in this protocol.

    Whole reads are split here: `aiter_lines` decodes and copies, which is slow for long streams.
    """
    rest = b""
    async for block in response.aiter_raw():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _parse(event: bytes) -> tuple[dict[str, Any], Served | None]:
    try:
        message = orjson.loads(event)
        choices = message.get("choices") or [{}]
        usage = message.get("usage")
        if message.get("error"):
            raise RequestError(Outcome.ERROR, "error in the stream")
        return choices[0], None if not usage else _usage(usage)
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        raise RequestError(Outcome.ERROR, "malformed event") from None


def _usage(usage: dict[str, Any]) -> Served:
    details = usage.get("prompt_tokens_details") or {}
    return Served(usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"))


def _text(choice: dict[str, Any]) -> str:
    """What a reader sees of it: text, a chat delta, or a reasoning model's thoughts."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def _model_names(response: httpx.Response) -> list[str]:
    """The listed models; empty where the endpoint has no such list."""
    try:
        return [str(model["id"]) for model in orjson.loads(response.content)["data"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


def _v1(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadParameterError(f"target '{base_url}' is neither in-process nor a URL like http://127.0.0.1:8000")
    return base_url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


# --- both -----------------------------------------------------------------------------------------------------------


async def _prime(target: Target, documents: Sequence[Document]) -> None:
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
