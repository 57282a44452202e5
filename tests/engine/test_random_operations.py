"""Whatever callers do to an engine, in whatever order: accounts add up, and every answer is its prompt's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.request import FinishReason, SamplingParams
from tests.engine.tiny_models import transformers_greedy

NUM_TOKENS = 16
NUM_OPERATIONS = 400
Tokens = tuple[int, ...]


def _prompts() -> list[Tokens]:
    """Documents with questions, beginnings of each other, and strangers."""
    rng = np.random.default_rng(11)
    document = rng.integers(0, 127, 37).tolist()
    beginnings = [document[:n] for n in (1, 4, 16, 17, 37)]
    questions = [[*document[:n], *rng.integers(0, 127, m).tolist()] for n, m in ((16, 3), (18, 1), (37, 6), (37, 2))]
    strangers = [rng.integers(0, 127, n).tolist() for n in (2, 9, 30)]
    return [tuple(prompt) for prompt in (*beginnings, *questions, *strangers)]


@pytest.fixture(scope="module")
def expected(tiny_llama: str) -> dict[Tokens, list[int]]:
    prompts = _prompts()
    answers = transformers_greedy(Path(tiny_llama), [list(prompt) for prompt in prompts], NUM_TOKENS)
    return {prompt: answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)}


class Session:
    """A random caller. Streams run in the engine's own thread beside the steps that are made here."""

    def __init__(self, engine: Engine, expected: dict[Tokens, list[int]], seed: int) -> None:
        self.engine = engine
        self.expected = expected
        self.rng = np.random.default_rng(seed)
        self.asked: list[tuple[Tokens, int, Completion]] = []
        self.streams: list[asyncio.Task[None]] = []
        self.operations: list[Callable[[], object]] = [
            *[self.add] * 6,
            *[self.step] * 12,
            *[self.stream] * 2,
            *[self.cancel] * 2,
            self.generate,
            self.reconfigure,
            self.forget,
            self.quiesce,
        ]

    async def run(self) -> None:
        for _ in range(NUM_OPERATIONS):
            self.operations[self.rng.integers(len(self.operations))]()
            self.engine.check()
            if self.rng.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.gather(*self.streams)
        while self.engine.has_work:
            self.step()
            self.engine.check()

    def check_answers(self) -> int:
        """How many were answered to the end."""
        for prompt, num_tokens, completion in self.asked:
            answer = self.expected[prompt][:num_tokens]
            if completion.finish_reason is FinishReason.CANCELLED:
                answer = answer[: len(completion.token_ids)]
            else:
                assert completion.finish_reason is FinishReason.LENGTH
            assert completion.token_ids == answer
        return sum(completion.finish_reason is FinishReason.LENGTH for _, _, completion in self.asked)

    def ask(self) -> tuple[Tokens, SamplingParams, Completion]:
        prompt = list(self.expected)[self.rng.integers(len(self.expected))]
        num_tokens = int(self.rng.integers(1, NUM_TOKENS + 1))
        completion = Completion(f"asked-{len(self.asked)}")
        self.asked.append((prompt, num_tokens, completion))
        return prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), completion

    def add(self) -> None:
        prompt, sampling, completion = self.ask()
        priority, name = int(self.rng.integers(3)), completion.request_id
        self.engine.add(prompt, sampling, request_id=name, priority=priority, on_event=completion.add)

    def step(self) -> None:
        assert self.engine.step() == []

    def stream(self) -> None:
        prompt, sampling, completion = self.ask()
        patience = int(self.rng.integers(1, 2 * NUM_TOKENS))

        async def client() -> None:
            events = self.engine.stream(prompt, sampling, request_id=completion.request_id)
            async for event in events:
                completion.add(event)
                if len(completion.token_ids) == patience and event.finish_reason is None:
                    completion.finish_reason = FinishReason.CANCELLED
                    break
            await events.aclose()

        self.streams.append(asyncio.create_task(client()))

    def cancel(self) -> None:
        if self.asked:
            self.engine.cancel(f"asked-{self.rng.integers(len(self.asked))}")

    def generate(self) -> None:
        batch = [self.ask() for _ in range(int(self.rng.integers(1, 4)))]
        prompts, sampling, mine = zip(*batch, strict=True)
        for completion, result in zip(mine, self.engine.generate(prompts, sampling), strict=True):
            completion.token_ids, completion.finish_reason = result.token_ids, result.finish_reason

    def reconfigure(self) -> None:
        rng = self.rng
        scheduler = SchedulerConfig(
            composition=str(rng.choice(["chunked", "stock"])),  # type: ignore[arg-type]
            policy=str(rng.choice(["fcfs", "priority", "deadline"])),  # type: ignore[arg-type]
            max_num_batched_tokens=int(rng.choice([1, 5, 23, 200])),
            max_num_seqs=int(rng.choice([1, 3, 8])),
            overlap=bool(rng.random() < 0.5),
        )
        grouping = GroupingConfig(
            decide_by="length", enabled=bool(rng.random() < 0.7), min_shared_tokens=int(rng.choice([1, 8]))
        )
        if not self.engine.has_work:
            try:
                self.engine.reconfigure(scheduler, grouping, prefix_cache=bool(rng.random() < 0.8))
            except RuntimeError:  # a stream came in between
                assert self.streams

    def forget(self) -> None:
        kept = list(self.expected)[self.rng.integers(len(self.expected))]
        self.engine.forget_except([np.array(kept, np.int32)] if self.rng.random() < 0.5 else [])

    def quiesce(self) -> None:
        if self.rng.random() < 0.3:
            self.engine.quiesce()


@pytest.mark.parametrize("seed", range(6))
def test_random_operations(tiny_llama: str, expected: dict[Tokens, list[int]], seed: int) -> None:
    page_size = (1, 2, 4, 16)[seed % 4]
    cache = CacheConfig(page_size=page_size, num_pages=-(-90 // page_size))  # one always fits, a few at once do not
    scheduler, grouping = (
        SchedulerConfig(overlap=seed % 2 == 0),
        GroupingConfig(decide_by="length", min_shared_tokens=1),
    )
    with Engine(EngineConfig(model=tiny_llama, cache=cache, scheduler=scheduler, grouping=grouping)) as engine:
        session = Session(engine, expected, seed)
        asyncio.run(session.run())
        assert session.check_answers() > NUM_OPERATIONS // 10
        assert engine.stats().num_active_pages == 0
