"""Answers of OpenAI-compatible servers: server-sent events to chunks. Whatever a server sends ends as a chunk or as a
`RequestError`.

The events' grammar is that of the HTML standard ("Server-sent events", 9.2.6), with lines that end in LF or CRLF.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from typing import Any, NamedTuple

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
_SHOWS, _SILENT = Chunk(1), Chunk(0)


async def chunks(body: AsyncIterable[bytes], tokenize: Tokenize | None = None) -> AsyncGenerator[Chunk, None]:
    """A whole answer. Usage in every chunk is taken as it grows.

    Args:
        body: what arrives, in whatever pieces.
        tokenize: counts the answer's tokens where the server does not.

    Raises:
        RequestError: the stream is malformed, reports an error, or ends before the answer does.
    """
    answer = _Answer(tokenize)
    async for block in body:
        for chunk in answer.read(block):
            yield chunk
        if answer.done:
            break
    for chunk in answer.end():
        yield chunk


class _Answer:
    """An answer as far as it is read. All within a read is done at once: other clients wait for each turn of a task."""

    def __init__(self, tokenize: Tokenize | None) -> None:
        self.done = False  # its last event was there
        self._events = _Events()
        self._finished, self._shown = False, False
        self._served: Served | None = None
        self._tokenize, self._texts = tokenize, list[str]()

    def read(self, block: bytes) -> Iterator[Chunk]:
        return self._chunks(self._events.of(block))

    def end(self) -> Iterator[Chunk]:
        if not self.done:
            yield from self._chunks(self._events.cut_off())
        if not self._finished:
            raise RequestError(Outcome.CUT, "no finish_reason" if self.done else "stream ended early")
        served = self._served
        if not self._shown and served is not None and served.num_output_tokens == 1:
            yield Chunk(
                1
            )  # the one token spells nothing (an end-of-sequence token): it came with the end, at the latest
        if self._tokenize is not None and (served is None or served.num_output_tokens is None):
            yield Chunk(0, _counted(served, len(self._tokenize("".join(self._texts)))))

    def _chunks(self, events: Iterable[bytes]) -> Iterator[Chunk]:
        for event in events:
            if event == DONE:
                self.done = True
                return
            part = _parse(event)
            if part.finish is not None:
                if part.finish in _FAILED_FINISHES:
                    raise RequestError(Outcome.ERROR, f"finish_reason {part.finish}")
                self._finished = True
            if self._tokenize is not None:
                self._texts.append(part.text)
            self._shown = self._shown or part.shows
            if part.served is None:
                yield _SHOWS if part.shows else _SILENT
            else:
                self._served = part.served
                yield Chunk(int(part.shows), part.served)


class _Events:
    """The data of each event, its lines joined; comments and other fields are left out.

    Whole reads are split here: a decoder of text lines copies, which is slow for long streams.
    """

    def __init__(self) -> None:
        self._rest = b""  # a line that has not ended
        self._data: list[bytes] = []  # of the event that has not ended
        self._num_bytes = 0

    def of(self, block: bytes) -> Iterable[bytes]:
        """The events that end in a read.

        Raises:
            RequestError: an event without end.
        """
        if self._rest or self._data or not _is_one_event(block):
            return self._split(block)
        return (block[5:-2].strip(),)

    def cut_off(self) -> Iterable[bytes]:
        """The event that the end of the stream cuts off, if any: its JSON says whether it is whole."""
        if self._rest.startswith(b"data:"):
            self._data.append(self._rest[5:].strip())
        return (b"\n".join(self._data),) if self._data else ()

    def _split(self, block: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
                self._num_bytes += len(line)
            elif not line and self._data:
                event = b"\n".join(self._data)
                self._data, self._num_bytes = [], 0
                yield event
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise RequestError(Outcome.ERROR, "event too long")


def _is_one_event(block: bytes) -> bool:
    """A single line of data and its end, as a token comes."""
    return block.startswith(b"data:") and block.endswith(b"\n\n") and block.count(b"\n") == 2


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


class _Part(NamedTuple):
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
