"""Tiny random models of every architecture, as Hugging Face directories, and transformers' greedy answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 127,
    "pad_token_id": None,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"num_attention_heads": 6},
}


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    logprobs: list[float]


def save_tiny_model(architecture: str, directory: Path) -> None:
    """Write a seeded random fp32 model of the architecture into the directory, and a tokenizer of words w0 … w127."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **{**SIZES, **ARCHITECTURES[architecture]})
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    words = {f"w{number}": number for number in range(SIZES["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))


@torch.inference_mode()
def transformers_logprobs(directory: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """For each prompt [num_prompt_tokens - 1, vocab]: row i is what the model expects of token i + 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return [model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1) for prompt in prompts]


@torch.inference_mode()
def transformers_greedy(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """The loop that everything else must equal: one prompt at a time, the whole sequence computed anew each token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        token_ids, answer = list(prompt), Answer([], [])
        for _ in range(num_tokens):
            logprobs = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1].log_softmax(-1)
            token_ids.append(int(logprobs.argmax()))
            answer.token_ids.append(token_ids[-1])
            answer.logprobs.append(float(logprobs.max()))
        answers.append(answer)
    return answers
