"""Any OpenAI-compatible endpoint as a target, over HTTP: requests out, connections, refusals, the model's name."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from p99lab.errors import BadParameterError, did_you_mean
from p99lab.probe.answers import Chunk, RequestError, Served
from p99lab.probe.documents import Document, Tokenize
from p99lab.probe.openai_stream import chunks, message_of
from p99lab.probe.prompt_json import PromptJson
from p99lab.probe.records import Outcome
from p99lab.probe.targets import TargetError, prime
from p99lab.probe.workload import Query
from p99lab.serving.options import OWNER
from p99lab.strict import StrictModel

Endpoint = Literal["completions", "chat"]
CONNECT_TIMEOUT_S = 10.0
MAX_COMPLAINT_BYTES = 16 << 10
MAX_LISTED = 8
READ_BUFFER_BYTES = 1 << 20  # a connection is not read while twice as much waits for its client
MAX_HEAD_BYTES = 64 << 10  # a line of an answer's head


class TargetSpec(StrictModel):
    """An endpoint in plain values; `api_key_env` names the variable that holds the key, which stays there."""

    url: str
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key_env: str = "OPENAI_API_KEY"
    send_token_ids: bool = True


class OpenAITarget:
    """An endpoint behind `/v1/completions` or `/v1/chat/completions`, streaming, over HTTP.

    Token counts come from the server's `usage`, an answer's from `tokenize` where the server gives none. A chunk of
    text counts as one arrival, whatever it bundles. A refused request is not sent again. What `send` gives is
    `Outgoing`. The key is read from the environment when a request is made and kept nowhere. Proxies of the environment
    are not used: they would be measured too.

    Args:
        base_url: with or without `/v1`.
        model: the endpoint's name for it; its only or first one when None.
        send_token_ids: prompts as ids (completions only), where the workload has them.
        tokenize: the model's tokenizer, which makes the workload's lengths exact.
    """

    transport: Literal["in-process", "http"] = "http"

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        endpoint: Endpoint = "completions",
        api_key_env: str = "OPENAI_API_KEY",
        send_token_ids: bool = True,
        tokenize: Tokenize | None = None,
    ) -> None:
        self.base_url = _v1(base_url)
        self.model = model
        self.endpoint = endpoint
        self.tokenize = tokenize
        self._api_key_env = api_key_env
        self._send_token_ids = send_token_ids
        self._session: aiohttp.ClientSession | None = None
        self._tells_ids = False  # whether the server has a chunk for tokens that spell nothing, when asked
        self._totals: dict[str, int] = {}
        self._encoded = PromptJson()

    @classmethod
    def of(cls, spec: TargetSpec, tokenize: Tokenize | None = None) -> OpenAITarget:
        return cls(spec.url, spec.model, spec.endpoint, spec.api_key_env, spec.send_token_ids, tokenize)

    @property
    def name(self) -> str:
        return f"{self.base_url} ({self.model}, {self.endpoint})"

    async def open(self) -> None:
        """Connect and settle the model's name.

        Raises:
            TargetError: nobody answers, the key is refused, or the endpoint lists models, and this is none of them.
            BadParameterError: it lists none, and none is named; or the key cannot be sent.
        """
        self._session = aiohttp.ClientSession(
            # A connection a request: none meets one that is closing, and any process of a server may accept it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),  # the driver limits whole requests
            trust_env=False,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
        )
        try:
            self.model = await self._settle_model(self._session)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def prime(self, documents: Sequence[Document]) -> None:
        await prime(self, documents)

    async def counters(self) -> dict[str, int]:
        return dict(self._totals)

    def send(self, query: Query) -> AsyncGenerator[Chunk, None]:
        if self._session is None:
            raise RuntimeError("open() the target before sending to it")
        body = _Body(orjson.dumps(self._body(query)))
        return _Request(body, self._answer(self._session, body))

    async def _answer(self, session: aiohttp.ClientSession, body: _Body) -> AsyncGenerator[Chunk, None]:
        url = f"{self.base_url}/{'completions' if self.endpoint == 'completions' else 'chat/completions'}"
        served: Served | None = None
        try:
            async with session.post(url, data=body, headers=self._headers(), allow_redirects=False) as response:
                _end_with_connection(response)
                await self._refuse(response)
                async with aclosing(chunks(response.content.iter_any(), self.tokenize)) as answer:
                    async for chunk in answer:
                        served = chunk.served or served
                        yield chunk
        except RequestError as failure:
            raise failure.without(self._key()) from None
        except aiohttp.ConnectionTimeoutError:
            raise RequestError(Outcome.TIMEOUT, "connect timeout") from None
        except aiohttp.ClientConnectorError as error:
            raise RequestError(Outcome.ERROR, connect_failure(error)) from None
        except aiohttp.ClientError:
            raise RequestError(Outcome.CUT, "connection lost") from None
        finally:
            self._count(served)

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        """Anything but a stream of events is an error; what it says and when to come again is its detail."""
        status, kind = response.status, response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if status == 200 and kind in ("", "text/event-stream"):
            if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise RequestError(Outcome.ERROR, "undecodable answer")
            return
        if status == 200:
            raise RequestError(Outcome.ERROR, "not an event stream", kind)
        said = [await self._complaint(response)]
        if (retry_after := response.headers.get("retry-after")) is not None:
            said.append(f"Retry-After: {retry_after}")
        path = f" at {response.url.path}" if status == 404 else ""
        raise RequestError(Outcome.ERROR, f"http {status}{path}", "; ".join(part for part in said if part))

    async def _complaint(self, response: aiohttp.ClientResponse) -> str | None:
        """The message of an error's body. A refused key is often repeated in it, so that one is left unread."""
        if response.status in (401, 403):
            return None if self._key() else f"it {self._refusal()}"
        body = b""
        async for block in response.content.iter_any():
            body += block
            if len(body) > MAX_COMPLAINT_BYTES:
                return None
        return message_of(body)

    async def _settle_model(self, session: aiohttp.ClientSession) -> str:
        url, limit = f"{self.base_url}/models", aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        try:
            async with session.get(
                url, headers=self._headers(), timeout=limit, allow_redirects=False, middlewares=(_only_once,)
            ) as response:
                status, kind, listed = response.status, response.content_type, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise TargetError(f"{self.base_url} does not answer: {connect_failure(error)}") from None
        except TimeoutError:
            raise TargetError(f"{self.base_url} does not answer within {CONNECT_TIMEOUT_S:g} s") from None
        except aiohttp.ClientError as error:
            raise TargetError(f"{self.base_url} does not answer: {_what_went_wrong(error)}") from None
        if status in (401, 403):
            raise TargetError(f"{self.base_url} {self._refusal()} (http {status})")
        owners = _model_owners(listed)
        names = list(owners)
        if self.model is None and not names:
            why = f" (http {status}, {kind})" if status != 200 or kind != "application/json" else ""
            raise BadParameterError(f"{url} lists no models{why}: name one with --model")
        if self.model is not None and names and self.model not in names:
            near = did_you_mean(self.model, names)
            raise TargetError(f"{self.base_url} has no model '{self.model}'{near} (it lists: {_listed(names)})")
        model = self.model if self.model is not None else names[0]
        self._tells_ids = owners.get(model) == OWNER
        return model

    def _headers(self) -> dict[str, str]:
        always = {"content-type": "application/json", "accept-encoding": "identity"}
        key = self._key()
        if not key.isascii() or not key.isprintable():
            raise BadParameterError(f"${self._api_key_env} holds characters that no key has")
        return {**always, "authorization": f"Bearer {key}"} if key else always

    def _refusal(self) -> str:
        """What an endpoint does that answers 401 or 403."""
        name = f"${self._api_key_env}"
        return f"refuses the key in {name}" if self._key() else f"wants a key and {name} is not set"

    def _key(self) -> str:
        return os.environ.get(self._api_key_env, "").strip()

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
        if self._tells_ids:
            body["return_token_ids"] = True
        return {**body, **self._prompt(query)}

    def _prompt(self, query: Query) -> dict[str, Any]:
        ids, text = query.prompt.token_ids, query.prompt.text
        if self.endpoint == "completions" and ids is not None and (self._send_token_ids or not text):
            return {"prompt": orjson.Fragment(self._encoded.of(query, ids))}
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


class _Body(aiohttp.Payload):
    """A request's body, and when the request goes out: aiohttp keeps the head back until it is asked to send it.

    The body follows its head in the next turn of the event loop, all at once as far as the connection takes it. Pieces
    with turns for others between them arrive later, and let nobody else begin sooner (`release` needs no turn).
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(content, content_type="application/json")
        self._size = len(content)
        self._writer: AbstractStreamWriter | None = None  # there is a connection
        self._released = asyncio.Event()
        self._released.set()
        self.now: Callable[[], float] = time.perf_counter
        self.first_byte_s: float | None = None
        self.last_byte_s: float | None = None

    def hold(self) -> None:
        self._released.clear()

    def release(self) -> None:
        self._released.set()
        if self._writer is not None:
            with suppress(aiohttp.ClientError):  # the connection is closed: `write` says so
                self._send_head(self._writer)

    async def write(self, writer: AbstractStreamWriter) -> None:
        self._writer = writer
        if self._released.is_set():
            self._send_head(writer)
        await self._released.wait()
        await writer.write(self._value)
        self.last_byte_s = self.now()

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        content: bytes = self._value
        return content.decode(encoding, errors)

    def _send_head(self, writer: AbstractStreamWriter) -> None:
        writer.send_headers()
        self.first_byte_s = self.now()


class _Request(AsyncGenerator[Chunk, None]):
    """A request's answer, and the way out of its body: what `Outgoing` asks for."""

    def __init__(self, body: _Body, answer: AsyncGenerator[Chunk, None]) -> None:
        self._body = body
        self._answer = answer

    @property
    def first_byte_s(self) -> float | None:
        return self._body.first_byte_s

    @property
    def last_byte_s(self) -> float | None:
        return self._body.last_byte_s

    def prepare(self, now: Callable[[], float], *, hold: bool) -> None:
        self._body.now = now
        if hold:
            self._body.hold()

    def release(self) -> None:
        self._body.release()

    async def asend(self, value: None) -> Chunk:
        return await self._answer.asend(value)

    async def athrow(self, kind: Any, value: Any = None, traceback: TracebackType | None = None) -> Chunk:
        return await self._answer.athrow(kind, value, traceback)

    async def aclose(self) -> None:
        await self._answer.aclose()


def _end_with_connection(response: aiohttp.ClientResponse) -> None:
    """aiohttp closes a connection whose chunks are malformed, and may leave who reads from it waiting for ever."""
    content, connection = response.content, response.connection
    protocol = None if connection is None else connection.protocol
    closed = None if protocol is None else protocol.closed
    if closed is None:  # all that comes is there
        return

    def end(closed: asyncio.Future[None]) -> None:
        if not closed.cancelled():
            closed.exception()  # is told by the content, or below
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError())

    closed.add_done_callback(end)


async def _only_once(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A GET whose connection is lost would be sent again; a POST never is."""
    try:
        return await send(request)
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(str(error)) from error


def _what_went_wrong(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return "what it sends is not HTTP"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "connection lost"
    return str(error) or type(error).__name__


def connect_failure(error: aiohttp.ClientConnectorError) -> str:
    """Why there is no connection, in few words: refused, no such host, TLS, or what the system says."""
    cause = error.os_error
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no such host"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {getattr(cause, 'verify_message', '') or getattr(cause, 'reason', '') or 'failed'}"
    if cause.errno is None:  # of several addresses, each with a reason of its own
        return "connection refused" if f"[Errno {errno.ECONNREFUSED}]" in str(cause) else "connection failed"
    return "connection refused" if cause.errno == errno.ECONNREFUSED else os.strerror(cause.errno)


def _model_owners(listed: bytes) -> dict[str, str]:
    """The listed models and whose they are; empty where the endpoint has no such list."""
    try:
        models = orjson.loads(listed)["data"]
        return {str(model["id"]): str(model.get("owned_by")) for model in models}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return {}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")


def _v1(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port out of range
        good = False
    if not good:
        raise BadParameterError(
            f"target '{base_url}' is neither serve nor in-process nor a URL like http://127.0.0.1:8000"
        )
    if "@" in parts.netloc:
        raise BadParameterError("a target's URL must not hold a password: give the key by an environment variable")
    return base_url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
