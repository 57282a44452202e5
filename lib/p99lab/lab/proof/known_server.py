"""A server whose latencies are known: an ASGI application that speaks the OpenAI protocol, and a target without one.

As a program (`python -m p99lab.lab.proof.known_server CASE SEED`) it serves on a free port of 127.0.0.1 and prints its
URL.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import orjson

from p99lab.lab.proof.laws import Law
from p99lab.probe.documents import Document, Tokenize
from p99lab.probe.targets import Chunk, Served
from p99lab.probe.workload import Query

MODEL = "known"
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class Answers:
    """Tokens at the times of a law, on the running loop's clock, which starts with the first request."""

    def __init__(self, law: Law) -> None:
        self._law = law
        self._origin_s: float | None = None

    async def tokens(self, num_tokens: int) -> AsyncIterator[int]:
        """Numbers of the tokens, each when its time has come."""
        loop = asyncio.get_running_loop()
        if self._origin_s is None:
            self._origin_s = loop.time()
        times_s = self._law.token_times_s(loop.time() - self._origin_s, num_tokens)
        for number, at_s in enumerate(times_s):
            left_s = self._origin_s + at_s - loop.time()
            if left_s > 0.0:
                await asyncio.sleep(left_s)
            yield number


class KnownTarget:
    """The law without a transport: for a virtual clock, through the probe's own driver."""

    name = MODEL
    transport: Literal["in-process", "http"] = "in-process"
    tokenize: Tokenize | None = None

    def __init__(self, law: Law) -> None:
        self._answers = Answers(law)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def prime(self, documents: Sequence[Document]) -> None: ...

    async def counters(self) -> dict[str, int]:
        return {}

    async def send(self, query: Query) -> AsyncGenerator[Chunk, None]:
        async for number in self._answers.tokens(query.max_tokens):
            last = number + 1 == query.max_tokens
            yield Chunk(1, Served(query.prompt.num_tokens, query.max_tokens) if last else None)


class KnownServer:
    """The law behind `/v1/completions`, `/v1/chat/completions` (both streaming only), `/v1/models` and `/health`."""

    def __init__(self, law: Law) -> None:
        self._answers = Answers(law)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await _body(receive)
        if body is None:
            return
        if scope["path"] == "/v1/models":
            await _reply(
                send, 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "p99lab"}]}
            )
        elif scope["path"] == "/health":
            await _reply(send, 200, {})
        elif scope["path"] in ("/v1/completions", "/v1/chat/completions"):
            await self._stream(send, orjson.loads(body), chat="chat" in scope["path"])
        else:
            await _reply(send, 404, {"error": {"message": "no such path", "type": "invalid_request_error"}})

    async def _stream(self, send: Send, asked: dict[str, Any], chat: bool) -> None:
        num_tokens = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        async for number in self._answers.tokens(num_tokens):
            await _event(send, _chunk(chat, number + 1 == num_tokens))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": _prompt_tokens(asked), "completion_tokens": num_tokens}
            usage["total_tokens"] = sum(usage.values())
            await _event(send, {**_frame(chat), "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _prompt_tokens(asked: dict[str, Any]) -> int:
    """As many as token ids were sent, or as words."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    texts = [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in asked.get("messages", [])]
    return sum(len(text.split()) for text in texts)


def _frame(chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "0", "object": kind, "created": 0, "model": MODEL}


def _chunk(chat: bool, last: bool) -> dict[str, Any]:
    content = {"delta": {"role": "assistant", "content": " so"}} if chat else {"text": " so", "logprobs": None}
    return {**_frame(chat), "choices": [{"index": 0, **content, "finish_reason": "length" if last else None}]}


async def _body(receive: Receive) -> bytes | None:
    """What the client sent; None where it left before all of it had come."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _event(send: Send, content: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": b"data: " + orjson.dumps(content) + b"\n\n", "more_body": True})


async def _reply(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})


def main(name: str, seed: str) -> None:
    """Serve a case of `cases`; ends when its standard input does, with the process that started it."""
    import uvicorn

    from p99lab.lab.proof.cases import CASES

    listening = socket.create_server(("127.0.0.1", 0))
    law = CASES[name].law(int(seed))
    config = uvicorn.Config(KnownServer(law), loop="asyncio", log_level="warning", lifespan="off")
    server = uvicorn.Server(config)

    def end_with_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout.write(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    server.run(sockets=[listening])


@contextmanager
def serving(name: str, seed: int) -> Iterator[str]:
    """The URL of a server of a case, in a process of its own."""
    command = [sys.executable, "-m", "p99lab.lab.proof.known_server", name, str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None  # noqa: PT018
        try:
            yield child.stdout.readline().strip()
        finally:
            child.stdin.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
