"""Log-probabilities in the two shapes that the API has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p99lab.engine.request import Logprobs
from p99lab.engine.tokenizer import REPLACEMENT, Tokenizer
from p99lab.serving.openai_api.choices import Scored

LOWEST = -9999.0  # the API's word for "very unlikely": JSON has no infinity


class TokenTexts:
    """What each token spells by itself: U+FFFD where it is a part of a character, nothing where it is special."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # at most the vocabulary

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id])
        return text


def completion_logprobs(scored: Sequence[Scored], texts: TokenTexts, offset: int) -> dict[str, list[Any]]:
    """The object of `/v1/completions`: four lists with an entry a token; None for a prompt's first, which has no score.

    `top_logprobs` holds the token that stands there too, so one entry more than asked for where it is not among the
    most probable; of tokens that are spelled alike, the most probable. `text_offset` counts characters from `offset`.
    """
    tokens = [texts[entry.token_id] for entry in scored]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry.logprobs is None else _finite(entry.logprobs.chosen) for entry in scored],
        "top_logprobs": [
            None if entry.logprobs is None else _top(entry.token_id, entry.logprobs, texts) for entry in scored
        ],
        "text_offset": offsets,
    }


def chat_logprobs(scored: Sequence[Scored], texts: TokenTexts) -> dict[str, list[Any]]:
    """The object of `/v1/chat/completions`: each token with its alternatives, the most probable first."""
    content = [
        {
            **_entry(texts[entry.token_id], entry.logprobs.chosen),
            "top_logprobs": [_entry(texts[token_id], value) for token_id, value in entry.logprobs.top],
        }
        for entry in scored
        if entry.logprobs is not None
    ]
    return {"content": content}


def _top(token_id: int, logprobs: Logprobs, texts: TokenTexts) -> dict[str, float]:
    top: dict[str, float] = {}
    for other_id, value in (*logprobs.top, (token_id, logprobs.chosen)):
        top.setdefault(texts[other_id], _finite(value))
    return top


def _entry(text: str, logprob: float) -> dict[str, Any]:
    spelled = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": _finite(logprob), "bytes": spelled}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
