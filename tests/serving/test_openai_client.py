"""The official client, against a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from p99lab.engine.engine import Engine
from p99lab.engine.request import SamplingParams
from tests.serving.clients import eventually, slow_steps

openai: Any = pytest.importorskip("openai")
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def official(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_completions(official: Any, engine: Engine) -> None:
    expected = engine.generate(["one"], SamplingParams(max_tokens=8, ignore_eos=True))[0].text
    whole = official.completions.create(prompt="one", logprobs=1, **GREEDY)
    assert whole.choices[0].text == expected
    assert len(whole.choices[0].logprobs.top_logprobs) == whole.usage.completion_tokens == 8
    chunks = list(
        official.completions.create(prompt="one", stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected
    assert chunks[-1].usage.total_tokens == 11


def test_chat(official: Any, engine: Engine) -> None:
    expected = engine.generate([MESSAGES], SamplingParams(max_tokens=8, ignore_eos=True))[0].text
    whole = official.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    assert whole.choices[0].message.content == expected
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
    chunks = list(official.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_models(official: Any) -> None:
    assert [model.id for model in official.models.list()] == ["tiny"]
    assert official.models.retrieve("tiny").owned_by == "p99lab"


def test_errors(official: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        official.completions.create(prompt="one", model="tiny", top_p=3)
    assert (bad.value.param, bad.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        official.chat.completions.create(messages=MESSAGES, model="other")
    assert missing.value.code == "model_not_found"


def test_a_full_queue_and_a_key(new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    from p99lab.serving.background import serve_in_thread

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    slow_steps(monkeypatch, 0.005)
    long: dict[str, Any] = {**GREEDY, "prompt": "one", "max_tokens": 300, "stream": True}
    with (
        new_engine(max_num_seqs=1, max_num_waiting=1) as engine,
        serve_in_thread(engine, model="tiny", api_key="key", drain_timeout_s=0.1) as url,
        openai.OpenAI(base_url=url, api_key="key", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        running = client.completions.create(**long)
        next(iter(running))
        waiting = threading.Thread(target=lambda: client.completions.create(**{**long, "max_tokens": 1}).close())
        waiting.start()
        eventually(lambda: engine.stats().num_waiting == 1)
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(**long)
        assert full.value.response.headers["retry-after"] == "1"
        running.close()  # hangs up: the one that waits has its turn
        waiting.join(30)
        assert not waiting.is_alive()
