"""Whatever the engine does to be fast, greedy tokens are those of the plain transformers loop."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, ModelConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.request import SamplingParams
from tests.engine.pairwise import pairs, pairwise
from tests.engine.tiny_models import ARCHITECTURES, Answer, save_tiny_model, transformers_greedy

NUM_TOKENS = 32
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
PAGE_SIZE = 4
FACTORS = {
    "max_num_batched_tokens": (3, 17, 400),
    "composition": ("chunked", "stock"),
    "prefix_cache": (True, False),
    "preempted": (True, False),
    "min_shared_tokens": (1, 12, None),  # None: no grouping
    "overlap": (True, False),
}


CASES = list(pairwise(FACTORS))


def _prompts() -> list[list[int]]:
    """Questions over two documents that begin alike and end in mid-page, one prompt within another, one token alone."""
    rng = np.random.default_rng(5)
    system, first, second = (rng.integers(0, 127, n).tolist() for n in (9, 21, 30))
    documents = [system + first, system + second]
    questions = [rng.integers(0, 127, n).tolist() for n in (1, 5, 9, 2)]
    asked = [document + question for document in documents for question in questions]
    return [*asked, documents[0], system, [7], [*documents[1], *questions[2], *questions[1]]]


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, directory)
    return directory, transformers_greedy(directory, _prompts(), NUM_TOKENS)


def test_the_cases_cover_every_pair() -> None:
    seen = set().union(*(pairs(case) for case in CASES))
    assert seen == {pair for combination in itertools.product(*FACTORS.values()) for pair in pairs(combination)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_greedy_tokens_equal_transformers(tiny_model: tuple[Path, list[Answer]], case: tuple) -> None:
    directory, expected = tiny_model
    chunk, composition, prefix_cache, preempted, min_shared_tokens, overlap = case
    config = EngineConfig(
        model=ModelConfig(name=str(directory)),
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=30 if preempted else 600, prefix_cache=prefix_cache),
        scheduler=SchedulerConfig(
            composition=composition, max_num_batched_tokens=chunk, overlap=overlap, reserve_tokens=0
        ),
        grouping=GroupingConfig(
            decide_by="length", enabled=min_shared_tokens is not None, min_shared_tokens=min_shared_tokens or 1
        ),
    )
    asked = list(enumerate(_prompts()))
    with Engine(config) as engine:
        for some in (asked, asked[::3]):  # the second batch finds what the first has left
            completions = engine.generate([prompt for _, prompt in some], GREEDY)
            for (number, _), completion in zip(some, completions, strict=True):
                assert completion.token_ids == expected[number].token_ids, f"prompt {number} of {len(some)}"
                logprobs = [logprob.chosen for logprob in completion.logprobs]
                np.testing.assert_allclose(logprobs, expected[number].logprobs, atol=1e-4)
            engine.check()
        stats = engine.stats()
    assert (stats.num_preemptions > 0) == preempted
    assert (stats.num_cached_tokens > 0) == prefix_cache
    assert stats.num_active_pages == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_that_come_and_go_in_mid_flight_do_not_disturb_others(
    tiny_model: tuple[Path, list[Answer]], overlap: bool
) -> None:
    directory, expected = tiny_model
    rng = np.random.default_rng(3)
    config = EngineConfig(
        model=ModelConfig(name=str(directory)),
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=70),
        scheduler=SchedulerConfig(max_num_batched_tokens=11, overlap=overlap),
        grouping=GroupingConfig(decide_by="length", min_shared_tokens=4),
    )
    finished: dict[str, list[int]] = {}
    cancelled: set[str] = set()
    with Engine(config) as engine:
        waiting = [(f"{number}/{copy}", prompt) for copy in range(3) for number, prompt in enumerate(_prompts())]
        live: set[str] = set()
        while waiting or engine.has_work:
            for _ in range(int(rng.integers(0, 3))):
                if waiting:
                    name, prompt = waiting.pop()
                    live.add(engine.add(prompt, GREEDY, request_id=name))
            if live and rng.random() < 0.02:
                victim = str(rng.choice(sorted(live)))
                assert engine.cancel(victim)
                cancelled.add(victim)
            for event in engine.step():
                finished.setdefault(event.request_id, []).extend([] if event.token_id is None else [event.token_id])
                if event.finish_reason is not None:
                    live.remove(event.request_id)
    assert cancelled
    for name, token_ids in finished.items():
        answer = expected[int(name.split("/")[0])].token_ids
        assert token_ids == (answer[: len(token_ids)] if name in cancelled else answer), name
