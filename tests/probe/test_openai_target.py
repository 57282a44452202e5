from __future__ import annotations

import asyncio
import errno
import json
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p99lab.errors import BadParameterError
from p99lab.probe.client_process import new_event_loop
from p99lab.probe.documents import Passage, stdlib_documents
from p99lab.probe.load import Run, drive
from p99lab.probe.openai_stream import chunks
from p99lab.probe.openai_target import OpenAITarget, connect_failure
from p99lab.probe.records import Outcome, RequestRecord, from_table, to_table
from p99lab.probe.stats import attribution, e2e, measured, ttft
from p99lab.probe.targets import Chunk, Outgoing, RequestError, TargetError
from p99lab.probe.workload import ClosedLoad, Load, OpenLoad, Query

pytestmark = pytest.mark.light

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"


def texts(count: int, ids: bool = False) -> list[Query]:
    prompt = Passage.of("a text", [1, 2, 3] if ids else None)
    return [Query(i, 0, prompt, 2, max_tokens=3, ignore_eos=True) for i in range(count)]


def event(message: Any) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def text(word: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": word, "finish_reason": finish}], "usage": None})


def usage(prompt: int = 10, completion: int = 3, cached: int | None = 8) -> bytes:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"choices": [], "usage": counts})


KEYS = ("choices", "usage", "error", "text", "delta", "content", "finish_reason", "prompt_tokens", "message", "data")
KEYS += ("completion_tokens", "prompt_tokens_details", "cached_tokens", "p99lab_timeline", "queue_s", "tool_calls")
DONE = b"data: [DONE]\n\n"
CHUNKED = HEAD.replace(b"close", b"close\r\ntransfer-encoding: chunked")
HTML = HEAD.replace(b"text/event-stream", b"text/html; charset=utf-8")
GOOD = text("one") + text(" two") + text(" three", "length") + usage() + DONE


def script(*steps: bytes | float) -> Any:
    """A server that writes bytes and waits seconds, in turn, then closes."""

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                writer.write(step)
                await writer.drain()

    return behave


def ask(serve: Any, behave: Any, count: int = 1, *, ids: bool = False, **options: Any) -> tuple[Run, Any, OpenAITarget]:
    timeout_s, sent = options.pop("timeout_s", 20.0), options.pop("queries", texts(count, ids))

    async def main() -> tuple[Run, Any, OpenAITarget]:
        async with serve(behave) as served:
            target = OpenAITarget(served.url, **options)
            await target.open()
            load = ClosedLoad(concurrency=min(4, count), num_requests=count, warmup_share=0, timeout_s=timeout_s)
            try:
                return await drive(target, load, iter(sent)), served, target
            finally:
                await target.close()

    return asyncio.run(main())


def only(run: Run) -> RequestRecord:
    (record,) = measured(run.records)
    return record


def test_a_stream_is_timed_and_counted(serve: Any) -> None:
    run, served, target = ask(
        serve, script(HEAD, 0.2, text("one"), 0.1, text(" two"), text(" three", "length"), usage(), DONE)
    )
    record = only(run)
    assert record.outcome is Outcome.OK
    assert 0.2 <= ttft(record) < record.end_s - record.send_s
    assert record.token_times_s[1] - record.token_times_s[0] >= 0.09
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (10, 3, 8)
    body = served.bodies[0]
    assert body["prompt"] == "a text"
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("tiny", 3, 0.0, True)
    assert run.counters_after == {"num_queried_tokens": 10, "num_cached_tokens": 8}
    assert target.transport == "http"


def test_chat_sends_messages_and_skips_the_role(serve: Any) -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    hello = event({"choices": [{"delta": {"content": "hello"}, "finish_reason": None}]})
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    run, served, _ = ask(serve, script(HEAD, role, 0.2, hello, end, DONE), endpoint="chat")
    assert ttft(only(run)) >= 0.2
    assert len(only(run).token_times_s) == 1
    assert served.bodies[0]["messages"] == [{"role": "user", "content": "a text"}]


def test_completions_send_token_ids_where_there_are_some(serve: Any) -> None:
    assert ask(serve, script(HEAD, GOOD), ids=True)[1].bodies[0]["prompt"] == [1, 2, 3]
    assert ask(serve, script(HEAD, GOOD), ids=True, send_token_ids=False)[1].bodies[0]["prompt"] == "a text"


@pytest.mark.parametrize(
    ("steps", "outcome", "error"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"], Outcome.ERROR, "http 429"),
        ([b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"], Outcome.ERROR, "http 500"),
        ([HEAD, text("one")], Outcome.CUT, "stream ended early"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", text("one")], Outcome.CUT, "connection lost"),
        ([], Outcome.CUT, "connection lost"),
        ([HEAD, b"data: {broken\n\n"], Outcome.ERROR, "malformed event"),
        ([HEAD, b"data: 17\n\n"], Outcome.ERROR, "malformed event"),
        ([HEAD, event({"error": {"message": "out of memory"}})], Outcome.ERROR, "error in the stream"),
        ([HEAD, DONE], Outcome.CUT, "no finish_reason"),
        ([HEAD, text("one"), DONE], Outcome.CUT, "no finish_reason"),
        ([HEAD, text("one"), usage(), DONE], Outcome.CUT, "no finish_reason"),
        ([HEAD, text("one", "abort"), DONE], Outcome.ERROR, "finish_reason abort"),
        ([HEAD], Outcome.CUT, "stream ended early"),
        ([HEAD, text("one")[:-9]], Outcome.ERROR, "malformed event"),
        ([HEAD, text("one"), b'data: {"error": {"message": "late"}}'], Outcome.ERROR, "error in the stream"),
        ([HEAD, b'data: {"choices": "all"}\n\n'], Outcome.ERROR, "malformed event"),
        ([HEAD, b'data: {"choices": [["x"]]}\n\n'], Outcome.ERROR, "malformed event"),
        ([HEAD, b'data: {"choices": {"0": 1}}\n\n'], Outcome.ERROR, "malformed event"),
        ([HEAD, b'data: {"choices": [{"delta": [1]}]}\n\n'], Outcome.ERROR, "malformed event"),
        ([HEAD, b"data: []\n\n"], Outcome.ERROR, "malformed event"),
        ([HEAD, b'data: "\xff\xfe"\n\n'], Outcome.ERROR, "malformed event"),
        ([HEAD, event({"usage": {"prompt_tokens": "ten"}})], Outcome.ERROR, "malformed event"),
        ([HEAD, event({"usage": {"prompt_tokens": -1}})], Outcome.ERROR, "malformed event"),
        ([HEAD, event({"usage": {"prompt_tokens": 2**70}})], Outcome.ERROR, "malformed event"),
        ([HEAD, event({"usage": {"p99lab_timeline": {"queue_s": 1}}})], Outcome.ERROR, "malformed event"),
        ([HEAD, b"data: " + b"x" * 100_000 + b"\n\n"], Outcome.ERROR, "malformed event"),
        ([HTML, b"<html><body>Welcome</body></html>"], Outcome.ERROR, "not an event stream"),
        ([HEAD.replace(b"text/event-stream", b"application/json"), b"{}"], Outcome.ERROR, "not an event stream"),
        ([HEAD, b"<html><body>Welcome</body></html>"], Outcome.CUT, "stream ended early"),
        ([HEAD.replace(b"close", b"close\r\ncontent-encoding: gzip"), GOOD], Outcome.ERROR, "undecodable answer"),
        ([b"HTTP/1.1 307 Away\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n"], Outcome.ERROR, "http 307"),
        ([b"not http at all\r\n\r\n"], Outcome.CUT, "connection lost"),
        ([CHUNKED, b"zz\r\n"], Outcome.CUT, "connection lost"),
        ([CHUNKED, b"5\r\ndat", 0.05, b"a: too long"], Outcome.CUT, "connection lost"),
        ([CHUNKED, b"5\r\ndata:\r\n"], Outcome.CUT, "connection lost"),
        ([HEAD, text("one"), b": ping\n\n", 0.1, b": ping\n\n", 5.0], Outcome.TIMEOUT, "no end after 0.3 s"),
        ([HEAD, text(""), text("", "stop"), DONE], Outcome.ERROR, "empty answer"),
        ([HEAD, text("one"), 5.0], Outcome.TIMEOUT, "no end after 0.3 s"),
        ([HEAD, text("one"), text("", "stop")], Outcome.OK, None),
    ],
)
def test_what_a_server_does_wrong_is_an_outcome(serve: Any, steps: list[Any], outcome: Outcome, error: str) -> None:
    timeout_s = 0.3 if outcome is Outcome.TIMEOUT else 20.0
    record = only(ask(serve, script(*steps), timeout_s=timeout_s)[0])
    assert (record.outcome, record.error) == (outcome, error)
    assert math.isfinite(e2e(record)) == math.isfinite(ttft(record)) == (outcome is Outcome.OK)
    assert from_table(to_table([record])) == [record]


def test_what_a_server_says_of_an_error_is_kept_beside_its_kind(serve: Any) -> None:
    said = json.dumps({"error": {"message": "too long:\n 9 of 8"}}).encode()
    busy = b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\ncontent-length: %d\r\n\r\n" % len(said) + said
    run, served, _ = ask(serve, script(busy))
    assert (only(run).error, only(run).error_detail) == ("http 429", "too long: 9 of 8; Retry-After: 7")
    assert len(served.bodies) == 1  # it is not sent again
    record = only(ask(serve, script(HEAD, event({"error": {"message": "out of memory"}})))[0])
    assert record.error_detail == "out of memory"


def test_a_path_that_is_not_there_is_named(serve: Any) -> None:
    missing = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    assert only(ask(serve, script(missing), endpoint="chat")[0]).error == "http 404 at /v1/chat/completions"

    async def prime() -> None:
        async with serve(script(missing)) as served:
            target = OpenAITarget(served.url)
            await target.open()
            try:
                await target.prime(list(islice(stdlib_documents(0, (50, 60)), 1)))
            finally:
                await target.close()

    with pytest.raises(TargetError, match="while document 0 was primed: http 404 at /v1/completions"):
        asyncio.run(prime())


def test_a_refused_key_is_not_repeated(serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TINY_KEY", "s3cret")
    said = b'{"error": {"message": "no such key: s3cret"}}'
    refused = b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n" % len(said) + said
    record = only(ask(serve, script(refused), api_key_env="TINY_KEY")[0])
    assert (record.error, record.error_detail) == ("http 401", None)


def test_a_key_that_is_missing_is_not_called_refused(serve: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("TINY_KEY", raising=False)
    record = only(ask(serve, script(b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n"), api_key_env="TINY_KEY")[0])
    assert (record.error, record.error_detail) == ("http 401", "it wants a key and $TINY_KEY is not set")


@pytest.mark.parametrize("far", [0, 196])  # where the detail is cut short, the key must not be cut instead
@pytest.mark.parametrize("in_stream", [False, True])
def test_a_key_that_a_server_repeats_is_struck_out(serve: Any, monkeypatch: Any, far: int, in_stream: bool) -> None:
    monkeypatch.setenv("TINY_KEY", "s3cret-of-mine")
    said = json.dumps({"error": {"message": "x" * far + " s3cret-of-mine"}}).encode()
    refused = b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n" % len(said) + said
    steps = [HEAD, b"data: " + said + b"\n\n"] if in_stream else [refused]
    record = only(ask(serve, script(*steps), api_key_env="TINY_KEY")[0])
    shown = f"{'x' * far} (secret)".strip()
    assert record.error_detail == (shown if len(shown) <= 200 else f"{shown[:200]}…")


@pytest.mark.parametrize(
    ("status", "kind", "why"),
    [
        (404, "application/json", " (http 404, application/json)"),
        (500, "text/plain", " (http 500, text/plain)"),
        (200, "text/html", " (http 200, text/html)"),
        (200, "application/json", ""),
    ],
)
def test_an_endpoint_without_models_says_what_it_sent_instead(status: int, kind: str, why: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} So\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: 2\r\n\r\n{{}}"
        writer.write(head.encode())
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            with pytest.raises(BadParameterError) as caught:
                await OpenAITarget(url).open()
            assert str(caught.value) == f"{url}/models lists no models{why}: name one with --model"

    asyncio.run(main())


@pytest.mark.parametrize("key", ["s3cret\nx: y", "s3crét"])
def test_a_key_that_no_header_holds_is_a_user_error(monkeypatch: Any, key: str) -> None:
    monkeypatch.setenv("TINY_KEY", key)
    with pytest.raises(BadParameterError, match="TINY_KEY") as caught:
        open_and_close(OpenAITarget("http://127.0.0.1:9", api_key_env="TINY_KEY"))
    assert "s3cr" not in str(caught.value)


STREAM = (
    b": a comment\n\n"
    + text("Grüße 日本")
    + b"event: message\nid: 7\n"
    + text("", None)
    + text(" three").replace(b"\n", b"\r\n")
    + b'data: {"choices": [\ndata: {"text": " four", "finish_reason": "length"}]}\n\n'
    + b": ping\r\n\r\n"
    + usage(completion=9)
    + DONE
)


def parsed(blocks: list[bytes]) -> list[Chunk]:
    async def body() -> AsyncGenerator[bytes, None]:
        for block in blocks:
            yield block

    async def main() -> list[Chunk]:
        return [chunk async for chunk in chunks(body())]

    return asyncio.run(main())


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_it_does_not_matter_where_a_stream_is_cut_into_reads(cuts: list[int]) -> None:
    """Inside a character, between CR and LF, between two lines of one event."""
    places = [0, *sorted(cuts), len(STREAM)]
    blocks = [STREAM[begin:end] for begin, end in pairwise(places)]
    assert parsed(blocks) == parsed([STREAM])
    assert [chunk.num_tokens for chunk in parsed(blocks)] == [1, 0, 1, 1, 0]


@given(junk=st.binary(max_size=60), at=st.integers(0, len(STREAM)))
def test_whatever_is_in_a_stream_it_is_an_answer_or_a_request_error(junk: bytes, at: int) -> None:
    with suppress(RequestError):
        assert sum(chunk.num_tokens for chunk in parsed([STREAM[:at] + junk + STREAM[at:]])) <= 5


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
@given(message=st.dictionaries(st.sampled_from(KEYS), json_values))
def test_whatever_an_event_says_it_is_a_chunk_or_a_request_error(message: dict[str, Any]) -> None:
    with suppress(RequestError):
        for chunk in parsed([event(message)]):
            for count in (chunk.served.num_prompt_tokens, chunk.served.num_cached_tokens) if chunk.served else ():
                assert count is None or 0 <= count < 2**53


def test_an_event_without_end_is_given_up() -> None:
    with pytest.raises(RequestError, match="event too long"):
        parsed([b"data: "] + [b"x" * 65536] * 100)


def test_bundled_and_split_events(serve: Any) -> None:
    record = only(ask(serve, script(HEAD, STREAM[:80], 0.02, STREAM[80:95], 0.02, STREAM[95:]))[0])
    assert record.outcome is Outcome.OK
    assert len(record.token_times_s) == 3
    assert record.num_output_tokens == 9


def test_usage_in_every_chunk_is_counted_once(serve: Any) -> None:
    def growing(word: str, count: int, finish: str | None = None) -> bytes:
        counts = {"prompt_tokens": 10, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 4}}
        return event({"choices": [{"text": word, "finish_reason": finish}], "usage": counts})

    run, _, _ = ask(serve, script(HEAD, growing("a", 1), growing("b", 2), growing("c", 3, "stop"), DONE), 2)
    assert [r.num_output_tokens for r in measured(run.records)] == [3, 3]
    assert run.counters_after == {"num_queried_tokens": 20, "num_cached_tokens": 8}


def test_this_projects_server_says_where_the_time_went(serve: Any) -> None:
    account = {"queue_s": 0.25, "prefill_s": 0.1, "decode_s": 0.05, "stalled_s": 0.0, "scheduling_s": 0.01}
    counts = {"prompt_tokens": 10, "completion_tokens": 1, "p99lab_timeline": {**account, "num_preemptions": 2}}
    record = only(ask(serve, script(HEAD, text("one", "length"), event({"choices": [], "usage": counts}), DONE))[0])
    assert {name: getattr(record, name) for name in account} == account
    assert record.num_preemptions == 2
    shares = attribution(record)
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(e2e(record))


def test_a_tokenizer_counts_where_the_server_does_not(serve: Any) -> None:
    options: dict[str, Any] = {"ids": True, "tokenize": lambda text: list(text.encode())}
    record = only(ask(serve, script(HEAD, text("one two"), text("!", "stop"), DONE), **options)[0])
    assert (record.num_output_tokens, len(record.token_times_s)) == (8, 2)
    assert (record.num_prompt_tokens, record.num_prompt_tokens_sent) == (3, 3)
    record = only(ask(serve, script(HEAD, GOOD), **options)[0])
    assert record.num_output_tokens == 3  # the server's own count is taken
    assert (record.num_prompt_tokens, record.num_prompt_tokens_sent) == (10, 3)  # and the drift stays visible
    assert only(ask(serve, script(HEAD, GOOD))[0]).num_prompt_tokens_sent is None


def test_a_token_that_spells_nothing_counts_where_its_id_is_told(serve: Any) -> None:
    def told(word: str, ids: Any, finish: str | None = None) -> bytes:
        return event({"choices": [{"text": word, "token_ids": ids, "finish_reason": finish}]})

    record = only(ask(serve, script(HEAD, told("", [0]), 0.05, told("a", [5, 6]), told("", None, "length"), DONE))[0])
    assert len(record.token_times_s) == 2
    assert record.token_times_s[1] - record.token_times_s[0] > 0.01
    assert only(ask(serve, script(HEAD, told("", []), told("", None, "stop"), DONE))[0]).error == "empty answer"


def test_the_one_token_of_an_answer_may_spell_nothing(serve: Any) -> None:
    record = only(ask(serve, script(HEAD, text("", "length"), usage(completion=1), DONE))[0])
    assert (record.outcome, record.num_output_tokens, len(record.token_times_s)) == (Outcome.OK, 1, 1)
    assert record.first_token_s == pytest.approx(record.end_s, abs=0.05)
    many = only(ask(serve, script(HEAD, text("", "length"), usage(completion=16), DONE))[0])
    assert (many.outcome, many.error) == (Outcome.ERROR, "empty answer")


def test_without_usage_chunks_are_counted(serve: Any) -> None:
    record = only(ask(serve, script(HEAD, text("a"), text("b", "stop"), DONE))[0])
    assert record.num_output_tokens == 2
    assert record.num_cached_tokens is None


def test_some_failures_leave_the_others_alone(serve: Any) -> None:
    seen: list[int] = []

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        seen.append(1)
        writer.write(HEAD + GOOD if len(seen) % 2 else b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")

    run, _, _ = ask(serve, behave, 20)
    outcomes = [record.outcome for record in measured(run.records)]
    assert (outcomes.count(Outcome.OK), outcomes.count(Outcome.ERROR)) == (10, 10)


def test_no_pool_holds_back_the_clients(serve: Any) -> None:
    """150 at once: more than the 100 connections that aiohttp allows by default."""
    waiting: list[asyncio.StreamWriter] = []
    all_here = asyncio.Event()

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        waiting.append(writer)
        if len(waiting) == 150:
            all_here.set()
        await all_here.wait()
        writer.write(HEAD + GOOD)

    async def main() -> Run:
        async with serve(behave) as served:
            target = OpenAITarget(served.url)
            await target.open()
            load = ClosedLoad(concurrency=150, num_requests=150, warmup_share=0, timeout_s=30.0)
            try:
                return await drive(target, load, iter(texts(150)))
            finally:
                await target.close()

    assert [r.outcome for r in asyncio.run(main()).records] == [Outcome.OK] * 150


def test_each_request_has_a_connection_of_its_own(serve: Any) -> None:
    """One that idles may be closing, and binds the next request to one process of a server."""
    _, served, _ = ask(serve, script(HEAD, GOOD), 3)
    assert ["connection: close" in head.lower() for head in served.headers] == [True] * 4


def test_proxies_of_the_environment_are_not_used(serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert only(ask(serve, script(HEAD, GOOD))[0]).outcome is Outcome.OK


def test_a_large_body_arrives_whole(serve: Any) -> None:
    """More than a socket's buffers hold."""
    ids = list(range(1_000_000, 1_500_000))
    large = Query(0, 0, Passage.of("", ids), len(ids), max_tokens=3, ignore_eos=True)
    run, served, _ = ask(serve, script(HEAD, GOOD), queries=[large])
    assert served.bodies[0]["prompt"] == ids
    record = only(run)
    assert record.first_byte_s is not None
    assert record.last_byte_s is not None
    assert record.send_s < record.first_byte_s < record.last_byte_s < record.end_s


def test_a_client_that_leaves_closes_its_connection(serve: Any) -> None:
    left = asyncio.Event()

    async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        with suppress(ConnectionError):
            for _ in range(500):
                writer.write(text("one"))
                await writer.drain()
                await asyncio.sleep(0.01)
            return
        left.set()

    async def main() -> None:
        async with serve(behave) as served:
            target = OpenAITarget(served.url)
            await target.open()
            answer = target.send(texts(1)[0])
            assert (await anext(answer)).num_tokens == 1
            await answer.aclose()
            await asyncio.wait_for(left.wait(), 4.0)
            await target.close()

    asyncio.run(main())


def test_a_lost_listing_is_one_line_and_not_asked_for_again() -> None:
    num_asked = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        await reader.readuntil(b"\r\n\r\n")
        num_asked += 1
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            await OpenAITarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").open()

    with pytest.raises(TargetError, match=r"/v1 does not answer: Server disconnected$"):
        asyncio.run(main())
    assert num_asked == 1


def test_the_key_comes_from_the_environment_and_stays_out_of_records(serve: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TINY_KEY", "s3cret")
    run, served, target = ask(serve, script(HEAD, GOOD), api_key_env="TINY_KEY")
    assert all("authorization: Bearer s3cret" in head for head in served.headers)
    assert "s3cret" not in repr(run) + target.name + repr(vars(target))


def open_and_close(target: OpenAITarget) -> None:
    async def main() -> None:
        await target.open()
        await target.close()

    asyncio.run(main())


def test_an_endpoint_that_is_not_there_is_one_line() -> None:
    with pytest.raises(TargetError, match=r"http://127\.0\.0\.1:9/v1 does not answer: connection refused$") as caught:
        open_and_close(OpenAITarget("http://127.0.0.1:9"))
    assert caught.value.exit_code == 5
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "inprocess", "ftp://host", "", "http://[::1", "http://h:99999", "http://:80"]
)
def test_what_is_no_url_is_one_line(url: str) -> None:
    with pytest.raises(BadParameterError, match="neither serve nor in-process nor a URL"):
        OpenAITarget(url)


def test_a_password_does_not_belong_in_a_url() -> None:
    with pytest.raises(BadParameterError, match="environment variable") as caught:
        OpenAITarget("http://me:s3cret@host")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("url", "base"), [("http://h:1", "http://h:1/v1"), ("http://h/api/v3/", "http://h/api/v3")])
def test_v1_is_added_to_a_bare_host(url: str, base: str) -> None:
    assert OpenAITarget(url).base_url == base


def test_a_model_that_is_not_listed_is_one_line(serve: Any) -> None:
    with pytest.raises(TargetError, match=r"did you mean 'tiny'\? \(it lists: tiny\)$") as caught:
        ask(serve, script(HEAD, GOOD), model="tinny")
    assert caught.value.exit_code == 5


def test_why_there_is_no_connection() -> None:
    two = "Multiple exceptions: [Errno 99] Cannot assign requested address, [Errno {}] Connect call failed"
    cases: tuple[tuple[Any, Exception, str], ...] = (
        (aiohttp.ClientConnectorError, OSError(errno.ECONNREFUSED, "at 127.0.0.1"), "connection refused"),
        (aiohttp.ClientConnectorError, OSError(two.format(errno.ECONNREFUSED)), "connection refused"),
        (aiohttp.ClientConnectorError, OSError(two.format(errno.EACCES)), "connection failed"),
        (aiohttp.ClientConnectorError, OSError(errno.EMFILE, "at 127.0.0.1"), "Too many open files"),
        (aiohttp.ClientConnectorDNSError, socket.gaierror(-2, "Name or service not known"), "no such host"),
        (aiohttp.ClientConnectorSSLError, ssl.SSLError("no reason"), "TLS: failed"),
    )
    for kind, cause, why in cases:
        assert connect_failure(kind(None, cause)) == why


def test_a_server_without_tls_is_one_line() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            await OpenAITarget(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}").open()

    with pytest.raises(TargetError, match="does not answer: TLS: ") as caught:
        asyncio.run(main())
    assert "\n" not in str(caught.value)


def test_ids_without_text_cannot_go_to_chat(serve: Any) -> None:
    query = Query(0, 0, Passage.of("", [1, 2]), 1, 1, True)

    async def main() -> None:
        async with serve(script(HEAD, GOOD)) as served:
            target = OpenAITarget(served.url, endpoint="chat")
            await target.open()
            try:
                await anext(target.send(query))
            finally:
                await target.close()

    with pytest.raises(BadParameterError, match="use completions"):
        asyncio.run(main())


# --- when requests go out -------------------------------------------------------------------------------------------


@dataclass
class Receipt:
    """When a server had a connection, and the first byte on it, seconds of the Unix clock."""

    accepted_s: float
    first_byte_s: float = math.inf
    head: str = ""


@dataclass
class Listener:
    """A server in threads of its own, which are not held up by what holds up its clients."""

    url: str
    slow_s: float = 0.0  # its first connection, for the list of models, apart
    accept_after_s: float = 0.0
    receipts: list[Receipt] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def listen(self, listening: socket.socket) -> None:
        with suppress(OSError):  # it is shut down
            while select.select([listening], [], []):
                time.sleep(self.accept_after_s)
                connection, _ = listening.accept()
                self.receipts.append(Receipt(time.time()))
                self.threads.append(threading.Thread(target=self.answer, args=(connection, self.receipts[-1])))
                self.threads[-1].start()

    def answer(self, connection: socket.socket, receipt: Receipt) -> None:
        with connection, connection.makefile("rb") as stream:
            while (line := stream.readline()).strip():
                receipt.first_byte_s = min(receipt.first_byte_s, time.time())
                receipt.head += line.decode()
            if receipt.head.startswith("GET"):
                listed = b'{"data": [{"id": "tiny"}]}'
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(listed) + listed)
            elif receipt.head:
                stream.read(int(receipt.head.lower().split("content-length: ")[1].split("\r\n")[0]))
                connection.sendall(HEAD + GOOD)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as listening:
        served = Listener(f"http://127.0.0.1:{listening.getsockname()[1]}")
        served.threads.append(threading.Thread(target=served.listen, args=(listening,)))
        served.threads[0].start()
        yield served
        served.accept_after_s = 0.0
        listening.shutdown(socket.SHUT_RDWR)
        for thread in served.threads:
            thread.join()


def due(*times_s: float) -> list[Query]:
    return [replace(query, intended_s=at_s) for query, at_s in zip(texts(len(times_s)), times_s, strict=True)]


def send(
    listener: Listener, load: Load, queries: list[Query], holdup: Callable[[], Awaitable[None]] | None = None
) -> tuple[Run, list[Receipt]]:
    """A run on the clients' event loop, and the receipts of its requests. `holdup` shares the loop."""

    async def main() -> Run:
        target = OpenAITarget(listener.url)
        await target.open()
        listener.accept_after_s = listener.slow_s
        other = asyncio.ensure_future(holdup() if holdup else asyncio.sleep(0))
        try:
            return await drive(target, load, iter(queries))
        finally:
            other.cancel()
            await target.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        run = runner.run(main())
    assert [record.outcome for record in run.records] == [Outcome.OK] * len(queries)
    return run, listener.receipts[1:]


OPEN = OpenLoad(rate=1, num_requests=1000, warmup_share=0)


def test_a_connection_is_there_before_its_request_is_due_and_nothing_is_on_it(listener: Listener) -> None:
    run, receipts = send(listener, OPEN, due(0.2, 0.3, 0.4))
    early_s = []
    for record, receipt in zip(run.records, receipts, strict=True):
        due_s = run.began_unix_s + (record.intended_s or 0.0)
        early_s.append(due_s - receipt.accepted_s)
        assert due_s - 0.001 < receipt.first_byte_s  # two clocks
    assert 0.01 < np.median(early_s) < 0.06


def test_nothing_of_the_clients_doing_passes_between_the_stamp_and_the_first_byte(listener: Listener) -> None:
    """Whatever needs a turn of the event loop takes 4 ms more."""

    async def turns() -> None:
        while True:
            time.sleep(0.004)
            await asyncio.sleep(0)

    run, receipts = send(listener, OPEN, due(*(0.2 + 0.05 * i for i in range(12))), turns)
    after_s = [
        receipt.first_byte_s - run.began_unix_s - record.send_s
        for record, receipt in zip(run.records, receipts, strict=True)
    ]
    late_s = [record.send_s - (record.intended_s or 0.0) for record in run.records]
    assert np.median(after_s) < 0.003
    assert max(late_s) > 0.001


def test_a_client_that_is_held_up_before_it_sends_is_late(listener: Listener) -> None:
    """The first has its connection by then, the second has not begun it: that excuses nothing."""

    async def once() -> None:
        await asyncio.sleep(0.25)
        time.sleep(0.2)

    run, _ = send(listener, OPEN, due(0.28, 0.35), once)
    for record in run.records:
        assert record.first_byte_s is not None
        assert record.send_s - (record.intended_s or 0.0) > 0.05
    assert run.records[1].send_s >= (run.records[1].first_byte_s or math.inf)


def test_a_server_that_accepts_slowly_has_it_in_a_closed_loads_latency(listener: Listener) -> None:
    listener.slow_s = 0.3
    run, _ = send(listener, ClosedLoad(concurrency=1, num_requests=2, warmup_share=0), texts(2))
    assert all(ttft(record) > 0.29 for record in run.records)


def test_a_server_that_accepts_slowly_has_it_in_an_open_loads_latency_and_makes_no_client_late(
    listener: Listener,
) -> None:
    listener.slow_s = 0.5
    run, _ = send(listener, OPEN, due(0.2))
    (record,) = run.records
    assert record.send_s - 0.2 < 0.2
    assert ttft(record) > 0.4


def test_what_is_never_released_sends_nothing(listener: Listener) -> None:
    async def main() -> None:
        target = OpenAITarget(listener.url)
        await target.open()
        answer = target.send(texts(1)[0])
        assert isinstance(answer, Outgoing)
        answer.prepare(time.perf_counter, hold=True)
        asked = asyncio.ensure_future(anext(answer))
        while len(listener.receipts) < 2:
            await asyncio.sleep(0.01)
        assert not asked.done()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await target.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert [receipt.head for receipt in listener.receipts[1:]] == [""]


def test_a_server_that_is_gone_before_a_request_is_due_fails_it_when_it_is(serve: Any) -> None:
    async def main() -> Run:
        async with serve(script(HEAD, GOOD)) as served:
            target = OpenAITarget(served.url)
            await target.open()
        try:  # nobody listens any more
            return await drive(target, OPEN, iter(due(0.2)))
        finally:
            await target.close()

    (record,) = asyncio.run(main()).records
    assert (record.outcome, record.error, record.first_byte_s) == (Outcome.ERROR, "connection refused", None)
    assert 0.2 <= record.send_s <= record.end_s


class Noted:
    """A session with connections; what is written to them is noted, and nothing comes back."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    @asynccontextmanager
    async def post(self, url: str, data: aiohttp.Payload, **options: Any) -> AsyncGenerator[None, None]:
        await data.write(self)  # type: ignore[arg-type]
        raise aiohttp.ClientError
        yield

    def send_headers(self) -> None:
        self.notes.append("head")

    async def write(self, chunk: bytes) -> None:
        self.notes.append("body")


def test_requests_that_are_due_together_all_begin_before_a_body_is_written(monkeypatch: Any) -> None:
    target, session = OpenAITarget("http://127.0.0.1:1", model="m"), Noted()
    monkeypatch.setattr(target, "_session", session)
    asyncio.run(drive(target, OPEN, iter(due(*[0.1] * 4))))
    assert session.notes == ["head"] * 4 + ["body"] * 4
