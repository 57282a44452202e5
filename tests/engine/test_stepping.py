"""Streams: many clients, clients that leave, and who keeps whom alive."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest

from p99lab.engine import stepping
from p99lab.engine.config import EngineConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.pipeline import Pipeline
from p99lab.engine.plan import InFlight, StepPlan
from p99lab.engine.request import FinishReason, SamplingParams
from p99lab.engine.runner import ModelRunner
from p99lab.errors import AccountingError, BadParameterError, EngineClosedError, EngineFailedError, QueueFullError

PROMPTS = [list(range(1, 40)), [*range(1, 40), 5, 6], [9]]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=450, ignore_eos=True)
PATIENCE_S = 30.0


async def answer(engine: Engine, prompt: Sequence[int], sampling: SamplingParams = LONG) -> list[int | None]:
    return [event.token_id async for event in engine.stream(prompt, sampling)]


async def answers(engine: Engine) -> list[list[int | None]]:
    return await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS))


def soon(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within our patience."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.01)
    return condition()


class Gate:
    """Holds a step inside the model until it is opened."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entered = 0
        self._open_until = 0.0  # the first step that has to wait

    def enter(self) -> None:
        with self._changed:
            self._entered += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._entered < self._open_until, PATIENCE_S)

    def wait_for_step(self, number: int) -> None:
        """Return once that step has begun, which does not end before `open`."""
        with self._changed:
            self._open_until = number
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._entered >= number, PATIENCE_S)

    def open(self, until_step: float = math.inf) -> None:
        with self._changed:
            self._open_until = until_step
            self._changed.notify_all()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, launch = Gate(), ModelRunner.launch

    def held(self: ModelRunner, plan: StepPlan) -> InFlight:
        gate.enter()
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", held)
    return gate


def step_loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "p99lab-step-loop"}


def test_streams_of_many_clients_equal_a_batch(engine: Engine) -> None:
    expected = [completion.token_ids for completion in engine.generate(PROMPTS, LONG)]
    assert asyncio.run(answers(engine)) == expected
    assert asyncio.run(answers(engine)) == expected  # a second event loop over the same engine


def test_two_engines_stream_in_one_event_loop(config: EngineConfig, engine: Engine) -> None:
    async def both(other: Engine) -> list[list[list[int | None]]]:
        return await asyncio.gather(answers(engine), answers(other))

    with Engine(config) as other:
        first, second = asyncio.run(both(other))
    assert first == second


@pytest.mark.parametrize("num_seen", [1, 7])
def test_a_client_that_leaves_gives_its_pages_back(engine: Engine, num_seen: int) -> None:
    async def leave() -> None:
        async with aclosing(engine.stream(PROMPTS[0], ENDLESS)) as events:
            for _ in range(num_seen):
                await anext(events)

    asyncio.run(leave())
    assert soon(lambda: not engine.has_work)
    assert engine.stats().num_active_pages == 0
    assert engine.stats().num_steps < ENDLESS.max_tokens


def test_a_client_that_leaves_in_mid_prompt_is_computed_no_further(config: EngineConfig, gate: Gate) -> None:
    config = config.model_copy(update={"scheduler": SchedulerConfig(max_num_batched_tokens=2)})

    async def leave(engine: Engine) -> None:
        task = asyncio.create_task(answer(engine, PROMPTS[0], ENDLESS))
        await asyncio.to_thread(gate.wait_for_step, 3)  # of twenty that the prompt takes
        assert engine.stats().num_active_pages > 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.open()

    with Engine(config) as engine:
        asyncio.run(leave(engine))
        assert soon(lambda: not engine.has_work)
        assert engine.stats().num_steps == 3  # the one it left in was the last
        assert engine.stats().num_active_pages == 0
        engine.check()


def test_a_client_that_leaves_the_queue_makes_room_in_it(config: EngineConfig, gate: Gate) -> None:
    config = config.model_copy(update={"scheduler": SchedulerConfig(max_num_seqs=1, max_num_waiting=2)})

    async def run(engine: Engine) -> list[list[int | None]]:
        running = asyncio.create_task(answer(engine, PROMPTS[0]))
        await asyncio.to_thread(gate.wait_for_step, 1)
        leaving, staying, refused = (asyncio.create_task(answer(engine, PROMPTS[0])) for _ in range(3))
        gate.open(until_step=2)
        with pytest.raises(QueueFullError, match="2 requests wait"):
            await refused
        await asyncio.to_thread(gate.wait_for_step, 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        late = asyncio.create_task(answer(engine, PROMPTS[0]))
        await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(running, staying, late)

    with Engine(config) as engine:
        answers = asyncio.run(run(engine))
        assert answers[1:] == answers[:-1]
        assert engine.stats().num_active_pages == 0
        engine.check()


def test_of_many_clients_half_leave_and_the_others_do_not_notice(engine: Engine) -> None:
    expected = engine.generate([PROMPTS[0]], LONG)[0].token_ids
    engine.reconfigure(SchedulerConfig(max_num_batched_tokens=7), prefix_cache=False)
    engine.forget_except([])

    async def leave(num_seen: int) -> None:
        async with aclosing(engine.stream(PROMPTS[0], ENDLESS)) as events:
            for _ in range(num_seen):
                await anext(events)

    async def run() -> list[list[int | None]]:
        _, stayed = await asyncio.gather(
            asyncio.gather(*(leave(num_seen) for num_seen in range(1, 6))),
            asyncio.gather(*(answer(engine, PROMPTS[0]) for _ in range(5))),
        )
        return stayed

    assert asyncio.run(run()) == [expected] * 5
    assert soon(lambda: not engine.has_work)
    assert engine.stats().num_free_pages == 200


def test_a_client_may_be_cancelled_before_its_first_token(engine: Engine) -> None:
    async def give_up() -> None:
        tasks = [asyncio.create_task(answer(engine, PROMPTS[0], ENDLESS)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    asyncio.run(give_up())
    engine.quiesce()
    assert engine.stats().num_active_pages == 0


def test_a_client_whose_event_loop_is_closed_under_it_has_left(engine: Engine) -> None:
    loop = asyncio.new_event_loop()
    events = engine.stream(PROMPTS[0], ENDLESS)
    loop.run_until_complete(anext(events))
    loop.close()
    assert soon(lambda: not engine.has_work)
    assert engine.stats().num_steps < ENDLESS.max_tokens


def test_a_wrong_request_ends_its_own_stream_only(engine: Engine) -> None:
    async def both() -> list[list[int | None] | BaseException]:
        wrong, right = answer(engine, [10**6]), answer(engine, PROMPTS[0])
        return await asyncio.gather(wrong, right, answer(engine, [1] * 500), return_exceptions=True)

    wrong, right, too_long = asyncio.run(both())
    assert isinstance(wrong, BadParameterError)
    assert isinstance(too_long, BadParameterError)
    assert isinstance(right, list)
    assert len(right) == 20


def test_a_stream_cancelled_from_another_thread_ends_with_an_event(engine: Engine) -> None:
    """Soon, however short the steps are between which the lock is free for a moment."""

    async def run(request_id: str) -> FinishReason | None:
        events = engine.stream(PROMPTS[0], ENDLESS, request_id=request_id)
        await anext(events)
        assert await asyncio.to_thread(engine.cancel, request_id)
        return [event async for event in events][-1].finish_reason

    for number in range(12):
        assert asyncio.run(run(f"victim {number}")) is FinishReason.CANCELLED


def test_quiescing_ends_also_what_was_submitted_a_moment_before(engine: Engine) -> None:
    async def run() -> list[list[int | None]]:
        tasks = [asyncio.create_task(answer(engine, PROMPTS[0], ENDLESS)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.quiesce)
        assert not engine.has_work
        return await asyncio.gather(*tasks)

    assert all(tokens[-1] is None for tokens in asyncio.run(run()))


def test_closing_ends_open_streams_with_an_error_and_new_ones_at_once(config: EngineConfig) -> None:
    others = step_loops()

    async def run() -> list[list[int | None] | BaseException]:
        engine = Engine(config)
        tasks = [asyncio.create_task(answer(engine, prompt, ENDLESS)) for prompt in PROMPTS]
        events = engine.stream(PROMPTS[0], ENDLESS)
        await anext(events)
        late = asyncio.create_task(answer(engine, PROMPTS[0], ENDLESS))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosedError):
            async for _ in events:
                pass
        return await asyncio.gather(*tasks, late, answer(engine, PROMPTS[0]), return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [EngineClosedError] * 5
    assert soon(lambda: step_loops() <= others)


def test_an_engine_that_nobody_holds_goes_and_its_thread_with_it(config: EngineConfig) -> None:
    others = step_loops()
    engine = Engine(config)
    asyncio.run(answers(engine))
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert soon(lambda: reference() is None)
    assert soon(lambda: step_loops() <= others)


PROGRAM = """
import asyncio, sys
from p99lab.engine.config import CacheConfig, EngineConfig
from p99lab.engine.engine import Engine
from p99lab.engine.request import SamplingParams

engine = Engine(EngineConfig(model=sys.argv[1], cache=CacheConfig(page_size=4, num_pages=2000)))

async def run():
    for _ in range(10):
        kept.append(engine.stream(list(range(1, 40)), SamplingParams(max_tokens=450, ignore_eos=True)))
        await anext(kept[-1])

kept = []
asyncio.new_event_loop().run_until_complete(run())
"""


def test_a_program_may_end_in_the_middle_of_a_stream(tiny_llama: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, tiny_llama], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_a_stream_beside_a_step_loop_leaves_it_its_events(engine: Engine) -> None:
    expected = engine.generate([PROMPTS[0]], LONG)[0].token_ids
    request_id = engine.add(PROMPTS[0], LONG)
    asyncio.run(answers(engine))
    tokens = []
    while engine.has_work:
        tokens += [event.token_id for event in engine.step() if event.request_id == request_id]
    assert tokens == expected


def test_broken_accounts_found_between_steps_end_every_stream(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(*_: object) -> None:
        raise AccountingError("pages do not add up")

    async def run() -> list[int | BaseException]:
        staying = asyncio.ensure_future(answer(engine, PROMPTS[0], ENDLESS))
        leaving = engine.stream(PROMPTS[1], ENDLESS)
        await anext(leaving)
        monkeypatch.setattr(engine, "cancel", uneven)
        await leaving.aclose()
        return await asyncio.gather(staying, return_exceptions=True)

    (failure,) = asyncio.run(run())
    assert isinstance(failure, EngineFailedError)
    assert "pages do not add up" in str(failure)
    with pytest.raises(EngineFailedError):
        engine.add(PROMPTS[0], LONG)


def broken(*_: object) -> None:
    raise LookupError("a bug")


def test_a_bug_between_steps_ends_every_stream(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loop itself, and not of a command or a step: nobody else would tell the clients."""
    monkeypatch.setattr(Pipeline, "spare_s", property(broken))

    async def run() -> list[list[int | None] | BaseException]:
        streams = asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS), return_exceptions=True)
        return await asyncio.wait_for(streams, PATIENCE_S)

    failures = asyncio.run(run())
    assert [type(failure) for failure in failures] == [EngineFailedError] * 3
    assert "LookupError: a bug" in str(failures[0])
    assert "in broken" in failures[0].__notes__[0]  # type: ignore[union-attr]
    assert not engine.has_work
    with pytest.raises(EngineFailedError, match="a bug"):
        engine.generate(PROMPTS, LONG)


def test_a_bug_found_by_an_idle_loop_is_told_to_the_next_client(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(answers(engine))
    monkeypatch.setattr(engine, "check", broken)
    monkeypatch.setattr(stepping, "IDLE_CHECK_S", 0.0)
    assert soon(lambda: engine.failure is not None)
    with pytest.raises(EngineFailedError, match="LookupError: a bug"):
        asyncio.run(answer(engine, PROMPTS[0]))
    assert step_loops()  # whose commands are refused one by one


def test_an_idle_loop_proves_its_accounts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bool] = []
    monkeypatch.setattr(stepping, "IDLE_CHECK_S", 0.0)
    monkeypatch.setattr(engine, "check", lambda: checks.append(engine.has_requests))
    asyncio.run(answers(engine))
    assert soon(lambda: bool(checks))
    time.sleep(3 * stepping.POLL_S)
    assert checks == [False]  # once, and not while there was work
