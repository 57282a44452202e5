"""The engine's surface: batches, loops, streams, cancelling, accounts of time and pages."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import numpy as np
import pytest
from tests.engine.tiny_models import save_tiny_model

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.request import FinishReason, SamplingParams
from p99lab.errors import BadParameterError, EngineClosedError

PROMPTS = [list(range(1, 40)), [*range(1, 40), 5, 6], [9]]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", path)
    return str(path)


@pytest.fixture
def config(directory: str) -> EngineConfig:
    return EngineConfig(model=directory, cache=CacheConfig(page_size=4, num_pages=200))


@pytest.fixture
def engine(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config) as engine:
        yield engine


def test_two_engines_in_one_process_answer_alike_and_share_nothing(config: EngineConfig, engine: Engine) -> None:
    with Engine(config) as other:
        assert engine.generate(PROMPTS, LONG)[0].token_ids == other.generate(PROMPTS, LONG)[0].token_ids
        engine.forget_except([])
        assert engine.stats().num_cached_pages == 0
        assert other.stats().num_cached_pages > 0


def test_step_and_generate_agree(engine: Engine) -> None:
    expected = engine.generate(PROMPTS, LONG)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for event in engine.step():
            assert event.token_id is not None
            tokens[event.request_id].append(event.token_id)
    assert [tokens[request_id] for request_id in ids] == [completion.token_ids for completion in expected]
    assert engine.step() == []


def test_seeded_sampling_does_not_depend_on_the_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    alone = engine.generate([PROMPTS[0]], params)[0].token_ids
    beside = engine.generate([PROMPTS[2], PROMPTS[0], PROMPTS[1]], [LONG, params, LONG])[1].token_ids
    assert beside == alone
    assert engine.generate([PROMPTS[0]], SamplingParams(max_tokens=12, temperature=1.0, seed=4))[0].token_ids != alone


def test_generation_ends_at_the_models_eos_or_a_stop_id_unless_ignored(engine: Engine) -> None:
    free = engine.generate([PROMPTS[0]], LONG)[0].token_ids
    stop_id = free[7]
    stopped = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop_id,)))
    assert stopped[0].token_ids == free[: free.index(stop_id) + 1]
    assert stopped[0].finish_reason is FinishReason.STOP
    assert engine.generate([PROMPTS[0]], LONG)[0].finish_reason is FinishReason.LENGTH


def test_streams_of_many_clients_equal_a_batch(engine: Engine) -> None:
    expected = [completion.token_ids for completion in engine.generate(PROMPTS, LONG)]

    async def client(prompt: list[int]) -> list[int | None]:
        return [event.token_id async for event in engine.stream(prompt, LONG)]

    async def clients() -> list[list[int | None]]:
        return await asyncio.gather(*(client(prompt) for prompt in PROMPTS))

    assert asyncio.run(clients()) == expected
    assert asyncio.run(clients()) == expected  # a second event loop over the same engine


def test_a_client_that_leaves_gives_its_pages_back(engine: Engine) -> None:
    async def leave() -> None:
        async with aclosing(engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))) as events:
            async for _ in events:
                break
        for _ in range(1000):
            if not engine.has_work:
                return
            await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert not engine.has_work
    assert engine.stats().num_active_pages == 0


def test_a_wrong_request_ends_its_own_stream_only(engine: Engine) -> None:
    async def one(prompt: list[int]) -> int:
        return len([event async for event in engine.stream(prompt, LONG)])

    async def both() -> list[int | BaseException]:
        return await asyncio.gather(one([10**6]), one(PROMPTS[0]), return_exceptions=True)

    wrong, right = asyncio.run(both())
    assert isinstance(wrong, BadParameterError)
    assert right == 20


def test_closing_the_engine_ends_open_streams_with_an_error(config: EngineConfig) -> None:
    async def run() -> None:
        engine = Engine(config)
        events = engine.stream(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(events)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosedError):
            async for _ in events:
                pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], LONG, "at least one token"),
        ([1, 128], LONG, "token id 128 is outside the vocabulary of 128"),
        ([-1], LONG, "token id -1"),
        ([1] * 500, LONG, "500 prompt tokens and 20 to generate exceed the model's 512"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(engine: Engine, prompt, params, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        engine.add(prompt, params)
    assert not engine.has_work


def test_a_batch_with_a_wrong_prompt_runs_nothing(engine: Engine) -> None:
    with pytest.raises(BadParameterError):
        engine.generate([PROMPTS[0], [128]], LONG)
    assert not engine.has_work
    assert engine.stats().num_steps == 0


def test_cancelled_requests_end_with_an_event_and_without_pages(engine: Engine) -> None:
    running, waiting = engine.add(PROMPTS[0], LONG), None
    engine.step()
    waiting = engine.add(PROMPTS[1], LONG)
    assert engine.cancel(waiting)
    assert engine.cancel(running)
    assert not engine.cancel(running)
    events = engine.step()
    assert {event.request_id: event.finish_reason for event in events} == dict.fromkeys(
        (running, waiting), FinishReason.CANCELLED
    )
    assert engine.stats().num_active_pages == 0


class Clock:
    """Advances by one second whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize("composition", ["chunked", "stock"])
@pytest.mark.parametrize("num_pages", [30, 200])
def test_every_moment_of_a_request_is_accounted_for(directory: str, composition, num_pages: int) -> None:
    config = EngineConfig(
        model=directory,
        cache=CacheConfig(page_size=4, num_pages=num_pages, prefix_cache=False),
        scheduler=SchedulerConfig(composition=composition, max_num_batched_tokens=16),
    )
    with Engine(config, clock=Clock()) as engine:
        completions = engine.generate(PROMPTS, LONG)
    stalled = 0.0
    for completion in completions:
        assert completion.usage is not None
        timeline = completion.usage.timeline
        assert timeline.admitted_s is not None
        assert timeline.first_token_s is not None
        assert timeline.finished_s is not None
        shares = (timeline.queue_s, timeline.prefill_s, timeline.decode_s, timeline.stalled_s, timeline.scheduling_s)
        assert sum(shares) == timeline.finished_s - timeline.arrival_s
        assert min(shares) >= 0.0
        assert timeline.arrival_s < timeline.admitted_s < timeline.first_token_s < timeline.finished_s
        stalled += timeline.stalled_s
    assert any(completion.usage.timeline.num_preemptions for completion in completions) == (num_pages == 30)
    assert (stalled > 0.0) == (composition == "stock")  # whose prompts make decode rows wait


def test_reconfiguring_keeps_cached_pages_and_forgetting_spares_what_is_named(engine: Engine) -> None:
    document = np.arange(1, 38, dtype=np.int32)
    engine.generate([document, [100] * 21], LONG)
    engine.reconfigure(SchedulerConfig(composition="stock"), GroupingConfig(enabled=False))
    engine.forget_except([document])
    completion = engine.generate([[*document.tolist(), 3, 4]], LONG)[0]
    assert completion.usage is not None
    assert completion.usage.num_cached_tokens == len(document)
    fresh = engine.generate([[100] * 21], LONG)[0]
    assert fresh.usage is not None
    assert fresh.usage.num_cached_tokens == 0


def test_a_busy_engine_is_not_reconfigured(engine: Engine) -> None:
    engine.add(PROMPTS[0], LONG)
    with pytest.raises(RuntimeError, match="no requests"):
        engine.reconfigure(SchedulerConfig())


def test_the_prefix_cache_can_be_switched_off_and_on_again(engine: Engine) -> None:
    engine.generate([PROMPTS[0]], LONG)
    engine.reconfigure(prefix_cache=False)
    off = engine.generate([PROMPTS[1]], LONG)[0].usage
    engine.reconfigure(prefix_cache=True)
    on = engine.generate([PROMPTS[1]], LONG)[0].usage
    assert off is not None
    assert on is not None
    assert (off.num_cached_tokens, on.num_cached_tokens) == (0, 39)


def test_configuration_round_trips_and_refuses_what_it_does_not_know(config: EngineConfig) -> None:
    assert EngineConfig.parse(config.model_dump()) == config
    with pytest.raises(BadParameterError, match=r"unknown parameter 'scheduler.polcy'; did you mean 'policy'\?"):
        EngineConfig.parse({"model": "x", "scheduler": {"polcy": "fcfs"}})
