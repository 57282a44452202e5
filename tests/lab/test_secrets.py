"""Secrets are struck out in every shape, and found wherever they got to; no test holds a whole key in its source."""

from __future__ import annotations

import base64
import html
import io
import json
import urllib.parse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.errors import BadParameterError
from p99lab.lab import secrets
from p99lab.lab.secrets import Secrets

pytestmark = pytest.mark.light

NAME = "P99LAB_SECRET_API_KEY"
VALUE = 'p<w>"ü\\+/ 7&x'
ENVIRONMENT = {NAME: VALUE}
SHAPES = {
    "plain": VALUE,
    "json": json.dumps({"key": VALUE}, ensure_ascii=False),
    "json, ascii": json.dumps({"key": VALUE}),
    "repr": repr([VALUE]),
    "repr in json": json.dumps({"text": repr([VALUE])}),
    "html": html.escape(VALUE),
    "url": "https://host/?key=" + urllib.parse.quote(VALUE, safe=""),
    "base64": base64.b64encode(VALUE.encode()).decode(),
    "basic authorization": base64.b64encode(f"user:{VALUE}".encode()).decode(),
    "base64, url-safe": base64.urlsafe_b64encode(f"u:{VALUE}:x".encode()).decode(),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_is_struck_out_and_found_in_every_shape(tmp_path: Path, shape: str) -> None:
    text = f"before {SHAPES[shape]} after"
    redacted = Secrets.of(ENVIRONMENT).redact(text)
    assert redacted.startswith("before ")
    assert redacted.endswith(" after")
    assert "(secret)" in redacted
    assert VALUE not in redacted
    (tmp_path / "a.txt").write_text(text)
    assert secrets.find(tmp_path, ENVIRONMENT) == [f"a.txt: the value of ${NAME}"]
    (tmp_path / "a.txt").write_text(redacted)
    assert secrets.find(tmp_path, ENVIRONMENT) == []


@given(st.binary(max_size=7), st.text("abcXYZ019+/=-", min_size=8, max_size=30), st.binary(max_size=7))
def test_base64_hides_no_value_wherever_it_stands(before: bytes, value: str, after: bytes) -> None:
    encoded = base64.b64encode(before + value.encode() + after).decode()
    assert "(secret)" in Secrets({NAME: value}).redact(encoded)


def test_what_is_json_stays_json() -> None:
    told = {"reason": VALUE, "other": ["x", VALUE * 2], "cells": None}
    redacted = Secrets.of(ENVIRONMENT).redact(json.dumps(told, ensure_ascii=False))
    assert json.loads(redacted) == {"reason": "(secret)", "other": ["x", "(secret)(secret)"], "cells": None}


@pytest.mark.parametrize("plain", ["notebook", "12345678", "STATUS_OK"])
def test_a_secret_that_is_any_word_or_number_is_refused(plain: str) -> None:
    with pytest.raises(BadParameterError, match=rf"\${NAME} is a plain word or number") as caught:
        Secrets.of({NAME: plain})
    assert plain not in str(caught.value)


def test_records_keep_their_keys_and_numbers() -> None:
    told = {VALUE: 1, "reason": f"said {VALUE}", "cells": [{"seconds": 1.5, "heading": VALUE}], "ended": None}
    expected = {VALUE: 1, "reason": "said (secret)", "cells": [{"seconds": 1.5, "heading": "(secret)"}], "ended": None}
    assert Secrets.of(ENVIRONMENT).redact_values(told) == expected


def test_without_secrets_a_text_is_itself() -> None:
    assert Secrets.of({}).redact("as it was") == "as it was"


def test_a_secret_too_short_to_be_recognised_is_refused() -> None:
    with pytest.raises(BadParameterError, match=rf"\${NAME} is shorter than 8 characters") as caught:
        Secrets.of({NAME: "abc123"})
    assert "abc123" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("OPENAI_API_KEY", "x" * 20, True),
        ("SOME_TOKEN", "x" * 20, True),
        ("API_KEY", "x" * 20, True),
        ("AWS_SECRET_ACCESS_KEY", "x" * 20, True),
        ("PGPASSWORD", "x" * 20, True),
        ("SOME_TOKEN", "disabled", False),
        ("PATH", "x" * 20, False),
    ],
)
def test_other_variables_are_secret_by_their_names(name: str, value: str, is_secret: bool) -> None:
    assert (Secrets.of({name: value}).redact(value) == "(secret)") == is_secret


KEYS = {
    "an OpenAI-style key (sk-…)": "sk-" + "proj-Ab1_" * 4,
    "a Hugging Face token (hf_…)": "hf_" + "Ab1" * 12,
    "a GitHub token (ghp_…)": "ghp_" + "Ab1" * 12,
    "an AWS key id (AKIA…)": "AKIA" + "AB12" * 4,
    "an authorization header": '"Authorization": "Bearer ' + "Ab1." * 6 + '"',
    "a private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("what", KEYS)
@pytest.mark.parametrize("file", ["notebook.ipynb", "report.html", "logs/deep/x.bin"])
def test_the_usual_shapes_of_keys_are_found_and_not_shown(tmp_path: Path, what: str, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x00\xff " + KEYS[what].encode() + b" \xfe")
    assert secrets.find(tmp_path, {}) == [f"{file}: {what}"]


@pytest.mark.parametrize(
    "harmless",
    [
        "task-queue-and-some-more-words",
        "Authorization: Bearer $KEY",
        "half_" + "Ab1" * 12,
        "AKIAxyz",
        "risk-" + "a" * 30,
    ],
)
def test_what_only_resembles_a_key_is_none(tmp_path: Path, harmless: str) -> None:
    (tmp_path / "a.txt").write_text(harmless)
    assert secrets.find(tmp_path, {}) == []


KEY = KEYS["a GitHub token (ghp_…)"]
COLUMNS = {
    "text": pa.array(["x"] * 500 + [KEY]),
    "large text": pa.array(["x", KEY], pa.large_string()),
    "bytes": pa.array([b"x", KEY.encode()]),
    "repeated text": pa.array(["x", KEY] * 50).dictionary_encode(),
    "lists": pa.array([["x"], None, ["y", KEY]]),
    "structs": pa.array([{"a": {"b": KEY}, "c": 1}]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_compressed_columns_of_parquet_are_read(tmp_path: Path, kind: str) -> None:
    buffer = io.BytesIO()
    table = pa.table({"n": range(len(COLUMNS[kind])), "column": COLUMNS[kind]})
    pq.write_table(table, buffer, compression="zstd", write_statistics=False)
    (tmp_path / "metrics.parquet").write_bytes(buffer.getvalue())
    assert secrets.find(tmp_path, {}) == ["metrics.parquet: a GitHub token (ghp_…)"]


def test_a_broken_parquet_file_is_searched_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 " + KEY.encode() + b" PAR1")
    assert secrets.find(tmp_path, {}) == ["a.parquet: a GitHub token (ghp_…)"]
