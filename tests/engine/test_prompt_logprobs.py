"""Log-probabilities of prompts are those of the plain transformers forward, however the prompts were computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p99lab.engine import runner
from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, ModelConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion, TokenEvent
from p99lab.engine.model import LlamaModel
from p99lab.engine.request import FinishReason, Logprobs, SamplingParams
from p99lab.errors import BadParameterError
from tests.engine.pairwise import pairwise
from tests.engine.tiny_models import Answer, save_tiny_model, transformers_greedy, transformers_logprobs

NUM_TOKENS = 16
NUM_TOP = 3
VOCAB = 128
FACTORS: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (3, 17, 400),
    "composition": ("chunked", "stock"),
    "prefix_cache": ("cold", "warm", "off"),
    "preempted": (True, False),
    "min_shared_tokens": (1, 12, None),  # None: no grouping
    "overlap": (True, False),
}
CASES = list(pairwise(FACTORS))


def prompts() -> list[list[int]]:
    """Two documents that begin alike, questions over them, each prompt twice, and one token alone."""
    rng = np.random.default_rng(7)
    system, first, second = (rng.integers(0, 127, n).tolist() for n in (9, 21, 30))
    questions = [rng.integers(0, 127, n).tolist() for n in (1, 6)]
    asked = [[*system, *document, *question] for document in (first, second) for question in questions]
    return [*asked, system, [7], *asked]


def asks(number: int) -> int | None:
    """Who among the prompts asks for what: nothing, the tokens' own log-probabilities, or top ones too."""
    return (None, 0, NUM_TOP)[number % 3]


class Oracle:
    """Transformers' answers to `prompts()`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answers: list[Answer] = transformers_greedy(directory, prompts(), NUM_TOKENS)
        self.logprobs: list[torch.Tensor] = transformers_logprobs(directory, prompts())

    def check(self, number: int, completion: Completion) -> None:
        assert completion.token_ids == self.answers[number].token_ids
        if asks(number) is None:
            assert completion.prompt_logprobs is None
        else:
            self.check_scores(number, completion.prompt_logprobs, asks(number))

    def check_scores(self, number: int, scores: Sequence[Logprobs | None] | None, num_top: int | None) -> None:
        prompt, expected = prompts()[number], self.logprobs[number]
        assert scores is not None
        assert len(scores) == len(prompt)
        assert scores[0] is None
        for position, score in enumerate(scores[1:], 1):
            line = expected[position - 1]
            assert score is not None
            assert score.chosen == pytest.approx(float(line[prompt[position]]), abs=1e-4)
            ids, values = [token_id for token_id, _ in score.top], [value for _, value in score.top]
            assert len(set(ids)) == num_top
            np.testing.assert_allclose(values, line.topk(len(ids)).values, atol=1e-4)
            np.testing.assert_allclose(values, line[ids], atol=1e-4)


@pytest.fixture(scope="module", params=["llama", "qwen2"])  # the others differ in nothing that matters here
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, directory)
    return Oracle(directory)


def sampling(prompt_logprobs: int | None, max_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_they_equal_transformers(oracle: Oracle, case: tuple[Any, ...]) -> None:
    chunk, composition, prefix_cache, preempted, min_shared_tokens, overlap = case
    config = EngineConfig(
        model=ModelConfig(name=str(oracle.directory)),
        cache=CacheConfig(page_size=4, num_pages=18 if preempted else 300, prefix_cache=prefix_cache != "off"),
        scheduler=SchedulerConfig(
            composition=composition, max_num_batched_tokens=chunk, overlap=overlap, reserve_tokens=0
        ),
        grouping=GroupingConfig(
            decide_by="length", enabled=min_shared_tokens is not None, min_shared_tokens=min_shared_tokens or 1
        ),
    )
    with Engine(config) as engine:
        if prefix_cache == "warm":
            engine.generate(prompts(), sampling(None))
        completions = engine.generate(prompts(), [sampling(asks(number)) for number in range(len(prompts()))])
        engine.check()
        stats = engine.stats()
    for number, completion in enumerate(completions):
        oracle.check(number, completion)
        assert completion.usage is not None
        assert completion.usage.num_cached_tokens == 0 or asks(number) is None
    assert (stats.num_preemptions > 0) == preempted
    assert prefix_cache == "cold" or (stats.num_cached_tokens > 0) == (prefix_cache == "warm")
    assert stats.num_active_pages == 0


def test_they_come_with_the_first_token_and_never_again(oracle: Oracle) -> None:
    events: list[TokenEvent] = []
    with Engine(EngineConfig(model=str(oracle.directory), cache=CacheConfig(page_size=4, num_pages=100))) as engine:
        engine.add(prompts()[0], sampling(0), on_event=events.append)
        while engine.has_work:
            engine.step()
    assert [event.token_id is not None for event in events] == [True] * NUM_TOKENS
    assert [event.prompt_logprobs is not None for event in events] == [True] + [False] * (NUM_TOKENS - 1)
    oracle.check_scores(0, events[0].prompt_logprobs, 0)


def test_a_request_of_one_token_has_them_with_its_end(oracle: Oracle) -> None:
    with Engine(EngineConfig(model=str(oracle.directory), cache=CacheConfig(page_size=4, num_pages=100))) as engine:
        (completion,) = engine.generate([prompts()[1]], sampling(NUM_TOP, max_tokens=1))
        assert completion.finish_reason is FinishReason.LENGTH
        oracle.check_scores(1, completion.prompt_logprobs, NUM_TOP)


def test_preempted_in_mid_prompt_nothing_is_scored_twice_or_left_out(oracle: Oracle) -> None:
    """The urgent request grows until the other, whose prompt is half computed, gives way."""
    config = EngineConfig(
        model=ModelConfig(name=str(oracle.directory)),
        cache=CacheConfig(page_size=4, num_pages=14),
        scheduler=SchedulerConfig(max_num_batched_tokens=3, policy="priority", reserve_tokens=0),
    )
    with Engine(config) as engine:
        scored = Completion("scored")
        engine.add([5, 6, 7, 8], sampling(None, max_tokens=20), priority=0)
        engine.add(prompts()[3], sampling(NUM_TOP, max_tokens=2), request_id="scored", priority=1, on_event=scored.add)
        while engine.has_work:
            engine.step()
            engine.check()
    assert scored.usage is not None
    assert scored.usage.timeline.num_preemptions == 1
    assert scored.usage.timeline.first_token_s is not None
    oracle.check_scores(3, scored.prompt_logprobs, NUM_TOP)


def test_logits_of_a_long_prompt_exist_a_slice_at_a_time(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, num_rows = LlamaModel.logits, []

    def counted(self: LlamaModel, hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(LlamaModel, "logits", counted)
    monkeypatch.setattr(runner, "NUM_SCORED_AT_ONCE", 16)
    with Engine(EngineConfig(model=str(oracle.directory), cache=CacheConfig(page_size=4, num_pages=100))) as engine:
        (completion,) = engine.generate([prompts()[3]], sampling(NUM_TOP, max_tokens=1))
        assert num_rows == [1, 16, 16, len(prompts()[3]) - 1 - 32]
        oracle.check_scores(3, completion.prompt_logprobs, NUM_TOP)
        num_rows.clear()
        engine.generate([prompts()[3]], sampling(None, max_tokens=2))
        assert num_rows == [1, 1]  # who does not ask does not pay


def test_a_request_cancelled_before_its_first_token_has_none(engine: Engine) -> None:
    engine.reconfigure(SchedulerConfig(max_num_batched_tokens=4))
    completion = Completion("half")
    engine.add(list(range(1, 40)), sampling(0), request_id="half", on_event=completion.add)
    engine.step()
    assert engine.cancel("half")
    assert (completion.prompt_logprobs, completion.finish_reason) == (None, FinishReason.CANCELLED)
    engine.check()


def test_what_a_scored_prompt_leaves_is_found_by_others(engine: Engine) -> None:
    prompt = list(range(1, 40))
    engine.generate([prompt], sampling(0, max_tokens=1))
    (completion,) = engine.generate([prompt], sampling(None, max_tokens=1))
    assert completion.usage is not None
    assert completion.usage.num_cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("wrong", [-1, VOCAB + 1])
def test_more_than_there_are_tokens_is_refused(engine: Engine, wrong: int) -> None:
    with pytest.raises(BadParameterError, match=f"prompt_logprobs={wrong}"):
        engine.add([1, 2], sampling(wrong))
    (completion,) = engine.generate([[1, 2]], sampling(VOCAB, max_tokens=1))
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[1] is not None
    assert sorted(token_id for token_id, _ in completion.prompt_logprobs[1].top) == list(range(VOCAB))
