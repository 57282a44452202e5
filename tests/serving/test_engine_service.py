"""An engine for other processes: the same answers and errors, and a message a step."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from p99lab.engine.config import EngineConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion, TokenEvent
from p99lab.engine.request import SamplingParams
from p99lab.errors import AccountingError, BadParameterError, EngineClosedError, EngineFailedError, QueueFullError
from p99lab.serving.engine_service import engine_service
from p99lab.serving.protocol import engine_pb2 as pb
from p99lab.serving.protocol.link import PATHS
from p99lab.serving.protocol.messages import EngineRequest, write_add
from p99lab.serving.remote_engine import RemoteEngine, remote_engine
from tests.serving.clients import eventually, slow_steps

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SLOW_S = 0.005


@pytest.fixture
def own_engine(new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    with new_engine() as engine:
        yield engine


@asynccontextmanager
async def remote(engine: Engine) -> AsyncIterator[RemoteEngine]:
    with engine_service(engine) as address:
        async with remote_engine(address) as client:
            yield client


async def answer(engine: RemoteEngine, prompt: Any, sampling: SamplingParams) -> Completion:
    completion = Completion("")
    async for event in engine.stream(prompt, sampling):
        completion.add(event)
    return completion


def run(engine: Engine, work: Callable[[RemoteEngine], Any]) -> Any:
    async def main() -> Any:
        async with remote(engine) as client:
            return await work(client)

    return asyncio.run(main())


def is_free(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == stats.num_active_pages == 0


def test_it_is_described_as_it_is(engine: Engine) -> None:
    async def look(client: RemoteEngine) -> None:
        assert (client.config, client.geometry) == (engine.config, engine.geometry)
        assert client.tokenizer.eos_ids == engine.tokenizer.eos_ids
        assert client.stats() == engine.stats()
        np.testing.assert_array_equal(client.encode("one"), engine.encode("one"))

    run(engine, look)


@pytest.mark.parametrize(
    "params",
    [{}, {"logprobs": 2, "prompt_logprobs": 1}, {"temperature": 1.0, "seed": 2**40}, {"stop": True}, {"stop_id": True}],
)
def test_an_answer_is_the_engines_own(engine: Engine, params: dict[str, Any]) -> None:
    text = engine.generate(["one"], SamplingParams(max_tokens=20, ignore_eos=True))[0].text
    if params.pop("stop", False):
        params["stop"] = (text[5:7],)
    if params.pop("stop_id", False):
        params["stop_token_ids"] = (ord(text[5]),)
    sampling = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **params})
    expected = engine.generate(["one"], sampling)[0]
    found = run(engine, lambda client: answer(client, "one", sampling))
    assert (found.text, found.token_ids, found.finish_reason) == (
        expected.text,
        expected.token_ids,
        expected.finish_reason,
    )
    assert [entry.top for entry in found.logprobs] == [entry.top for entry in expected.logprobs]
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.usage.num_output_tokens == expected.usage.num_output_tokens == len(found.token_ids)
    timeline = found.usage.timeline
    shares = timeline.queue_s + timeline.prefill_s + timeline.decode_s + timeline.stalled_s + timeline.scheduling_s
    assert shares == pytest.approx(timeline.finished_s - timeline.arrival_s, abs=1e-6)


def test_a_stop_string_ends_the_request_in_the_engine(own_engine: Engine) -> None:
    text = own_engine.generate(["one"], SamplingParams(max_tokens=8, ignore_eos=True))[0].text
    sampling = SamplingParams(max_tokens=400, ignore_eos=True, stop=(text[5:7],))
    found = run(own_engine, lambda client: answer(client, "one", sampling))
    assert found.text == text[: text.index(text[5:7])]
    assert own_engine.stats().num_steps < 100
    assert is_free(own_engine)


def test_a_message_is_a_step(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, SLOW_S)
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    adds = [write_add(EngineRequest(number, np.array([number], np.int32), sampling, 0.0)) for number in range(3)]
    done = threading.Event()

    def asking() -> Iterator[pb.FromGateway]:
        yield from adds
        done.wait(30)  # a gateway that says no more gives its requests up

    with engine_service(own_engine) as address, grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(PATHS["Serve"], pb.FromGateway.SerializeToString, pb.FromEngine.FromString)
        received: list[pb.FromEngine] = []
        for message in stream(asking()):
            received.append(message)
            if sum(len(one.ends) for one in received) == 3:
                done.set()
    assert received[0].HasField("config")
    with_tokens = [message for message in received if message.numbers]
    assert len(with_tokens) == own_engine.stats().num_steps
    assert all(len(set(message.numbers)) == len(message.numbers) for message in with_tokens)
    assert max(len(message.numbers) for message in with_tokens) == 3
    assert sum(len(message.numbers) for message in with_tokens) == 30


def test_errors_are_raised_as_in_the_engines_own_process(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps(monkeypatch, SLOW_S)

    async def ask(client: RemoteEngine) -> None:
        running = asyncio.create_task(answer(client, "one", LONG))
        while engine.stats().num_running == 0:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(answer(client, "one", LONG))
        while engine.stats().num_waiting == 0:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError):
            await answer(client, "one", LONG)
        with pytest.raises(BadParameterError, match="outside the vocabulary"):
            await answer(client, [128], LONG)
        with pytest.raises(BadParameterError, match="exceed the model's 512"):
            await answer(client, "one", SamplingParams(max_tokens=600))
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        while not is_free(engine):  # leaving early cancels
            await asyncio.sleep(0.01)

    with new_engine(max_num_seqs=1, max_num_waiting=1) as engine:
        run(engine, ask)
        engine.check()


def test_a_gateway_that_goes_takes_its_requests_along(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, SLOW_S)

    async def begin(client: RemoteEngine) -> Any:
        stream = client.stream("one", LONG)
        await anext(stream)
        return stream  # nobody closes it

    with engine_service(own_engine) as address:

        async def main() -> None:
            async with remote_engine(address) as client:
                await begin(client)

        asyncio.run(main())
        eventually(lambda: is_free(own_engine))
        own_engine.check()


def test_an_engine_that_closes_says_so(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, SLOW_S)

    async def ask(client: RemoteEngine) -> None:
        stream = client.stream("one", LONG)
        await anext(stream)
        await asyncio.to_thread(own_engine.close)
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await answer(client, "one", LONG)
        assert str(client.failure) == "the engine is closed"

    run(own_engine, ask)


def test_an_engine_that_fails_says_so_to_gateways_that_ask_nothing(own_engine: Engine) -> None:
    async def look(client: RemoteEngine) -> None:
        await answer(client, "one", SamplingParams(max_tokens=2))
        assert client.failure is None
        own_engine.fail(AccountingError("a page too many"))
        while client.failure is None:
            await asyncio.sleep(0.01)
        assert isinstance(client.failure, EngineFailedError)
        assert "a page too many" in str(client.failure)
        assert not client.gone.is_set()

    run(own_engine, look)


def test_a_gateway_that_comes_later_hears_of_a_failure_too(own_engine: Engine) -> None:
    async def look(client: RemoteEngine) -> None:
        while client.failure is None:
            await asyncio.sleep(0.01)
        assert str(client.failure) == str(own_engine.failure)

    own_engine.fail(AccountingError("a page too many"))
    run(own_engine, look)


def test_a_service_that_ends_leaves_nobody_waiting(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, SLOW_S)

    async def main() -> None:
        service = engine_service(own_engine)
        async with remote_engine(service.__enter__()) as client:
            stream = client.stream("one", LONG)
            await anext(stream)
            await asyncio.to_thread(service.__exit__, None, None, None)
            with pytest.raises(EngineClosedError, match="process has ended"):
                async for _ in stream:
                    pass
            assert client.gone.is_set()
            assert isinstance(client.failure, EngineClosedError)
            with pytest.raises(EngineClosedError, match="process has ended"):
                await answer(client, "one", LONG)
            with pytest.raises(EngineClosedError, match="process has ended"):
                await asyncio.to_thread(client.stats)

    asyncio.run(main())
    eventually(lambda: is_free(own_engine))


def test_a_reconfigured_engine_is_described_anew(own_engine: Engine) -> None:
    async def look(client: RemoteEngine) -> None:
        await answer(client, "one", SamplingParams(max_tokens=2))
        own_engine.reconfigure(SchedulerConfig(max_num_waiting=7))
        while client.config != own_engine.config:
            await asyncio.sleep(0.01)
        assert client.config.scheduler.max_num_waiting == 7
        assert client.stats().num_steps == 0

    run(own_engine, look)


def test_another_clock_is_refused(ascii_llama: str) -> None:
    config = EngineConfig(model=ascii_llama)
    with (
        Engine(config, clock=lambda: 0.0) as engine,
        pytest.raises(BadParameterError, match="a clock of its own"),
        engine_service(engine),
    ):
        pytest.fail("it must not be served")


def test_events_without_text_are_the_engines_part(own_engine: Engine) -> None:
    seen: list[TokenEvent] = []
    flushed: list[int] = []
    with own_engine.listening(lambda: flushed.append(len(seen))):
        for _ in range(2):
            own_engine.add("one", SamplingParams(max_tokens=3, ignore_eos=True), on_event=seen.append, detokenize=False)
        while own_engine.has_work:
            own_engine.step()
    assert [event.text for event in seen] == [""] * 6
    assert [count for count in flushed if count][:3] == [2, 4, 6]  # once a step, behind its events
    own_engine.generate(["one"], SamplingParams(max_tokens=1))
    assert max(flushed) == 6


def test_a_gateway_needs_no_torch() -> None:
    program = "import sys, p99lab.serving.gateway; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
