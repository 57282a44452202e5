"""Recorded traffic: when requests came, how long they were, and which prefixes they shared.

Read are lines of seconds, CSV with a header, and JSON lines, Mooncake's among them
(github.com/kvcache-ai/Mooncake, FAST25-release): `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, of
which each stands for a block of 512 tokens *and all before it*. Prompts are not recorded: `Prompts` makes some that
share what the recorded ones shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from p99lab.errors import BadParameterError
from p99lab.probe.documents import Excerpts, Passage, Tokenize, cut, random_ids

COLUMNS = ("time_s", "input_length", "output_length")  # of a CSV; the first alone will do
NUM_CACHED_BLOCKS = 8192  # of some KB each
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CHARS_PER_TOKEN = 8  # enough for most blocks of text


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request: `time_s` after the trace's first one; lengths and blocks where the file has them."""

    time_s: float
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    block_ids: tuple[int, ...] = ()


def read_trace(path: Path, block_tokens: int = 512) -> tuple[TraceRow, ...]:
    """A trace in order of time, which begins at 0.

    Args:
        block_tokens: what a block id of the file stands for. Ids may cover whole blocks only, or the last, partial one
            too.

    Raises:
        BadParameterError: a file that cannot be read, has no requests, or has a bad line, whose number is told.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadParameterError(f"trace {path} cannot be read: {error.strerror}") from None
    rows: list[TraceRow] = []
    for number, parsed in _parsed(path, content.splitlines()):
        row = _checked(path, number, parsed, block_tokens)
        if rows and (row.num_prompt_tokens is None) != (rows[0].num_prompt_tokens is None):
            raise BadParameterError(f"{path}:{number}: either every line has an input_length or none")
        rows.append(row)
    if not rows:
        raise BadParameterError(f"trace {path} has no requests")
    rows.sort(key=lambda row: row.time_s)
    return tuple(replace(row, time_s=row.time_s - rows[0].time_s) for row in rows)


def _parsed(path: Path, lines: Sequence[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, fields) of the lines that are not blank; the header of a CSV names its fields."""
    columns: Sequence[str] | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith(b"{"):
            try:
                yield number, orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise BadParameterError(f"{path}:{number}: no JSON object ({error})") from None
        elif text:
            cells = [cell.strip() for cell in text.decode(errors="replace").split(",")]
            if columns is None:
                columns = _header(path, number, cells)
                if columns == cells:
                    continue
            yield number, _numbers(path, number, columns, cells)


def _header(path: Path, number: int, cells: list[str]) -> Sequence[str]:
    """The columns' names: the first line, or those of `COLUMNS` where it holds numbers already."""
    if set(cells) & set(COLUMNS):
        if unknown := [cell for cell in cells if cell not in COLUMNS]:
            raise BadParameterError(f"{path}:{number}: unknown column '{unknown[0]}' (known: {', '.join(COLUMNS)})")
        return cells
    return COLUMNS[: len(cells)]


def _numbers(path: Path, number: int, columns: Sequence[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(columns):
        raise BadParameterError(f"{path}:{number}: {len(cells)} fields where there should be {len(columns)}")
    try:
        return {name: float(cell) if name == "time_s" else int(cell) for name, cell in zip(columns, cells, strict=True)}
    except ValueError:
        raise BadParameterError(
            f"{path}:{number}: '{','.join(cells)[:60]}' is neither a JSON object nor {', '.join(columns)}"
        ) from None


def _checked(path: Path, number: int, fields: dict[str, Any], block_tokens: int) -> TraceRow:
    try:
        return _row(fields, block_tokens)
    except ValueError as problem:
        raise BadParameterError(f"{path}:{number}: {problem}") from None


def _row(fields: dict[str, Any], block_tokens: int) -> TraceRow:
    if ("timestamp" in fields) == ("time_s" in fields):
        raise ValueError("needs a timestamp (ms) or a time_s, and not both")
    time = fields.get("timestamp", fields.get("time_s"))
    if isinstance(time, bool) or not isinstance(time, int | float) or not math.isfinite(time):
        raise ValueError(f"{time!r} is no time")
    prompt, output = (_length(fields, name) for name in COLUMNS[1:])
    ids = fields.get("hash_ids") or []
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 2**63 for block in ids):
        raise ValueError("hash_ids must be a list of integers from 0 up, of 63 bits")
    if ids and prompt is None:
        raise ValueError("hash_ids without an input_length")
    if prompt is not None and len(ids) > -(-prompt // block_tokens):
        raise ValueError(f"{len(ids)} hash_ids for {prompt} tokens, which are fewer blocks of {block_tokens}")
    return TraceRow(time / 1000 if "timestamp" in fields else time, prompt, output, tuple(ids))


def _length(fields: dict[str, Any], name: str) -> int | None:
    length = fields.get(name)
    if length is not None and (type(length) is not int or not 1 <= length < 2**31):
        raise ValueError(f"{name} must be an integer from 1 up, not {length!r}")
    return length


class Prompts:
    """Prompts for a trace's rows: two of them begin alike as far as their block ids do, and no further.

    A block's tokens are a function of its id and the seed. Blocks without an id belong to their row alone. Ids of
    random tokens where there is a vocabulary, else text from the standard library's sources: cut to the token with a
    tokenizer, to about the length without one. Of different blocks the first tokens (characters, for text) differ while
    their ids are less than `vocab_size` (52) apart; others may have a token or two in common by chance.
    """

    def __init__(self, seed: int, block_tokens: int, tokenize: Tokenize | None, vocab_size: int | None) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._tokenize = tokenize
        self._vocab_size = vocab_size
        self._excerpts = Excerpts() if vocab_size is None else None
        self._whole_block = lru_cache(NUM_CACHED_BLOCKS)(self._make_block)

    def of(self, row: TraceRow, number: int) -> Passage:
        """The prompt of the trace's row `number`, as long as recorded."""
        assert row.num_prompt_tokens is not None  # a trace without lengths has no prompts of its own
        whole, rest = divmod(row.num_prompt_tokens, self._block_tokens)
        lengths = [self._block_tokens] * whole + [rest] * (rest > 0)
        own = range(len(row.block_ids), len(lengths))
        keys = [(0, block) for block in row.block_ids] + [(1, number, place) for place in own]
        return Passage.joined([self._block(key, length) for key, length in zip(keys, lengths, strict=True)])

    def _block(self, key: tuple[int, ...], num_tokens: int) -> Passage:
        """A block, or the beginning of one."""
        block = self._whole_block(key)
        if num_tokens == self._block_tokens:
            return block
        text = cut(block.text, num_tokens, self._tokenize).text
        return Passage.of(text, None if block.token_ids is None else block.token_ids[:num_tokens])

    def _make_block(self, key: tuple[int, ...]) -> Passage:
        rng = np.random.default_rng([self._seed, 5, *key])
        begin = key[1] if key[0] == 0 else -1 - key[1]  # neighbours begin with different ones
        if self._vocab_size is not None:
            ids = random_ids(rng, self._block_tokens, self._vocab_size)
            ids[0] = (begin + self._seed) % self._vocab_size
            return Passage.of("", ids)
        return self._text_block(rng, _word(begin))

    def _text_block(self, rng: np.random.Generator, word: str) -> Passage:
        assert self._excerpts is not None
        state, num_chars = rng.bit_generator.state, self._block_tokens * _CHARS_PER_TOKEN
        while True:
            rng.bit_generator.state = state
            text = f"{word}\n{self._excerpts.pick(rng, num_chars)}"
            block = cut(text, self._block_tokens, self._tokenize)
            if block.num_tokens >= self._block_tokens:
                return block
            num_chars *= 2


def _word(number: int) -> str:
    """A number in letters, the quickest first."""
    letters, left = "", abs(number)
    while not letters or left:
        left, digit = divmod(left, len(_LETTERS))
        letters += _LETTERS[digit if number >= 0 else -1 - digit]
    return letters
