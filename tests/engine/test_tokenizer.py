from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p99lab.engine.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer
from p99lab.errors import BadParameterError, ModelError

TEXTS = (
    "",
    "Hello, world",
    "  two spaces\n\n\n12345 3.14159 x1y2\t\tTabs\r\n",
    "\n\n1\n\n  2",
    "def f(x):\n    return x**2  # Größe, naïve café",
    "日本語のテキスト 한국어 العربية हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
    "a\u0301 \u00a0 \u200b ½ ² Ⅷ ١٢٣",
)
CHATS = (
    [{"role": "user", "content": "Who wrote this?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " 12 \n"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Größe 🙂"},
    ],
)


def streamed(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.light
@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer(256)
    token_ids = tokenizer.encode(text)
    assert token_ids.dtype == np.int32
    assert tokenizer.decode(token_ids) == text
    pieces = streamed(tokenizer, token_ids.tolist())
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.light
def test_bytes_fit_any_vocabulary() -> None:
    tokenizer = ByteTokenizer(100, eos_ids=(7,))
    assert tokenizer.encode("zß").max() < 100
    assert tokenizer.decode([65, 66 + 256, 200_000 // 256 * 256 + 67]) == "ABC"
    assert tokenizer.eos_ids == {7}
    assert len(tokenizer.chat([{"role": "user", "content": "x"}])) > 0


def test_no_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        TextTokenizer(tmp_path)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> TextTokenizer:
    return TextTokenizer(smollm2_dir)


@pytest.mark.model
def test_text_and_chat_encode_as_in_transformers(smollm2: TextTokenizer, smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_dir)
    for text in TEXTS:
        token_ids = smollm2.encode(text)
        assert token_ids.tolist() == reference(text)["input_ids"]
        assert smollm2.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    for chat in CHATS:
        expected = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert smollm2.render_chat(chat) == expected
        assert smollm2.chat(chat).tolist() == reference(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.model
def test_smollm2_splits_digits_and_ends_on_its_own_token(smollm2: TextTokenizer) -> None:
    assert smollm2.eos_ids == {2}
    assert [smollm2.decode([token_id]) for token_id in smollm2.encode("\n\n10")] == ["\n\n", "1", "0"]
    assert smollm2.encode("<|im_start|>").tolist() == [1]


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_never_has_half_a_character(smollm2: TextTokenizer, text: str) -> None:
    token_ids = smollm2.encode(text).tolist()
    pieces = streamed(smollm2, token_ids)
    assert "".join(pieces) == smollm2.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49_151) | st.integers(0, 400), max_size=12))
def test_any_ids_stream_to_what_they_decode_to(smollm2: TextTokenizer, token_ids: list[int]) -> None:
    assert "".join(streamed(smollm2, token_ids)) == smollm2.decode(token_ids)


@pytest.mark.model
def test_special_tokens_in_between_change_nothing(smollm2: TextTokenizer) -> None:
    token_ids = smollm2.encode(TEXTS[6]).tolist()
    interleaved = [token_id for pair in zip(token_ids, [2] * len(token_ids), strict=True) for token_id in pair]
    assert "".join(streamed(smollm2, interleaved)) == smollm2.decode(token_ids)


@pytest.mark.model
def test_endless_broken_bytes_are_not_held_forever(smollm2: TextTokenizer) -> None:
    broken = smollm2.encode("🙂").tolist()[0]
    assert smollm2.decode([broken]) == "\ufffd"
    pieces = streamed(smollm2, [broken] * 40)
    assert len([piece for piece in pieces[:-1] if piece]) == 2
    assert set("".join(pieces)) == {"\ufffd"}


@pytest.mark.model
def test_chat_needs_a_template(smollm2: TextTokenizer, smollm2_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((smollm2_dir / "tokenizer.json").read_bytes())
    with pytest.raises(BadParameterError, match="no chat template"):
        TextTokenizer(tmp_path).chat(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadParameterError, match="refuses these messages: roles must alternate"):
        TextTokenizer(tmp_path).chat(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="cannot be compiled"):
        TextTokenizer(tmp_path)
