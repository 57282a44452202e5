"""The reference path on a CUDA device: the same tokens as on the CPU, where the definition of attention runs instead of
the fused CPU kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from p99lab.engine.config import CacheConfig, EngineConfig, GroupingConfig, ModelConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.request import SamplingParams
from tests.engine.tiny_models import ARCHITECTURES, save_tiny_model

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0)


def _prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(2)
    document = rng.integers(0, vocab_size, 70).tolist()
    return [[*document, *rng.integers(0, vocab_size, n).tolist()] for n in (1, 5, 9, 17)] + [[3]]


def _answers(config: EngineConfig) -> list[Completion]:
    with Engine(config) as engine:
        engine.generate(_prompts(127)[:1], GREEDY)  # leaves the document in the cache
        return engine.generate(_prompts(127), GREEDY)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_cuda_answers_as_the_cpu_does(architecture: str, tmp_path: Path) -> None:
    save_tiny_model(architecture, tmp_path)
    config = EngineConfig(
        model=ModelConfig(name=str(tmp_path)),
        cache=CacheConfig(page_size=4, num_pages=300),
        scheduler=SchedulerConfig(max_num_batched_tokens=24),
        grouping=GroupingConfig(min_shared_tokens=8),
    )
    on_cuda = config.model_copy(update={"model": ModelConfig(name=str(tmp_path), device="cuda")})
    for ours, expected in zip(_answers(on_cuda), _answers(config), strict=True):
        assert ours.token_ids == expected.token_ids
        logprobs = [[logprob.chosen for logprob in completion.logprobs] for completion in (ours, expected)]
        np.testing.assert_allclose(*logprobs, atol=1e-4)
        assert ours.usage is not None
        assert expected.usage is not None
        assert ours.usage.num_cached_tokens == expected.usage.num_cached_tokens


def test_a_pool_is_sized_from_the_devices_free_memory_and_a_cached_answer_is_near_the_computed_one() -> None:
    before = torch.cuda.memory_allocated()
    model = ModelConfig(name="dummy:qwen2.5-0.5b", dtype="bfloat16", device="cuda")
    with Engine(EngineConfig(model=model)) as engine:
        free, _ = torch.cuda.mem_get_info()
        assert engine.stats().num_free_pages > 1000
        assert free > 0.05 * torch.cuda.get_device_properties(0).total_memory
        prompt = np.random.default_rng(0).integers(0, 10_000, 3000, dtype=np.int32)
        computed, cached = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
        assert cached.usage is not None
        assert cached.usage.num_cached_tokens == 2999
        assert abs(computed.logprobs[0].chosen - cached.logprobs[0].chosen) < 0.05
    del engine
    assert torch.cuda.memory_allocated() - before < 2**30


def test_the_scores_of_a_prompt_are_the_cpus(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=2)
    scheduler = SchedulerConfig(max_num_batched_tokens=24)
    scored = []
    for device in ("cpu", "cuda"):
        model = ModelConfig(name=str(tmp_path), device=device)
        with Engine(
            EngineConfig(model=model, cache=CacheConfig(page_size=4, num_pages=300), scheduler=scheduler)
        ) as engine:
            scored.append([completion.prompt_logprobs for completion in engine.generate(_prompts(127), asked)])
    for ours, expected in zip(*scored, strict=True):
        assert ours is not None
        assert expected is not None
        assert len(ours) == len(expected)
        for one, other in zip(ours[1:], expected[1:], strict=True):
            assert one is not None
            assert other is not None
            assert abs(one.chosen - other.chosen) < 1e-4
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
