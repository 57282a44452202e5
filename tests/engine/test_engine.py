"""The engine's surface: batches, loops, limits, cancelling, reconfiguring, accounts of time and pages."""

import numpy as np
import pytest

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, ModelConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.request import FinishReason, SamplingParams
from p99lab.engine.scheduler import RequestTooLargeError
from p99lab.errors import BadParameterError, QueueFullError

PROMPTS = [list(range(1, 40)), [*range(1, 40), 5, 6], [9]]
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


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


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], LONG, "at least one token"),
        ([1, 128], LONG, "token id 128 is outside the vocabulary of 128"),
        ([-1], LONG, "token id -1"),
        ([1] * 500, LONG, "500 prompt tokens and 20 to generate exceed the model's 512"),
        ([1], SamplingParams(logprobs=200), "logprobs=200 exceeds the vocabulary of 128"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(engine: Engine, prompt, params, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        engine.add(prompt, params)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([PROMPTS[0], [128]], LONG, "outside the vocabulary"),
        ([PROMPTS[0], [1] * 500], LONG, "exceed"),
        ([[1], [2]], [LONG], "2 prompts with 1 samplings"),
        ("one text", LONG, "a list of prompts"),
    ],
)
def test_a_batch_with_something_wrong_runs_nothing(engine: Engine, prompts, sampling, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        engine.generate(prompts, sampling)
    assert not engine.has_work
    assert engine.stats().num_steps == 0


def test_a_full_queue_refuses_newcomers_and_keeps_what_it_has(engine: Engine) -> None:
    engine.reconfigure(SchedulerConfig(max_num_waiting=2, max_num_seqs=1))
    first, second = engine.add(PROMPTS[0], LONG), engine.add(PROMPTS[1], LONG)
    with pytest.raises(QueueFullError, match="the queue is full: 2 requests wait already"):
        engine.add(PROMPTS[2], LONG, request_id="third")
    assert not engine.cancel("third")
    assert engine.stats().num_waiting == 2
    with pytest.raises(QueueFullError):
        engine.generate(PROMPTS, LONG)
    engine.step()
    third = engine.add(PROMPTS[2], LONG, request_id="third")  # the first has been let in
    finished = set()
    while engine.has_work:
        finished |= {event.request_id for event in engine.step() if event.finish_reason is FinishReason.LENGTH}
    assert finished == {first, second, third}


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


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("num_tokens", [63, 64, 65])
def test_prompts_may_end_on_page_boundaries(engine: Engine, tiny_llama: str, page_size: int, num_tokens: int) -> None:
    prompts = [list(range(1, 1 + num_tokens)), list(range(1, 1 + num_tokens)), [*range(1, 65), 9]]
    cache = CacheConfig(page_size=page_size, num_pages=300)
    grouping = GroupingConfig(decide_by="length", min_shared_tokens=1)
    with Engine(EngineConfig(model=tiny_llama, cache=cache, grouping=grouping)) as other:
        for _ in range(2):
            assert _tokens(other, prompts) == _tokens(engine, prompts)
        other.check()


def _tokens(engine: Engine, prompts: list[list[int]], num_tokens: int = 6) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [completion.token_ids for completion in engine.generate(prompts, params)]


@pytest.mark.parametrize(
    "scheduler",
    [
        SchedulerConfig(max_num_batched_tokens=1),
        SchedulerConfig(max_num_seqs=1),
        SchedulerConfig(composition="stock", max_num_batched_tokens=8),
        SchedulerConfig(policy="priority", max_num_batched_tokens=7, max_num_seqs=2),
        SchedulerConfig(overlap=True, max_num_batched_tokens=1),
        SchedulerConfig(overlap=True, max_num_seqs=1),
    ],
    ids=str,
)
def test_the_narrowest_schedules_give_the_same_tokens(engine: Engine, scheduler: SchedulerConfig) -> None:
    expected = _tokens(engine, PROMPTS)
    engine.forget_except([])
    engine.reconfigure(scheduler)
    assert _tokens(engine, PROMPTS) == expected


def test_the_models_last_position_can_be_used_and_no_more(engine: Engine) -> None:
    assert len(_tokens(engine, [[1] * 511], 1)[0]) == 1
    assert len(_tokens(engine, [[1] * 100], 412)[0]) == 412
    with pytest.raises(BadParameterError, match="exceed the model's 512"):
        _tokens(engine, [[1] * 512], 1)


def test_a_request_may_fill_the_pool_to_its_last_slot(tiny_llama: str) -> None:
    with Engine(EngineConfig(model=tiny_llama, cache=CacheConfig(page_size=4, num_pages=2))) as engine:
        assert len(_tokens(engine, [[1, 2, 3]], 6)[0]) == 6  # the last token sampled needs no slot
        assert len(_tokens(engine, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 4)[1]) == 4
        with pytest.raises(RequestTooLargeError, match="needs 3 pages of 4 tokens, the pool has 2"):
            engine.add([1, 2, 3], SamplingParams(max_tokens=7))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("min_shared_tokens", [4, 10**6])
def test_half_precision_stays_near_single(engine: Engine, tiny_llama: str, dtype, min_shared_tokens: int) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0)
    config = EngineConfig(
        model=ModelConfig(name=tiny_llama, dtype=dtype),
        cache=CacheConfig(page_size=4, num_pages=200),
        scheduler=SchedulerConfig(max_num_batched_tokens=16),
        grouping=GroupingConfig(decide_by="length", min_shared_tokens=min_shared_tokens),
    )
    with Engine(config) as half:
        for _ in range(2):
            for ours, single in zip(half.generate(PROMPTS, params), engine.generate(PROMPTS, params), strict=True):
                first, expected = ours.logprobs[0].chosen, single.logprobs[0].chosen
                assert first == pytest.approx(expected, abs=0.1 if dtype == "bfloat16" else 0.02)


def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    free = engine.generate([PROMPTS[0]], LONG)[0]
    words = free.text.split()
    stop = f"{words[6]} {words[7]}"
    stopped = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,)))[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert engine.stats().num_active_pages == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"device": "cdua"}}, "device 'cdua' cannot be used"),
        ({"cache": {"num_pages": 10**12}}, "a pool of 1000000000000 pages takes .* GiB, more than 'cpu' has"),
    ],
)
def test_what_the_machine_lacks_is_said_in_one_line(config: EngineConfig, change, message: str) -> None:
    parts = config.model_dump()
    for part, values in change.items():
        parts[part] |= values
    with pytest.raises(BadParameterError, match=message):
        Engine(EngineConfig.parse(parts))


def test_step_returns_events_of_requests_without_a_callback_only(engine: Engine) -> None:
    called: list[int | None] = []
    engine.add([1, 2], LONG, request_id="called", on_event=lambda event: called.append(event.token_id))
    engine.add([1, 2], LONG, request_id="returned")
    engine.generate([[3]], SamplingParams(max_tokens=3))  # steps for all, and takes nobody's events away
    returned = []
    while engine.has_work:
        returned += engine.step()
    assert {event.request_id for event in returned} == {"returned"}
    assert [event.token_id for event in returned] == called
    assert len(called) == 20


class Clock:
    """Advances by one second whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize("composition", ["chunked", "stock"])
@pytest.mark.parametrize("num_pages", [30, 200])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_moment_of_a_request_is_accounted_for(
    tiny_llama: str, composition, num_pages: int, overlap: bool
) -> None:
    config = EngineConfig(
        model=tiny_llama,
        cache=CacheConfig(page_size=4, num_pages=num_pages, prefix_cache=False),
        scheduler=SchedulerConfig(
            composition=composition, max_num_batched_tokens=16, overlap=overlap, reserve_tokens=0
        ),
    )
    with Engine(config, clock=Clock()) as engine:
        completions = engine.generate(PROMPTS, LONG)
        stats = engine.stats()
    assert stats.busy_s > 0.0
    assert min(stats.schedule_s, stats.launch_s, stats.wait_s, stats.update_s) >= stats.num_steps  # a second each
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
    assert stalled > 0.0 or composition == "chunked"  # whole prompts make decode rows wait, pieces only other prompts


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
