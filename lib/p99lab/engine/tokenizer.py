"""Text to token ids and back, as the model's own `tokenizer.json` and chat template say."""

from __future__ import annotations

import codecs
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from p99lab.engine.output_text import Detokenizer
from p99lab.engine.request import IntArray
from p99lab.errors import BadParameterError, ModelError

if TYPE_CHECKING:
    from jinja2 import Template

REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8 decode to
MAX_HELD_TOKENS = 16  # a character has four bytes at most: this many tokens end in bytes that will never be one

Message = dict[str, str]  # {"role": …, "content": …}


class Tokenizer(Protocol):
    """`eos_ids`: the tokens that end an answer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> IntArray:
        """[n] int32, with the special tokens the model expects around a plain text."""
        ...

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        """Special tokens left out; bytes that are no UTF-8 as U+FFFD."""
        ...

    def chat(self, messages: Sequence[Message]) -> IntArray:
        """[n] int32 of a conversation whose next word is the model's.

        Raises:
            BadParameterError: the model has no chat template, or its template refuses these messages.
        """
        ...

    def detokenizer(self) -> Detokenizer: ...


class TextTokenizer:
    """A Hugging Face directory's tokenizer. Gives the ids of transformers' AutoTokenizer.

    Raises:
        ModelError: no readable tokenizer.json.
    """

    def __init__(self, directory: Path, eos_ids: Sequence[int] = ()) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ModelError(f"{directory / 'tokenizer.json'}: cannot be read ({error})") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._config = _read_optional_json(directory / "tokenizer_config.json")
        self._special_tokens = _special_tokens(self._config)
        self._template = _chat_template(directory, self._config)
        own_eos = self._backend.token_to_id(self._special_tokens.get("eos_token", ""))
        self._eos_ids = frozenset(eos_ids) or frozenset(() if own_eos is None else (own_eos,))

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str) -> IntArray:
        return np.array(self._backend.encode(text).ids, np.int32)

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        text: str = self._backend.decode([int(token_id) for token_id in token_ids], skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Message]) -> IntArray:
        text = self.render_chat(messages)
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The conversation as the text that `chat` encodes."""
        from jinja2 import TemplateError

        if self._template is None:
            raise BadParameterError("this model has no chat template: give text or token ids instead of messages")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, TypeError) as error:
            raise BadParameterError(f"the model's chat template refuses these messages: {error}") from None

    def detokenizer(self) -> Detokenizer:
        return TextDetokenizer(self)


class TextDetokenizer:
    """Decodes a short window of the last tokens, because what a token spells can depend on the one before it.

    Text of `ids[:given]` has been given out; a window that ends in U+FFFD waits for the rest of its character.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._owed()
        if not text:
            self._ids.pop()  # a special token spells nothing, and many of them would make a long window
            return ""
        if text.endswith(REPLACEMENT) and len(self._ids) - self._given < MAX_HELD_TOKENS:
            return ""
        self._shift()
        return text

    def flush(self) -> str:
        text = self._owed()
        self._shift()
        return text

    def _owed(self) -> str:
        given = self._tokenizer.decode(self._ids[: self._given])
        return self._tokenizer.decode(self._ids)[len(given) :]

    def _shift(self) -> None:
        del self._ids[: self._given]
        self._given = len(self._ids)


class ByteTokenizer:
    """For models whose ids mean nothing (`dummy:`): a token is a byte of UTF-8, modulo 256 and the vocabulary."""

    def __init__(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    def encode(self, text: str) -> IntArray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32) % self._vocab_size

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        return bytes(int(token_id) % 256 for token_id in token_ids).decode(errors="replace")

    def chat(self, messages: Sequence[Message]) -> IntArray:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant: "]))

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id % 256]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _read_optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, …: what templates may name."""
    named = {key: value for key, value in config.items() if key.endswith("_token") and value}
    plain = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in plain.items() if isinstance(value, str)}


def _chat_template(directory: Path, config: dict[str, Any]) -> Template | None:
    """The template file, or the one in tokenizer_config.json (`default`, where several are named)."""
    file = directory / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return None if source is None else _compile(source)


def _compile(source: str) -> Template:
    """In the sandbox and with the helpers that transformers gives a template."""
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template cannot be compiled: {error}") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja's own escapes for HTML


def _raise_template_error(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
