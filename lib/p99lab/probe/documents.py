"""Long documents and questions about them: cut from the standard library's sources, or synthetic token ids.

Everything is a function of a seed, so that two arms of an experiment, or two machines with the same Python, send the
same bytes. What was sent is hashed; a record states its digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import string
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from p99lab.engine.request import IntArray
from p99lab.errors import BadParameterError

# Text to token ids without special tokens: pieces are tokenised one by one and joined.
Tokenize = Callable[[str], Sequence[int] | IntArray]
Span = tuple[int, int]  # (least, most), both included

CHARS_PER_TOKEN = 3.5  # Python source under the usual 50k-vocabularies; only used where no tokenizer is at hand
_DEFINED = re.compile(r"^\s*(?:def|class)\s+([A-Za-z]\w{3,})", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z]{5,}")
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__", "lib2to3", "distutils", "idle_test"}
)
_LINE_START = re.compile(r"(?<=\n)(?=[A-Za-z])")
_PIECE_CHARS = 8192
_ANSWER = "\nAnswer:"


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A piece of a prompt. `token_ids` ([num_tokens] int32) is None where no tokenizer was given: then `num_tokens`
    is an estimate. Synthetic passages have ids and no text."""

    text: str
    token_ids: IntArray | None
    num_tokens: int
    digest: str

    @classmethod
    def of(cls, text: str, token_ids: Sequence[int] | IntArray | None) -> Passage:
        ids = None if token_ids is None else np.asarray(token_ids, np.int32)
        num_tokens = round(len(text) / CHARS_PER_TOKEN) if ids is None else len(ids)
        return cls(text, ids, num_tokens, _digest(text.encode(), b"" if ids is None else ids.tobytes()))

    @classmethod
    def joined(cls, parts: Sequence[Passage]) -> Passage:
        """All of them, one after the other; the digest is made of theirs."""
        ids = [part.token_ids for part in parts if part.token_ids is not None]
        return cls(
            "".join(part.text for part in parts),
            np.concatenate(ids) if ids and len(ids) == len(parts) else None,
            sum(part.num_tokens for part in parts),
            _digest(*(part.digest.encode() for part in parts)),
        )

    def then(self, other: Passage) -> Passage:
        """Both, one after the other: a long document is hashed once, whatever is asked about it."""
        return Passage.joined((self, other))


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """`names`: what questions ask about. `source`: the files it was cut from, for people."""

    index: int
    passage: Passage
    names: tuple[str, ...]
    source: str


def stdlib_documents(
    seed: int, tokens: Span, tokenize: Tokenize | None = None, root: Path | None = None
) -> Iterator[Document]:
    """Documents of `tokens` length, each cut from files that no other one uses, each with a first line of its own.

    Document i depends on (seed, length range, tokenizer, sources) only, not on how many are taken. Their first tokens
    (without a tokenizer: their first four characters) all differ, so that a token-exact cache finds nothing in common.

    Args:
        tokens: least and most tokens of a document, drawn uniformly.
        root: the directory of sources; the running Python's standard library by default.

    Raises:
        BadParameterError: the sources are used up.
    """
    root = root if root is not None else Path(sysconfig.get_path("stdlib"))
    files = _sources(root)
    order = np.random.default_rng([seed, 1]).permutation(len(files))
    texts = _texts(root, [files[i] for i in order])
    begun: set[object] = set()
    for index in count():
        rng = np.random.default_rng([seed, 2, index])
        yield _document(index, int(rng.integers(tokens[0], tokens[1] + 1)), texts, tokenize, rng, begun)


def synthetic_documents(seed: int, tokens: Span, vocab_size: int) -> Iterator[Document]:
    """Random token ids for models with random weights; the first ids of any `vocab_size` documents differ."""
    starts = np.random.default_rng([seed, 1]).permutation(vocab_size)
    for index in count():
        rng = np.random.default_rng([seed, 2, index])
        ids = random_ids(rng, int(rng.integers(tokens[0], tokens[1] + 1)), vocab_size)
        ids[0] = starts[index % vocab_size]
        yield Document(index, Passage.of("", ids), (), "synthetic")


def question(document: Document, rng: np.random.Generator, tokens: Span, tokenize: Tokenize | None = None) -> Passage:
    """A question about the document, `tokens` long (the length is drawn; without a tokenizer it is estimated).

    It begins with a number of its own: documents have few names, and a question asked before would be found in the
    cache, so that latency fell as a run went on.
    """
    subject, *others = rng.permutation(np.array(document.names or ("it",)))
    number = int(rng.integers(10_000, 100_000))
    sentences = [f"\n\nQuestion {number}: In this code, what does `{subject}` do? Answer briefly."]
    sentences += [f" How does it relate to `{name}`?" for name in others]
    sentences += [" Say only what the code above shows."] * (2 + tokens[1] // 4)
    end = Passage.of(_ANSWER, None if tokenize is None else tokenize(_ANSWER))
    target = int(rng.integers(tokens[0], tokens[1] + 1)) - end.num_tokens
    if target < 1:
        raise BadParameterError(f"a question of {tokens[0]} tokens has no room beside its last line")
    return _whole_sentences(sentences, (tokens[0] - end.num_tokens, target), tokenize).then(end)


def _whole_sentences(sentences: Sequence[str], tokens: Span, tokenize: Tokenize | None) -> Passage:
    """As many sentences as fit into the longest length; cut inside one only where that is shorter than the least."""
    text, whole = "", Passage.of("", None if tokenize is None else ())
    for sentence in sentences:
        text += sentence
        longer = Passage.of(text, None if tokenize is None else tokenize(text))
        if longer.num_tokens > tokens[1]:
            return whole if whole.num_tokens >= tokens[0] else cut(text, tokens[1], tokenize)
        whole = longer
    return whole


def synthetic_question(rng: np.random.Generator, tokens: Span, vocab_size: int) -> Passage:
    return Passage.of("", random_ids(rng, int(rng.integers(tokens[0], tokens[1] + 1)), vocab_size))


def random_ids(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> IntArray:
    """[num_tokens] int32, each below `vocab_size`."""
    return rng.integers(0, vocab_size, num_tokens, dtype=np.int32)


def fresh(document: Document, rng: np.random.Generator, tokenize: Tokenize | None, vocab_size: int | None) -> Document:
    """The document behind a first line that nobody has sent before, no longer than it was: no prefix cache knows it."""
    old = document.passage
    line = "" if vocab_size else "".join(rng.choice(list(string.ascii_letters), 12)) + "\n"
    if old.token_ids is None:
        passage = Passage.of((line + old.text)[: len(old.text)], None)
    else:
        head = random_ids(rng, 1, vocab_size) if vocab_size else np.asarray(_need(tokenize)(line), np.int32)
        ids = np.concatenate([head, old.token_ids])[: len(old.token_ids)]
        passage = Passage.of((line + old.text)[: len(old.text)], ids)
    return Document(document.index, passage, document.names, document.source)


class Excerpts:
    """Stretches of the standard library's sources, picked by a random generator; all files are read once, at first.

    Args:
        root: the directory of sources; the running Python's standard library by default.
    """

    def __init__(self, root: Path | None = None) -> None:
        root = root if root is not None else Path(sysconfig.get_path("stdlib"))
        self._text = "\n".join(text for _, text in _texts(root, _sources(root)))

    def pick(self, rng: np.random.Generator, num_chars: int) -> str:
        """`num_chars` from a random place on, around the end; of two with equal generators one begins the other."""
        start, text = int(rng.integers(len(self._text))), ""
        while len(text) < num_chars:
            text += self._text[start : start + num_chars - len(text)]
            start = 0
        return text


def cut(text: str, num_tokens: int, tokenize: Tokenize | None = None) -> Passage:
    """The beginning of `text` that is `num_tokens` long; all of it where it is shorter.

    Where no cut between two characters is exact, the ids are (of a slightly longer text), and the text falls short.
    """
    if tokenize is None:
        return Passage.of(text[: round(num_tokens * CHARS_PER_TOKEN)], None)
    below, above = Passage.of("", ()), None
    end = min(len(text), max(1, int(num_tokens * CHARS_PER_TOKEN)))
    tried: set[int] = set()
    while end not in tried:  # a secant: tokens are nearly linear in characters
        tried.add(end)
        passage = Passage.of(text[:end], tokenize(text[:end]))
        missing = num_tokens - passage.num_tokens
        if missing == 0:
            return passage
        below, above = (passage, above) if missing > 0 else (below, passage)
        step = int(missing * end / max(1, passage.num_tokens)) or int(np.sign(missing))
        end = min(max(1, end + step), len(text))
    if above is None or above.token_ids is None:
        return below
    return Passage.of(below.text, above.token_ids[:num_tokens])


def _document(
    index: int,
    num_tokens: int,
    texts: Iterator[tuple[str, str]],
    tokenize: Tokenize | None,
    rng: np.random.Generator,
    begun: set[object],
) -> Document:
    sources: list[str] = []
    names: tuple[str, ...] = ()
    whole = Passage.of("", None if tokenize is None else ())
    while whole.num_tokens < num_tokens:
        try:
            path, text = next(texts)
        except StopIteration:
            raise BadParameterError(f"the sources are used up at document {index} of {num_tokens} tokens") from None
        if not sources:
            names = _names(text)
            text = f"{_first_word(names, rng, tokenize, begun)} {index}: sources of {path}\n\n{text}"
        else:
            text = f"file: {path}\n\n{text}"
        sources.append(path)
        for piece in _pieces(text):
            whole = _extended(whole, piece, num_tokens, tokenize)
    begun.add(_first(whole))
    asked = tuple(name for name in names if name in whole.text)[:64]
    return Document(index, whole, asked, " + ".join(sources))


def _pieces(text: str) -> list[str]:
    """A long text in parts that tokenise to the same ids as the whole: tokenisers break between a line's end and a
    letter. They take time more than linear in what they get at once."""
    parts = [""]
    for line in _LINE_START.split(text + "\n"):
        if len(parts[-1]) > _PIECE_CHARS:
            parts.append("")
        parts[-1] += line
    return parts


def _extended(passage: Passage, piece: str, num_tokens: int, tokenize: Tokenize | None) -> Passage:
    """The passage and as much of the next piece as it has room for."""
    room = num_tokens - passage.num_tokens
    if room <= 0:
        return passage
    longer = passage.then(Passage.of(piece, None if tokenize is None else tokenize(piece)))
    return longer if longer.num_tokens <= num_tokens else passage.then(cut(piece, room, tokenize))


def _first_word(names: tuple[str, ...], rng: np.random.Generator, tokenize: Tokenize | None, begun: set[object]) -> str:
    """A word whose first token begins no other document: one of its own names, or else letters."""
    for name in (
        *rng.permutation(np.array(names)),
        *("".join(rng.choice(list(string.ascii_letters), 6)) for _ in range(64)),
    ):
        word = str(name)
        if _first(Passage.of(word, None if tokenize is None else tokenize(word))) not in begun:
            return word
    return "".join(rng.choice(list(string.ascii_letters), 12))  # a vocabulary smaller than the documents are many


def _first(passage: Passage) -> object:
    return passage.text[:4] if passage.token_ids is None else int(passage.token_ids[0])


def _names(text: str) -> tuple[str, ...]:
    """Functions and classes defined in the text, in order; plain words where there are none."""
    return tuple(dict.fromkeys(_DEFINED.findall(text))) or tuple(dict.fromkeys(_WORD.findall(text)))


def _sources(root: Path) -> list[Path]:
    """Files worth asking about, in an order that no file system decides."""
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]  # not even looked into
        found += [Path(folder, name) for name in names if name.endswith(".py") and name not in _LEFT_OUT]
    return [p for p in sorted(found) if not p.name.startswith("_sysconfigdata") and p.stat().st_size >= 1024]


def _texts(root: Path, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(path, text) of the ASCII files: there a cut falls between any two characters."""
    for path in files:
        content = path.read_bytes()
        if content.isascii():
            yield path.relative_to(root).as_posix(), content.decode("ascii")


def _need(tokenize: Tokenize | None) -> Tokenize:
    if tokenize is None:
        raise BadParameterError("a document of token ids needs the tokenizer it was cut with")
    return tokenize


def _digest(*parts: bytes) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()
