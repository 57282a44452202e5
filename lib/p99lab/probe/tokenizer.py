"""A tokenizer by name, for clients that must know how long their prompts are. Needs `tokenizers`, but no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import resolve
from p99lab.engine.request import IntArray
from p99lab.errors import BadParameterError
from p99lab.probe.documents import Tokenize

if TYPE_CHECKING:
    from p99lab.engine.tokenizer import Tokenizer


def load_tokenize(name: str) -> Tokenize:
    """Text to ids, without the special tokens that the model begins a text with.

    Args:
        name: a model of the store, a Hugging Face directory, or a path of a `tokenizer.json`.

    Raises:
        ModelError: no such model or directory, or no readable tokenizer in it.
        BadParameterError: `tokenizers` is not installed.
    """
    tokenizer = _load(name)
    return without_special_tokens(tokenizer)


def without_special_tokens(tokenizer: Tokenizer) -> Tokenize:
    """The tokenizer's encoding of a text that is only a piece of a prompt."""
    begins_with = len(tokenizer.encode(""))

    def tokenize(text: str) -> IntArray:
        return tokenizer.encode(text)[begins_with:]

    return tokenize


def _load(name: str) -> Tokenizer:
    path = Path(name).expanduser()
    found = path.parent if path.name == "tokenizer.json" else resolve(name, weights=False)
    try:
        from p99lab.engine.tokenizer import ByteTokenizer, TextTokenizer

        if isinstance(found, Geometry):
            return ByteTokenizer(found.vocab_size, found.eos_token_ids)
        return TextTokenizer(found)
    except ModuleNotFoundError as error:
        raise BadParameterError(
            f"a tokenizer needs {error.name}: install the extra 'engine' (in a checkout: pip install '.[engine]')"
        ) from None
