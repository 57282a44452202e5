"""A real model over HTTP says what the engine says."""

from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.engine.config import CacheConfig, EngineConfig, ModelConfig
from p99lab.engine.engine import Engine
from p99lab.engine.request import SamplingParams
from p99lab.serving.background import serve_in_thread
from tests.serving.clients import chat, complete, connect, stream

pytestmark = pytest.mark.model

PROMPT = "The capital of France — Größe, 10 µm, 🙂 — is"


def test_a_completion_is_the_engines(smollm2_dir: Path) -> None:
    config = EngineConfig(model=ModelConfig(name=str(smollm2_dir)), cache=CacheConfig(num_pages=40))
    with Engine(config) as engine, serve_in_thread(engine, model="tiny") as url, connect(url) as client:
        expected = engine.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))[0]
        assert complete(client, PROMPT, max_tokens=12)["choices"][0]["text"] == expected.text
        chunks = stream(client, "/completions", prompt=PROMPT, max_tokens=12)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text
        echoed = complete(client, PROMPT, max_tokens=1, echo=True, logprobs=1)["choices"][0]
        assert len(echoed["logprobs"]["tokens"]) == len(engine.encode(PROMPT)) + 1
        content = "Say hello."
        said = engine.generate([[{"role": "user", "content": content}]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert chat(client, content)["choices"][0]["message"]["content"] == said[0].text
