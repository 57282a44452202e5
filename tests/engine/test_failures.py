"""What is left when something goes wrong: in a step, in a callback, in another thread, at the keyboard."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from p99lab.engine.config import EngineConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion, TokenEvent
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.request import FinishReason, SamplingParams
from p99lab.engine.runner import ModelRunner
from p99lab.errors import EngineClosedError, EngineFailedError

PROMPTS = [list(range(1, 40)), [*range(1, 40), 5, 6], [9]]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=450, ignore_eos=True)


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, before: Callable[[], None] = lambda: None) -> None:
    """The number-th step from now on runs out of memory."""
    launch, left = ModelRunner.launch, iter(range(number - 1, -1, -1))

    def failing(self: ModelRunner, plan: Any) -> Any:
        if next(left, 1) == 0:
            before()
            raise MemoryError("no room\nfor a second line")
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", failing)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start `work`; the returned function waits for its result, or the error it raised."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        return results[0]

    return result


def test_a_failed_step_ends_every_request_and_every_later_call_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, 3)
    called: list[TokenEvent] = []
    for _ in range(2):
        engine.add(PROMPTS[0], LONG, on_event=called.append)
    engine.step()
    engine.step()
    assert engine.failure is None
    with pytest.raises(MemoryError):
        engine.step()
    assert isinstance(engine.failure, EngineFailedError)
    assert [event.finish_reason for event in called[-2:]] == [FinishReason.ERROR] * 2
    assert called[-1].usage is not None
    assert not engine.has_work
    assert not engine.cancel(called[-1].request_id)
    calls: list[Callable[[], object]] = [
        engine.step,
        engine.quiesce,
        engine.reconfigure,
        engine.check,
        lambda: engine.add([1]),
        lambda: engine.generate([[1]]),
        lambda: engine.forget_except([]),
        lambda: asyncio.run(_stream(engine)),
    ]
    for call in calls:
        with pytest.raises(EngineFailedError, match=r"^this engine has failed.*\(MemoryError: no room\)") as caught:
            call()
        assert "in failing" in caught.value.__notes__[0]  # the traceback of the step
    assert engine.stats().num_steps == 2
    engine.close()


def test_the_first_end_of_an_engine_is_the_one_that_is_told(engine: Engine, config: EngineConfig) -> None:
    for reason in ("first", "second"):
        engine.fail(LookupError(reason))
        assert "first" in str(engine.failure)
    closed = Engine(config)
    closed.close()
    closed.fail(LookupError("late"))
    assert isinstance(closed.failure, EngineClosedError)


async def _stream(engine: Engine) -> list[TokenEvent]:
    return [event async for event in engine.stream(PROMPTS[0], ENDLESS)]


def test_a_failed_step_ends_streams_and_batches_of_all_threads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, 40)

    async def streams() -> list[Any]:
        return await asyncio.gather(*(_stream(engine) for _ in range(3)), return_exceptions=True)

    batches = [in_thread(lambda: engine.generate(PROMPTS, ENDLESS)) for _ in range(2)]
    assert [type(result) for result in asyncio.run(streams())] == [EngineFailedError] * 3
    assert {type(batch()) for batch in batches} <= {EngineFailedError, MemoryError}


def test_closing_ends_the_batches_of_other_threads(engine: Engine) -> None:
    started = threading.Event()
    engine.add([1], ENDLESS, on_event=lambda event: started.set())
    batches = [in_thread(lambda: engine.generate(PROMPTS, ENDLESS)) for _ in range(2)]
    assert started.wait(60)
    engine.close()
    assert [type(batch()) for batch in batches] == [EngineClosedError] * 2
    assert isinstance(engine.failure, EngineClosedError)
    engine.close()
    for call in (engine.step, engine.quiesce, lambda: engine.add([1]), lambda: engine.generate([[1]])):
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            call()


@pytest.mark.parametrize("failed", [False, True])
def test_the_pool_is_given_up_though_the_engine_is_still_named(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []

    def allocate(*args: Any) -> KVPool:
        shape = (2, 200, 4, 2, 8)
        pool = KVPool(torch.zeros(shape), torch.zeros(shape))
        tensors.extend((weakref.ref(pool.k), weakref.ref(pool.v)))
        return pool

    monkeypatch.setattr(KVPool, "allocate", allocate)
    engine = Engine(config)
    engine.generate([PROMPTS[0]], LONG)
    if failed:
        fail_at(monkeypatch, 1)
        with pytest.raises(MemoryError):
            engine.generate([PROMPTS[0]], LONG)
    else:
        engine.close()
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]
    assert engine.stats().num_queries >= 1


def test_a_callback_that_raises_loses_its_own_request_only(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    seen = Completion("good")

    def bad(event: TokenEvent) -> None:
        if event.finish_reason is None:
            raise ZeroDivisionError

    engine.add(PROMPTS[0], LONG, request_id="bad", on_event=bad)
    engine.add(PROMPTS[1], LONG, on_event=seen.add)
    while engine.has_work:
        engine.step()
    assert len(seen.token_ids) == 20
    assert [record.message for record in caplog.records] == ["on_event of 'bad' has raised: the request is cancelled"]
    engine.check()


def test_a_callback_may_cancel_add_step_and_generate(engine: Engine) -> None:
    order: list[tuple[str, FinishReason | None]] = []
    inner: list[Completion] = []

    def first(event: TokenEvent) -> None:
        order.append(("first", event.finish_reason))
        if len(order) == 1:
            engine.cancel("second")  # which has sampled a token in the same step
            engine.add([7], SamplingParams(max_tokens=2, ignore_eos=True), on_event=lambda event: None)
            engine.step()
            inner.extend(engine.generate([PROMPTS[0]], LONG))

    def second(event: TokenEvent) -> None:
        order.append(("second", event.finish_reason))

    engine.add([1], SamplingParams(max_tokens=3, ignore_eos=True), on_event=first)
    engine.add([1, 2], LONG, request_id="second", on_event=second)
    while engine.has_work:
        engine.step()
    engine.check()
    assert [reason for name, reason in order if name == "second"] == [None, FinishReason.CANCELLED]
    assert [reason for name, reason in order if name == "first"] == [None, None, FinishReason.LENGTH]
    assert inner[0].token_ids == engine.generate([PROMPTS[0]], LONG)[0].token_ids


def test_a_callback_may_close_the_engine(engine: Engine) -> None:
    reasons: list[FinishReason | None] = []

    def close(event: TokenEvent) -> None:
        reasons.append(event.finish_reason)
        engine.close()

    engine.add([1], LONG, on_event=close)
    with pytest.raises(EngineClosedError):
        engine.generate([PROMPTS[0]], LONG)
    assert reasons == [None, FinishReason.ERROR]


@pytest.mark.parametrize("number", [1, 3, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_batch_is_cancelled_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int, overlap: bool
) -> None:
    engine.reconfigure(SchedulerConfig(overlap=overlap))
    expected = [completion.token_ids for completion in engine.generate(PROMPTS, LONG)]
    launch, left = ModelRunner.launch, iter(range(number - 1, -1, -1))

    def interrupted(self: ModelRunner, plan: Any) -> Any:
        if next(left, 1) == 0:
            signal.raise_signal(signal.SIGINT)
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, LONG)
    assert not engine.has_work
    engine.check()
    assert engine.stats().num_active_pages == 0
    assert [completion.token_ids for completion in engine.generate(PROMPTS, LONG)] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_loop_loses_no_event(engine: Engine, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    engine.reconfigure(SchedulerConfig(overlap=overlap))
    expected = engine.generate([PROMPTS[0]], LONG)[0].token_ids
    launch = ModelRunner.launch

    def interrupted(self: ModelRunner, plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    engine.add(PROMPTS[0], LONG)
    token_ids: list[int | None] = []
    num_interrupts = 0
    while engine.has_work:
        try:
            token_ids += [event.token_id for event in engine.step()]
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 20
    assert token_ids == expected


def test_a_forked_process_is_told_to_make_its_own(engine: Engine) -> None:
    engine.generate([PROMPTS[0]], LONG)
    child = os.fork()
    if child == 0:
        try:
            engine.generate([PROMPTS[0]], LONG)
        except EngineClosedError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.generate([PROMPTS[0]], LONG)
