from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from p99lab.engine.events import TokenEvent, Usage
from p99lab.engine.request import FinishReason, Timeline
from p99lab.errors import BadParameterError
from p99lab.probe.documents import Passage
from p99lab.probe.load import Run, drive
from p99lab.probe.records import Outcome, RequestRecord
from p99lab.probe.stats import measured, ttft
from p99lab.probe.targets import InProcessTarget, OpenAITarget, TargetError, shared_interpreter
from p99lab.probe.workload import ClosedLoad, Query

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


DONE = b"data: [DONE]\n\n"
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
    timeout_s = options.pop("timeout_s", 20.0)

    async def main() -> tuple[Run, Any, OpenAITarget]:
        async with serve(behave) as served:
            target = OpenAITarget(served.url, **options)
            await target.open()
            load = ClosedLoad(concurrency=min(4, count), num_requests=count, warmup_share=0, timeout_s=timeout_s)
            try:
                return await drive(target, load, iter(texts(count, ids))), served, target
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
        ([HEAD, DONE], Outcome.ERROR, "empty answer"),
        ([HEAD, text(""), text("", "stop"), DONE], Outcome.ERROR, "empty answer"),
        ([HEAD, text("one"), 5.0], Outcome.TIMEOUT, "no end after 0.3 s"),
        ([HEAD, text("one"), text("", "stop")], Outcome.OK, None),
    ],
)
def test_what_a_server_does_wrong_is_an_outcome(serve: Any, steps: list[Any], outcome: Outcome, error: str) -> None:
    record = only(ask(serve, script(*steps), timeout_s=0.3)[0])
    assert (record.outcome, record.error) == (outcome, error)


def test_bundled_and_split_events(serve: Any) -> None:
    whole = (
        HEAD + text("one two") + text("", None) + b": a comment\n\n" + text(" three", "length").replace(b"\n", b"\r\n")
    )
    rest = usage(completion=9) + DONE
    steps = [whole[:80], 0.02, whole[80:95], 0.02, whole[95:], rest]
    record = only(ask(serve, script(*steps))[0])
    assert record.outcome is Outcome.OK
    assert len(record.token_times_s) == 2
    assert record.num_output_tokens == 9


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
    """150 at once: more than the 100 connections that httpx allows by default."""
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
    with pytest.raises(TargetError, match=r"http://127\.0\.0\.1:9/v1 does not answer") as caught:
        open_and_close(OpenAITarget("http://127.0.0.1:9"))
    assert caught.value.exit_code == 5
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "inprocess", "ftp://host", ""])
def test_what_is_no_url_is_one_line(url: str) -> None:
    with pytest.raises(BadParameterError, match="neither in-process nor a URL"):
        OpenAITarget(url)


@pytest.mark.parametrize(("url", "base"), [("http://h:1", "http://h:1/v1"), ("http://h/api/v3/", "http://h/api/v3")])
def test_v1_is_added_to_a_bare_host(url: str, base: str) -> None:
    assert OpenAITarget(url).base_url == base


def test_an_unknown_model_is_one_line(serve: Any) -> None:
    with pytest.raises(BadParameterError, match="did you mean 'tiny'"):
        ask(serve, script(HEAD, GOOD), model="tinny")


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


# --- in process -----------------------------------------------------------------------------------------------------


class FakeEngine:
    """Streams three tokens per request; remembers what it was asked and who left early."""

    tokenizer = None

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.num_closed = 0

    async def stream(self, prompt: Any, sampling: Any = None, **options: Any) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append((prompt, sampling))
        try:
            for number in range(sampling.max_tokens):
                await asyncio.sleep(0)
                last = number + 1 == sampling.max_tokens
                bill = Usage(len(prompt), 2, number + 1, Timeline(0.0, queue_s=0.25)) if last else None
                yield TokenEvent("r", number, "", 0.0, None, FinishReason.LENGTH if last else None, bill)
        finally:
            self.num_closed += 1

    def stats(self) -> Any:
        class Stats:
            def as_dict(self) -> dict[str, Any]:
                return {"num_queried_tokens": 30, "num_cached_tokens": 20, "busy_s": 0.5}

        return Stats()


def test_an_engine_in_process_is_a_target() -> None:
    engine = FakeEngine()
    load = ClosedLoad(concurrency=1, num_requests=2, warmup_share=0)
    run = asyncio.run(drive(InProcessTarget(engine), load, iter(texts(2, ids=True))))
    record = run.records[0]
    assert (record.outcome, record.num_output_tokens, record.num_cached_tokens) == (Outcome.OK, 3, 2)
    assert record.queue_s == 0.25
    assert len(record.token_times_s) == 3
    assert run.counters_after == {"num_queried_tokens": 30, "num_cached_tokens": 20}
    prompt, sampling = engine.asked[0]
    assert np.array_equal(prompt, [1, 2, 3])
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (3, True, 0.0)


def test_a_client_that_leaves_cancels_its_request() -> None:
    engine = FakeEngine()

    async def main() -> None:
        chunks = InProcessTarget(engine).send(texts(1, ids=True)[0])
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(main())
    assert engine.num_closed == 1


def test_priming_sends_each_document_once() -> None:
    from p99lab.probe.documents import synthetic_documents

    engine = FakeEngine()
    documents = [document for document, _ in zip(synthetic_documents(0, (5, 9), 97), range(3), strict=False)]
    asyncio.run(InProcessTarget(engine).prime(documents))
    assert [len(prompt) for prompt, _ in engine.asked] == [d.passage.num_tokens for d in documents]
    assert {sampling.max_tokens for _, sampling in engine.asked} == {1}


def test_sharing_the_interpreter_is_undone() -> None:
    before = sys.getswitchinterval()
    with shared_interpreter():
        assert sys.getswitchinterval() < 0.001
    assert sys.getswitchinterval() == before
