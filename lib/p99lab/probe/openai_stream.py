"""Answers of OpenAI-compatible servers: server-sent events to chunks. Whatever a server sends ends as a chunk or as a
`RequestError`.

The events' grammar is that of the HTML standard ("Server-sent events", 9.2.6), with lines that end in LF or CRLF.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from p99lab.engine.request import Timeline
from p99lab.probe.answers import Chunk, RequestError, Served
from p99lab.probe.documents import Tokenize
from p99lab.probe.records import Outcome

MAX_EVENT_BYTES = 4 << 20  # more is no token: memory must not depend on what a server sends
MAX_COUNT = 2**53  # a JSON number above is not exact
DONE = b"[DONE]"
_TIMELINE_SHARES = ("queue_s", "prefill_s", "decode_s", "stalled_s", "scheduling_s")
_FAILED_FINISHES = frozenset({"error", "abort", "cancelled"})


async def chunks(body: AsyncIterable[bytes], tokenize: Tokenize | None = None) -> AsyncGenerator[Chunk, None]:
    """A whole answer. Usage in every chunk is taken as it grows.

    Args:
        body: what arrives, in whatever pieces.
        tokenize: counts the answer's tokens where the server does not.

    Raises:
        RequestError: the stream is malformed, reports an error, or ends before the answer does.
    """
    finished, shown, texts, served = False, False, list[str](), None
    async with aclosing(events(body)) as data:
        async for event in data:
            if event == DONE:
                break
            part = _parse(event)
            if part.finish in _FAILED_FINISHES:
                raise RequestError(Outcome.ERROR, f"finish_reason {part.finish}")
            finished = finished or part.finish is not None
            served = part.served or served
            if tokenize is not None:
                texts.append(part.text)
            shown = shown or part.shows
            yield Chunk(int(part.shows), part.served)
        else:
            if not finished:
                raise RequestError(Outcome.CUT, "stream ended early")
    if not finished:
        raise RequestError(Outcome.CUT, "no finish_reason")
    if not shown and served is not None and served.num_output_tokens == 1:
        yield Chunk(1)  # the one token spells nothing (an end-of-sequence token): it came with the end, at the latest
    if tokenize is not None and (served is None or served.num_output_tokens is None):
        yield Chunk(0, _counted(served, len(tokenize("".join(texts)))))


async def events(body: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event, its lines joined; comments and other fields are left out.

    Whole reads are split here: a decoder of text lines copies, which is slow for long streams. An event that the end of
    the stream cuts off is given too: its JSON says whether it is whole.

    Raises:
        RequestError: an event without end.
    """
    rest, data, num_bytes = b"", list[bytes](), 0
    async for block in body:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
                num_bytes += len(line)
            elif not line and data:
                yield b"\n".join(data)
                data, num_bytes = [], 0
        if num_bytes + len(rest) > MAX_EVENT_BYTES:
            raise RequestError(Outcome.ERROR, "event too long")
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip())
    if data:
        yield b"\n".join(data)


def message_of(body: bytes) -> str | None:
    """The message of an error's body: OpenAI's shape, a plain `message` or `detail`, or None."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(content, dict):
        return None
    error = content.get("error")
    for found in (error.get("message") if isinstance(error, dict) else error, content.get("message")):
        if isinstance(found, str):
            return found
    detail = content.get("detail")
    return detail if isinstance(detail, str) else None


@dataclass(frozen=True, slots=True)
class _Part:
    """What one event says: text that the reader sees, why the answer has ended, the account so far.

    `shows`: there is text, or a token that spells none and is told by its id.
    """

    text: str
    shows: bool
    finish: str | None
    served: Served | None


def _parse(event: bytes) -> _Part:
    try:
        message = orjson.loads(event)
        if message.get("error"):
            raise RequestError(Outcome.ERROR, "error in the stream", message_of(event))
        choice = (message.get("choices") or [{}])[0]
        finish, usage = choice.get("finish_reason"), message.get("usage")
        text, ids = _text(choice), choice.get("token_ids")
        shows = bool(text) or (isinstance(ids, list) and bool(ids))
        return _Part(text, shows, None if finish is None else str(finish), None if not usage else _usage(usage))
    except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError, IndexError, ValueError) as problem:
        raise RequestError(Outcome.ERROR, "malformed event", str(problem)) from None


def _text(choice: dict[str, Any]) -> str:
    """What a reader sees of it: text, a chat delta, a reasoning model's thoughts, a call of a tool."""
    delta = choice.get("delta") or {}
    thoughts = delta.get("reasoning_content") or delta.get("reasoning")
    shown = choice.get("text") or delta.get("content") or thoughts or delta.get("tool_calls") or ""
    return shown if isinstance(shown, str) else str(shown)


def _usage(usage: dict[str, Any]) -> Served:
    details = usage.get("prompt_tokens_details") or {}
    account = usage.get("p99lab_timeline")
    return Served(
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(details.get("cached_tokens")),
        None if account is None else _timeline(account),
    )


def _count(value: object) -> int | None:
    if value is None or (type(value) is int and 0 <= value < MAX_COUNT):
        return value
    raise ValueError(f"{value!r} is no number of tokens")


def _timeline(account: dict[str, Any]) -> Timeline:
    """This project's server says where a request's time went; the names are `Timeline`'s."""
    shares = {name: float(account[name]) for name in _TIMELINE_SHARES}
    return Timeline(0.0, num_preemptions=_count(account["num_preemptions"]) or 0, **shares)


def _counted(served: Served | None, num_output_tokens: int) -> Served:
    known = served or Served()
    return Served(known.num_prompt_tokens, num_output_tokens, known.num_cached_tokens, known.timeline)
