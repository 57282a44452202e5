from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.errors import ModelError
from p99lab.probe.tokenizer import load_tokenize


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tokenizer of words that begins every text with a special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    backend = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_directory_and_its_file_are_the_same_tokenizer(directory: Path) -> None:
    for name in (directory, directory / "tokenizer.json"):
        assert load_tokenize(str(name))("a b c a").tolist() == [1, 2, 3, 1]  # no special token: it is only a piece


def test_a_dummy_has_bytes() -> None:
    assert load_tokenize("dummy:smollm2-135m")("AB").tolist() == [65, 66]


def test_what_is_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("no-such-model", str(tmp_path), str(tmp_path / "tokenizer.json")):
        with pytest.raises(ModelError) as caught:
            load_tokenize(name)
        assert "\n" not in str(caught.value)
