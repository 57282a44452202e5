"""Stop strings across tokens."""

import pytest

from p99lab.engine.events import OutputText


class Letters:
    """A detokenizer whose tokens are code points; token 0 leaves half a character behind."""

    def __init__(self) -> None:
        self._open = False

    def push(self, token_id: int) -> str:
        self._open = token_id == 0
        return "" if self._open else chr(token_id)

    def flush(self) -> str:
        return "\ufffd" if self._open else ""


def _emit(text: str, stop: tuple[str, ...]) -> tuple[list[str], str, bool]:
    output = OutputText(Letters(), stop)
    pieces = []
    for letter in text:
        pieces.append(output.push(ord(letter)))
        if output.stopped:
            break
    return pieces, output.flush(), output.stopped


def test_without_stop_strings_text_passes_straight_through() -> None:
    assert _emit("abc", ()) == (["a", "b", "c"], "", False)


def test_text_that_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    assert _emit("xENe", ("END",)) == (["x", "", "", "ENe"], "", False)
    assert _emit("xEN", ("END",)) == (["x", "", ""], "EN", False)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abENDcd", ("END",), "ab"),
        ("aEENDcd", ("END",), "aE"),
        ("ENDcd", ("END",), ""),
        ("abcab", ("abd", "ca"), "ab"),
        ("aXbY", ("Y", "X"), "a"),
        ("aab", ("aab", "ab"), ""),
    ],
)
def test_output_ends_before_the_first_complete_stop_string(text: str, stop: tuple[str, ...], expected: str) -> None:
    pieces, rest, stopped = _emit(text, stop)
    assert stopped
    assert "".join(pieces) + rest == expected


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    output = OutputText(Letters(), ())
    assert output.push(0) == ""
    assert output.flush() == "\ufffd"
