"""`/v1/chat/completions` beside the engine that answers it."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from p99lab.engine.engine import Engine
from p99lab.engine.request import SamplingParams
from tests.serving.clients import chat, connect, refused, stream

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)


def test_text_and_parts_are_answered_as_the_engine_does(client: httpx.Client, engine: Engine) -> None:
    expected = engine.generate([[{"role": "user", "content": "hello"}]], GREEDY)[0]
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        answer = chat(client, content)
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
        assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
        assert answer["object"] == "chat.completion"
        assert answer["usage"]["prompt_tokens"] == len("user: hello\nassistant: ")


def test_logprobs(client: httpx.Client, engine: Engine) -> None:
    expected = engine.generate([[{"role": "user", "content": "hello"}]], GREEDY)[0]
    content = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    for entry, token_id, logprobs in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert (entry["token"], entry["bytes"]) == (chr(token_id), [token_id])
        assert entry["logprob"] == pytest.approx(logprobs.chosen, abs=1e-4)
        assert [top["token"] for top in entry["top_logprobs"]] == [chr(other_id) for other_id, _ in logprobs.top]
        values = [value for _, value in logprobs.top]
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(values, abs=1e-4)
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_newer_name_of_the_limit_wins_and_none_fills_the_context(client: httpx.Client) -> None:
    assert chat(client, max_tokens=9, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    usage = chat(client, max_tokens=None)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == 512


def test_a_stream_says_who_speaks_then_what(client: httpx.Client) -> None:
    whole = chat(client, n=2, seed=1, temperature=1)
    messages = [{"role": "user", "content": "hello"}]
    chunks = stream(client, "/chat/completions", messages=messages, n=2, seed=1, temperature=1)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index, choice in enumerate(whole["choices"]):
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_refusals_name_their_field(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    path = "/chat/completions"
    assert refused(client, 400, path, messages=messages, top_logprobs=2)["param"] == "top_logprobs"
    assert refused(client, 400, path, messages=messages, max_tokens=500)["code"] == "context_length_exceeded"
    assert refused(client, 400, path, messages=messages, tools=[{}])["code"] == "unsupported_parameter"
    assert refused(client, 400, path, message=messages)["message"].endswith("did you mean 'messages'?")


def test_a_model_without_a_template_says_so(ascii_llama: str, tmp_path: Path) -> None:
    from p99lab.engine.config import CacheConfig, EngineConfig
    from p99lab.serving.background import serve_in_thread

    directory = str(shutil.copytree(ascii_llama, tmp_path / "bare"))
    (tmp_path / "bare" / "tokenizer_config.json").unlink()
    config = EngineConfig(model=directory, cache=CacheConfig(page_size=4, num_pages=20))
    with Engine(config) as engine, serve_in_thread(engine) as url, connect(url) as client:
        assert client.get("/models").json()["data"][0]["id"] == directory
        body = {"model": directory, "messages": [{"role": "user", "content": "x"}]}
        response = client.post("/chat/completions", json=body)
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
