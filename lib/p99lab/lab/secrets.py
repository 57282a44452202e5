"""Secrets: kept out of whatever a run writes and says, and looked for before anything is published.

A parameter typed `SecretStr` gets its value from `$P99LAB_SECRET_<NAME>` alone (`parameters`). Should a cell print it
all the same, the runner strikes it out; `find` is the last check. Works on the base install.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from p99lab.errors import BadParameterError

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = "(secret)"
PREFIX = "P99LAB_SECRET_"
MIN_LENGTH = 8  # a shorter one could not be told from other text
_PLAIN = re.compile(r"[a-z_]{1,15}|[A-Z_]{1,15}|[0-9]{1,15}")
_TELLING_ENDS = ("API_KEY", "ACCESS_KEY", "TOKEN", "SECRET", "PASSWORD")  # of other variables that hold secrets,
_MIN_LENGTH_OF_OTHERS = 16  # unless their value is a mere word

_PATTERNS = {
    "an OpenAI-style key (sk-…)": rb"\bsk-[A-Za-z0-9_-]{20,}",
    "a Hugging Face token (hf_…)": rb"\bhf_[A-Za-z0-9]{30,}",
    "a GitHub token (ghp_…)": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})",
    "an AWS key id (AKIA…)": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an authorization header": rb"(?i)\bauthorization\W{1,8}(?:bearer|basic)\s+[A-Za-z0-9._~+/=-]{16,}",
    "a private key": rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
}


def variable(parameter: str) -> str:
    """The environment variable that a secret parameter takes its value from: `api_key` → `P99LAB_SECRET_API_KEY`."""
    return PREFIX + parameter.upper()


@dataclass(frozen=True, repr=False)
class Secrets:
    """Values that must not be shown, by the environment variable that holds each."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Secrets:
        """Those of an environment: every `P99LAB_SECRET_…`, and what its name gives away (`…_API_KEY`, `…_TOKEN`, …).

        Raises:
            BadParameterError: a `P99LAB_SECRET_…` is too short, or too plain a word or number, to be recognised.
        """
        for name, value in environment.items():
            if name.startswith(PREFIX) and len(value) < MIN_LENGTH:
                raise BadParameterError(f"${name} is shorter than {MIN_LENGTH} characters: it could not be kept secret")
            if name.startswith(PREFIX) and _PLAIN.fullmatch(value):
                raise BadParameterError(f"${name} is a plain word or number: it could not be told from other text")
        return cls({name: value for name, value in environment.items() if _is_secret(name, value)})

    def redact(self, text: str) -> str:
        """The text with `(secret)` for each value, whether plain, escaped, quoted or in base64."""
        return self._pattern.sub(SHOWN, text) if self.values else text

    def redact_values(self, value: Any) -> Any:
        """Plain data with the texts in it redacted; keys, numbers and the shape stay."""
        if isinstance(value, Mapping):
            return {key: self.redact_values(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_values(one) for one in value]
        return self.redact(value) if isinstance(value, str) else value

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        forms = {form for value in self.values.values() for form in _forms(value)}
        return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))

    def patterns(self) -> dict[str, re.Pattern[bytes]]:
        """What to look for in a file, under words that say what was found and not what it is."""
        known = {
            f"the value of ${name}": b"|".join(re.escape(form.encode()) for form in _forms(value))
            for name, value in self.values.items()
        }
        return {what: re.compile(pattern) for what, pattern in {**known, **_PATTERNS}.items()}


def find(folder: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
    """What in a folder looks like a secret, one line each: file and kind, never the value.

    Looked for are the secrets of this environment and the usual shapes of keys; in every file's bytes, and in the text
    columns of Parquet files.
    """
    return [f"{file}: {what}" for file, what in scan(folder, Secrets.of(environment))]


def scan(folder: Path, secrets: Secrets) -> Iterator[tuple[str, str]]:
    """Each file of a folder (its relative name) that holds a secret, with the kind of secret it holds."""
    patterns = secrets.patterns()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = _content(path)
        for what, pattern in patterns.items():
            if pattern.search(content):
                yield path.relative_to(folder).as_posix(), what


def _is_secret(name: str, value: str) -> bool:
    return name.startswith(PREFIX) or (name.endswith(_TELLING_ENDS) and len(value) >= _MIN_LENGTH_OF_OTHERS)


def _forms(value: str) -> set[str]:
    """The shapes in which a value may stand in text, JSON, HTML, a URL, a header or code."""
    plain = {value, repr(value)[1:-1], quote(value, safe=""), *_in_html(value), *_in_base64(value.encode())}
    return plain | {json.dumps(form, ensure_ascii=ascii_only)[1:-1] for form in plain for ascii_only in (False, True)}


def _in_html(value: str) -> Iterator[str]:
    """HTML writes a quote in several ways, according to who writes it."""
    text = html.escape(value, quote=False)
    for double in ('"', "&quot;", "&#34;"):
        yield from (text.replace('"', double).replace("'", single) for single in ("'", "&#x27;", "&#39;"))


def _in_base64(value: bytes) -> Iterator[str]:
    """What a longer text in base64 shows of a value within it, which depends on where the value begins (mod 3)."""
    for place in range(3):
        begin, end = -(-place * 8 // 6), (place + len(value)) * 8 // 6  # characters that the value alone decides
        shown = base64.b64encode(bytes(place) + value).decode()[begin:end]
        yield from {shown, shown.replace("+", "-").replace("/", "_")}


def _content(path: Path) -> bytes:
    """A file's bytes; of a Parquet file, whose pages are compressed, the text columns as well."""
    raw = path.read_bytes()
    return raw + b"\n" + _text_columns(raw) if path.suffix == ".parquet" else raw


def _text_columns(raw: bytes) -> bytes:
    """The distinct texts of every column that holds any; nothing of a file that is no Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(raw))
    except (pa.ArrowException, OSError):
        return b""
    texts = (text for column in table.columns for chunk in column.chunks for text in _texts(chunk))
    return b"\n".join(texts)


def _texts(column: pa.Array) -> Iterator[bytes]:
    """The distinct texts and byte strings of a column, those inside lists and structs too."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        yield from _texts(column.dictionary)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _texts(column.flatten())
    elif pa.types.is_struct(kind):
        for child in column.flatten():
            yield from _texts(child)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield from (text.encode() for text in column.unique().to_pylist() if text)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        yield from (content for content in column.unique().to_pylist() if content)
