"""What a caller may give as a prompt, and what an engine can take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p99lab.engine.geometry import Geometry
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.engine.tokenizer import Tokenizer
from p99lab.errors import BadParameterError

Prompt = str | Sequence[dict[str, str]] | Sequence[int] | IntArray  # text, chat messages, or token ids


def encode(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> IntArray:
    """Token ids of a prompt, [num_prompt_tokens] int32.

    Raises:
        BadParameterError: neither text nor messages nor ids, no tokens at all, or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        return _checked(tokenizer.encode(prompt), vocab_size)
    messages = [entry for entry in prompt if isinstance(entry, dict)] if isinstance(prompt, list | tuple) else []
    return _checked(tokenizer.chat(messages) if messages else prompt, vocab_size)


def check_limits(num_prompt_tokens: int, sampling: SamplingParams, geometry: Geometry) -> None:
    """
    Raises:
        BadParameterError: more tokens than the model has positions, or more log-probabilities than it has tokens.
    """
    num_tokens, limit = num_prompt_tokens + sampling.max_tokens, geometry.max_position_embeddings
    if num_tokens > limit:
        raise BadParameterError(
            f"{num_prompt_tokens} prompt tokens and {sampling.max_tokens} to generate exceed the model's {limit}"
        )
    for name, num_top in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if num_top is not None and num_top > geometry.vocab_size:
            raise BadParameterError(f"{name}={num_top} exceeds the vocabulary of {geometry.vocab_size}")


def _checked(ids: object, vocab_size: int) -> IntArray:
    try:
        token_ids = np.asarray(ids)
    except ValueError:  # ragged
        token_ids = np.empty((1, 1))
    if token_ids.ndim == 1 and token_ids.size == 0:
        raise BadParameterError("a prompt needs at least one token")
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise BadParameterError("a prompt is a text, a list of messages or a flat sequence of integer token ids")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadParameterError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
    return token_ids.astype(np.int32, copy=False)  # only now: a narrower type would wrap
