"""Stop strings across tokens, and tokens that are no text."""

import pytest

from p99lab.engine.output_text import NoText, OutputText
from p99lab.engine.request import FinishReason


class Letters:
    """A detokenizer whose tokens are code points; token 0 leaves half a character behind."""

    def __init__(self) -> None:
        self._open = False

    def push(self, token_id: int) -> str:
        self._open = token_id == 0
        return "" if self._open else chr(token_id)

    def flush(self) -> str:
        return "\ufffd" if self._open else ""


def _emit(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """The pieces of a text whose last letter ends it, if no stop string has before; and whether one has."""
    output = OutputText(Letters(), stop)
    pieces = []
    for at, letter in enumerate(text):
        pieces.append(output.add(ord(letter), FinishReason.LENGTH if at == len(text) - 1 else None))
        if output.stopped:
            break
    return pieces, output.stopped


def test_without_stop_strings_text_passes_straight_through() -> None:
    assert _emit("abc", ()) == (["a", "b", "c"], False)


def test_text_that_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    assert _emit("xENe", ("END",)) == (["x", "", "", "ENe"], False)
    assert _emit("xEN", ("END",)) == (["x", "", "EN"], False)


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
    pieces, stopped = _emit(text, stop)
    assert stopped
    assert "".join(pieces) == expected


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    output = OutputText(Letters(), ())
    assert output.add(0) == ""
    assert output.add(0, FinishReason.LENGTH) == "\ufffd"


def test_a_token_that_stops_its_request_is_no_text_but_releases_what_was_held_back() -> None:
    output = OutputText(Letters(), ("END",))
    assert [output.add(ord("E")), output.add(ord("N"))] == ["", ""]
    assert output.add(ord("D"), FinishReason.STOP) == "EN"
    assert not output.stopped


def test_a_request_without_text_never_stops_by_it() -> None:
    output = NoText()
    assert [output.add(ord("a")), output.add(ord("b"), FinishReason.LENGTH)] == ["", ""]
    assert not output.stopped
