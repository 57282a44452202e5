"""Converts a GGUF file to a Hugging Face directory: `python -m p99lab.engine.gguf_conversion FILE DIRECTORY`.

A program of its own, so that a conversion's memory and transformers' logging stay out of the process that asks for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, directory: Path) -> None:
    """Dequantise to fp32 safetensors, with config, tokenizer and chat template beside them. Llama architecture only."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    config = {key: value for key, value in model.config.to_diff_dict().items() if not key.startswith("_")}
    config |= {"architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)
    _write_json(directory / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", generation)
    _convert_tokenizer(gguf, directory, config["max_position_embeddings"])


def _convert_tokenizer(gguf: Path, directory: Path, max_length: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    if _pre_tokenizer_name(gguf) == "smollm":
        # GGUF only names the split of digits, and transformers drops it: "\n\n1" would be three tokens instead of two
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    backend.save(str(directory / "tokenizer.json"))
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    settings: dict[str, Any] = {
        name: str(getattr(tokenizer, name)) for name in names if getattr(tokenizer, name) is not None
    }
    settings |= {"model_max_length": max_length, "clean_up_tokenization_spaces": False}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(directory / "tokenizer_config.json", settings)
    if tokenizer.chat_template is not None:
        (directory / "chat_template.jinja").write_text(tokenizer.chat_template)


def _pre_tokenizer_name(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
