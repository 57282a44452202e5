"""`/v1/completions` beside the engine that answers it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from p99lab.engine.engine import Engine
from p99lab.engine.request import SamplingParams
from tests.serving.clients import complete, error_of, refused, stream


def greedy(engine: Engine, prompt: Any, **params: Any) -> Any:
    return engine.generate([prompt], SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params}))[0]


def test_text_is_the_engines(client: httpx.Client, engine: Engine) -> None:
    answer = complete(client, "one")
    expected = greedy(engine, "one")
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == 11


def test_token_ids_are_their_text(client: httpx.Client) -> None:
    assert complete(client, list(b"one"))["choices"] == complete(client, "one")["choices"]


@pytest.mark.parametrize("prompts", [["one", "two"], [list(b"one"), list(b"two")]])
def test_choices_are_prompt_by_prompt_and_a_prompt_counts_once(
    client: httpx.Client, engine: Engine, prompts: Any
) -> None:
    answer = complete(client, prompts, n=2, temperature=1, seed=5)
    expected = [greedy(engine, prompt, temperature=1.0, seed=seed).text for prompt in prompts for seed in (5, 6)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 32)
    assert "p99lab_timeline" not in answer["usage"]
    assert complete(client, "one", temperature=1, seed=5)["choices"][0]["text"] == expected[0]


def test_stop_strings_and_stop_ids(client: httpx.Client, engine: Engine) -> None:
    text = greedy(engine, "one", max_tokens=20).text
    for stop in (text[5:7], [text[5:7], "\x00\x00\x00"]):
        (choice,) = complete(client, "one", max_tokens=20, stop=stop)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[5:7])], "stop")
    (choice,) = complete(client, "one", max_tokens=20, stop_token_ids=[ord(text[5])])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[5])], "stop")


def test_the_timeline_adds_up_and_names_the_cache(client: httpx.Client) -> None:
    prompt = "the same long prompt, twice over"
    complete(client, prompt)
    usage = complete(client, prompt)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    timeline = usage["p99lab_timeline"]
    assert timeline.keys() == {"queue_s", "prefill_s", "decode_s", "stalled_s", "scheduling_s", "num_preemptions"}
    assert timeline["decode_s"] > 0
    assert all(value >= 0 for value in timeline.values())


def test_logprobs_of_the_answer(client: httpx.Client, engine: Engine) -> None:
    expected = greedy(engine, "one", logprobs=2)
    (choice,) = complete(client, "one", logprobs=2)["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"] == pytest.approx([entry.chosen for entry in expected.logprobs], abs=1e-4)
    for top, entry in zip(found["top_logprobs"], expected.logprobs, strict=True):
        assert list(top) == [chr(token_id) for token_id, _ in entry.top]
        assert list(top.values()) == pytest.approx([value for _, value in entry.top], abs=1e-4)
    assert found["text_offset"] == list(range(8))


def test_a_sampled_token_is_among_the_top_though_it_is_improbable(client: httpx.Client) -> None:
    for logprobs in (0, 1):
        (choice,) = complete(client, "one", temperature=2, seed=1, max_tokens=30, logprobs=logprobs)["choices"]
        found = choice["logprobs"]
        for token, own, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert top[token] == own
            assert len(top) in ({1} if logprobs == 0 else {1, 2})
        if logprobs:
            assert {len(top) for top in found["top_logprobs"]} == {1, 2}


def test_echo_scores_the_prompt_as_lm_eval_reads_it(client: httpx.Client, engine: Engine) -> None:
    """Log-likelihood of a continuation: `token_logprobs[context_len:-1]`, greedy where each is the top's maximum."""
    context, answer = list(b"one two"), greedy(engine, "one two", max_tokens=6, logprobs=1)
    improbable = [(token_id + 1) % 127 for token_id in answer.token_ids]
    body = {"logprobs": 1, "echo": True, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = complete(client, [context + answer.token_ids, context + improbable], **body)["choices"]
    for choice, is_greedy in zip(choices, (True, False), strict=True):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(context) + 6 + 1
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        scores, tops = found["token_logprobs"][len(context) : -1], found["top_logprobs"][len(context) : -1]
        assert all(own == max(top.values()) for own, top in zip(scores, tops, strict=True)) is is_greedy
    scores = choices[0]["logprobs"]["token_logprobs"][len(context) : -1]
    np.testing.assert_allclose(scores, [entry.chosen for entry in answer.logprobs], atol=1e-4)


def test_echo_without_an_answer(client: httpx.Client) -> None:
    answer = complete(client, "one", echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one", "length")
    assert choice["logprobs"]["tokens"] == ["o", "n", "e"]
    assert answer["usage"]["completion_tokens"] == 0
    assert complete(client, "one", echo=True)["choices"][0]["text"] == "one" + complete(client)["choices"][0]["text"]


def test_a_stream_is_the_same_answer_in_pieces(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": ["one", "two"], "n": 2, "temperature": 1, "seed": 3, "logprobs": 1}
    whole = complete(client, **fields)
    *chunks, last = stream(client, "/completions", **fields, echo=True, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == (
        [],
        {**whole["usage"], "prompt_tokens_details": {"cached_tokens": 0}},
    )
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(whole["choices"]):
        pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == index]
        prompt = fields["prompt"][index // 2]
        assert "".join(piece["text"] for piece in pieces) == prompt + choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        tokens = [token for piece in pieces for token in piece["logprobs"]["tokens"]]
        assert "".join(tokens) == prompt + choice["text"]
        assert [at for piece in pieces for at in piece["logprobs"]["text_offset"]] == list(range(len(tokens)))


def test_a_chunk_has_text_or_the_end_and_tokens_held_back_come_later(client: httpx.Client, engine: Engine) -> None:
    text = greedy(engine, "one", max_tokens=20).text
    cut = next(at for at, (one, two) in enumerate(pairwise(text)) if one != two and at > 2)
    stop = text[cut : cut + 2] + "\x01"  # begins, and never comes
    chunks = stream(client, "/completions", prompt="one", max_tokens=20, stop=stop, logprobs=0)
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert all(piece["text"] for piece in pieces[:-1])
    assert "".join(piece["text"] for piece in pieces) == text
    assert sum(len(piece["logprobs"]["tokens"]) for piece in pieces) == 20
    assert len(pieces) < 20
    assert "usage" not in chunks[-1]


def test_who_asks_for_token_ids_gets_a_chunk_for_each(client: httpx.Client, engine: Engine) -> None:
    asked = greedy(engine, "one", max_tokens=20)
    held = asked.text[2:4] + "\x01"  # a stop string that begins, and never comes: text waits, ids do not
    fields: dict[str, Any] = {"prompt": "one", "max_tokens": 20, "stop": held, "return_token_ids": True}
    pieces = [chunk["choices"][0] for chunk in stream(client, "/completions", **fields)]
    assert len(pieces) == 20
    assert [token_id for piece in pieces for token_id in piece["token_ids"]] == asked.token_ids
    assert any(not piece["text"] for piece in pieces)
    assert "".join(piece["text"] for piece in pieces) == asked.text
    assert complete(client, **fields)["choices"][0]["token_ids"] == asked.token_ids
    assert "token_ids" not in complete(client, **{**fields, "return_token_ids": False})["choices"][0]


def test_130_000_ids_are_read_and_counted(client: httpx.Client) -> None:
    body = orjson.dumps({"model": "tiny", "prompt": [7] * 130_000})
    response = client.post("/completions", content=body, headers={"content-type": "application/json"})
    error = error_of(response)
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("130000 prompt tokens and 16 to generate exceed")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [1, 128]}, "prompt", "token id 128 is outside the vocabulary"),
        ({"prompt": [2**40]}, "prompt", "outside the vocabulary"),
        ({"prompt": ""}, "prompt", "at least one token"),
        ({"prompt": "x", "max_tokens": 600}, "prompt", "context of 512"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "where the prompt is echoed"),
        ({"prompt": "x", "n": 2, "best_of": 3}, "best_of", "equal to n"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt", "at most 128 choices"),
    ],
)
def test_impossible_requests_name_their_field(
    client: httpx.Client, fields: dict[str, Any], param: str, says: str
) -> None:
    error = refused(client, 400, **fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]
