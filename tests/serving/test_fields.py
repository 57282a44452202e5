"""What a request may say: read without loops, refused in one line that names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.serving.openai_api.errors import ApiError
from p99lab.serving.openai_api.fields import (
    HARMLESS,
    UNSUPPORTED,
    ChatFields,
    CompletionFields,
    parse_body,
    parse_fields,
    parse_messages,
    parse_prompts,
)


def completion(**fields: Any) -> CompletionFields:
    return parse_fields(CompletionFields, {"model": "m", "prompt": "p", **fields}, "prompt")[0]


def test_130_000_ids_become_one_array() -> None:
    ids = np.random.default_rng(0).integers(0, 128_256, 130_000)
    body = parse_body(orjson.dumps({"model": "m", "prompt": ids.tolist()}))
    fields, content = parse_fields(CompletionFields, body, "prompt")
    (prompt,) = parse_prompts(content)
    assert isinstance(prompt, np.ndarray)
    assert (prompt.dtype, prompt.shape) == (np.int64, (130_000,))
    np.testing.assert_array_equal(prompt, ids)
    assert not hasattr(fields, "prompt")  # no model has seen it


PIECES = ["0", "1", "01", "77", "2147483647", "2147483648", "-1", "1.5", "1e3", "true", '"a"', "[1]", "", " "]


@given(st.lists(st.sampled_from(PIECES), max_size=5), st.sampled_from([",", ", ", " ,", ",\n"]))
def test_ids_are_read_as_json_has_them(pieces: list[str], comma: str) -> None:
    """Whichever way a list is read: the same numbers, and no list that is no JSON."""
    body = f'{{"model": "m", "prompt": [{comma.join(pieces)}], "n": 1}}'.encode()
    try:
        expected = orjson.loads(body)
    except orjson.JSONDecodeError:
        with pytest.raises(ApiError, match="no valid JSON"):
            parse_body(body)
        return
    found = parse_body(body)
    prompt = found["prompt"]
    assert (prompt.tolist() if isinstance(prompt, np.ndarray) else prompt) == expected["prompt"]
    assert (found["model"], found["n"]) == ("m", 1)


@pytest.mark.parametrize(
    "body",
    [
        {"user": '"prompt":[1]', "prompt": [2]},
        {"metadata": {"prompt": [1]}, "prompt": "text"},
        {"metadata": {"prompt": [1]}, "prompt": [2, 3]},
        {"prompt": 'see "prompt": [1, 2]'},
        {"prompt": [[1, 2], [3]]},
        {"Prompt": [1], "prompt": None, "x": [1]},
    ],
)
def test_a_list_elsewhere_is_not_taken_for_the_prompt(body: dict[str, Any]) -> None:
    found = parse_body(orjson.dumps(body))
    if isinstance(found.get("prompt"), np.ndarray):
        found["prompt"] = found["prompt"].tolist()
    assert found == {name: value for name, value in body.items() if value is not None}


def test_the_last_of_two_prompts_counts() -> None:
    assert parse_body(b'{"prompt":[1],"prompt":"t"}') == {"prompt": "t"}
    assert parse_body(b'{"prompt":[1],"prompt":[2]}')["prompt"] == [2]


def test_every_kind_of_prompt() -> None:
    assert parse_prompts("a text") == ["a text"]
    assert parse_prompts(["a", "b"]) == ["a", "b"]
    assert [ids.tolist() for ids in parse_prompts([1, 2])] == [[1, 2]]
    assert [ids.tolist() for ids in parse_prompts([[1], [2, 3]])] == [[1], [2, 3]]


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [1, 2.0], [True], [[1], "a"], {"a": 1}, 7, [2**63], [[1, [2]]]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt: must be") as caught:
        parse_prompts(prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"max_tokns": 3}, "unknown parameter 'max_tokns'; did you mean 'max_tokens'?", "max_tokns"),
        ({"frobnicate": 3}, "unknown parameter 'frobnicate'", "frobnicate"),
        ({"temperature": 2.5}, "temperature: Input should be less than or equal to 2, got 2.5", "temperature"),
        ({"top_p": 0}, "top_p: Input should be greater than 0", "top_p"),
        ({"max_tokens": "16"}, "max_tokens: Input should be a valid integer, got '16'", "max_tokens"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0", "max_tokens"),
        ({"n": 0}, "n: Input should be greater than or equal to 1", "n"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20", "logprobs"),
        ({"stop": list("abcde")}, "stop: Tuple should have at most 4 items", "stop"),
        ({"stop": ""}, "stop.0: String should have at least 1 character", "stop"),
        ({"stop": [1]}, "stop.0: Input should be a valid string", "stop"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "stream_options"),
        ({"best_of": 0}, "best_of", "best_of"),
        ({"model": None}, "model: Field required", "model"),
        ({"prompt": None}, "prompt: Field required", "prompt"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str, param: str) -> None:
    body = parse_body(orjson.dumps({"model": "m", "prompt": "p", **fields}))
    with pytest.raises(ApiError) as caught:
        parse_fields(CompletionFields, body, "prompt")
    assert message in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_is_harmless_is_ignored() -> None:
    assert completion(**dict.fromkeys(HARMLESS, "x")) == completion()
    neutral = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    assert completion(**neutral) == completion()
    assert completion(
        stream_options={"include_usage": True, "continuous_usage_stats": True}
    ).stream_options.include_usage


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"50256": -100}),
        ("suffix", "end"),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("modalities", ["text", "audio"]),
        ("tool_choice", "required"),
    ],
)
def test_what_would_change_the_answer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"'{name}' is not supported") as caught:
        completion(**{name: value})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unsupported_parameter")


def test_choices_have_seeds_of_their_own() -> None:
    fields = completion(seed=7, stop="x", top_k=-1, temperature=0.5)
    samplings = [fields.sampling(number, 3, None) for number in range(3)]
    assert [sampling.seed for sampling in samplings] == [7, 8, 9]
    assert (samplings[0].stop, samplings[0].top_k, samplings[0].temperature) == (("x",), 0, 0.5)
    assert completion().sampling(1, 3, None).seed is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"temperature": NaN}', b"[" * 5000])
def test_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body)
    assert caught.value.status == 400


def test_messages_are_texts_or_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
    ]
    assert parse_messages(messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages.0"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages.0.tool_calls"),
    ],
)
def test_other_messages_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_messages(messages)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_message_that_quotes_a_document_stays_short() -> None:
    with pytest.raises(ApiError) as caught:
        completion(stop=["x" * 100_000, 1])
    assert len(caught.value.message) <= 500
    with pytest.raises(ApiError) as caught:
        parse_fields(ChatFields, {"model": "m" * 100_000, "n": -1, "messages": []}, "messages")
    assert len(caught.value.message) <= 500
