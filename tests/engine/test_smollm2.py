"""A real model: greedy tokens and log-probabilities are those of transformers on the same weights."""

from __future__ import annotations

import argparse
import ast
import calendar
import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.plan import StepPlan
from p99lab.engine.request import IntArray, SamplingParams
from tests.engine.tiny_models import Answer

pytestmark = pytest.mark.model

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
PROMPT_LENS = [*np.geomspace(10, 800, 19).astype(int).tolist(), 4000]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue"},
        {"role": "user", "content": "Another one: Größe, 10 µm, 🙂."},
    ],
]


@pytest.fixture(scope="module")
def peer(smollm2_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(smollm2_dir: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=ModelConfig(name=str(smollm2_dir)),
        cache=CacheConfig(num_pages=300),
        scheduler=SchedulerConfig(max_num_batched_tokens=700),
    )
    with Engine(config) as engine:
        yield engine


def greedy(peer: Any, prompt: IntArray) -> Answer:
    """transformers' own loop over its own cache, one prompt at a time."""
    token_ids = torch.from_numpy(prompt.astype(np.int64))[None]
    output = peer.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs = [float(logits[0].log_softmax(-1).max()) for logits in output.logits]
    return Answer(output.sequences[0, len(prompt) :].tolist(), logprobs)


def assert_equal(completion: Completion, answer: Answer, name: str) -> None:
    assert completion.token_ids == answer.token_ids, name
    logprobs = [logprob.chosen for logprob in completion.logprobs]
    np.testing.assert_allclose(logprobs, answer.logprobs, rtol=0, atol=1e-4, err_msg=name)


def source(engine: Engine, module: Any, num_tokens: int) -> IntArray:
    return engine.encode(inspect.getsource(module)[: 6 * num_tokens])[:num_tokens]


def test_prompts_of_10_to_4000_tokens_in_one_batch(engine: Engine, peer: Any) -> None:
    """Every second one is a beginning of the longest; the others begin elsewhere in another text."""
    text, other = source(engine, argparse, 4000), source(engine, difflib, 4000)
    prompts = [text[:n] if i % 2 else other[-n:] for i, n in enumerate(PROMPT_LENS)]
    assert [len(prompt) for prompt in prompts] == PROMPT_LENS
    completions = engine.generate([*prompts, *CHATS], GREEDY)
    assert engine.stats().num_cached_tokens > 0
    asked = [*prompts, *(engine.encode(chat) for chat in CHATS)]
    for number, (completion, prompt) in enumerate(zip(completions, asked, strict=True)):
        assert_equal(completion, greedy(peer, prompt), f"prompt {number} of {len(prompt)} tokens")


def test_questions_over_a_shared_document_form_groups(
    engine: Engine, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []
    plan = ReferenceAttention.plan
    monkeypatch.setattr(ReferenceAttention, "plan", lambda self, step: (plans.append(step), plan(self, step))[1])
    documents = [source(engine, module, num_tokens) for module, num_tokens in ((ast, 500), (calendar, 333))]
    questions = ["\n\nQ: What does this module do?\nA:", "\n\n# In short:", "\n\nQ: Who wrote it?\nA:", "\n\ndef main"]
    prompts = [np.concatenate([document, engine.encode(question)]) for question in questions for document in documents]
    engine.generate(documents, SamplingParams(max_tokens=1))
    completions = engine.generate(prompts, GREEDY)
    sizes = [sorted((len(group.rows), group.num_pages) for group in step.groups) for step in plans]
    assert [(4, 333 // 64), (4, 500 // 64)] in sizes
    for number, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        assert completion.usage is not None
        assert completion.usage.num_cached_tokens >= len(documents[number % 2])
        assert_equal(completion, greedy(peer, prompt), f"question {number}")
