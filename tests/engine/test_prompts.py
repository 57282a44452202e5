"""What is taken for a prompt, and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from p99lab.engine.prompts import encode
from p99lab.engine.tokenizer import ByteTokenizer
from p99lab.errors import BadParameterError

pytestmark = pytest.mark.light

BYTES = ByteTokenizer(256)


@pytest.mark.parametrize(
    "prompt",
    [
        "ab",
        [97, 98],
        (97, 98),
        range(97, 99),
        np.array([97, 98], np.int64),
        np.array([97, 98], np.uint8),
        [np.int32(97), np.int64(98)],
    ],
    ids=repr,
)
def test_text_and_ids_of_any_integer_type(prompt) -> None:
    token_ids = encode(prompt, BYTES, 256)
    assert token_ids.dtype == np.int32
    assert token_ids.tolist() == [97, 98]


def test_messages_go_through_the_chat_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    np.testing.assert_array_equal(encode(messages, BYTES, 256), BYTES.chat(messages))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one token"),
        ([], "at least one token"),
        (np.empty(0, np.int32), "at least one token"),
        ([1, 256], "token id 256 is outside the vocabulary of 256"),
        ([1, -1], "token id -1 is outside"),
        (np.array([2**32 + 5]), "token id 4294967301 is outside"),
        ([2**70], "flat sequence of integer"),
        ([1.5], "flat sequence of integer"),
        ([True], "flat sequence of integer"),
        (["a"], "flat sequence of integer"),
        ([[1, 2], [3, 4]], "flat sequence of integer"),
        ([[1, 2], [3]], "flat sequence of integer"),
        (7, "flat sequence of integer"),
        (None, "flat sequence of integer"),
    ],
    ids=repr,
)
def test_everything_else_is_refused_in_one_line(prompt, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        encode(prompt, BYTES, 256)
