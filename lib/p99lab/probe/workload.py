"""What is sent, and when: a workload (documents, questions, answers) and a load (closed or open)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from p99lab.errors import BadParameterError
from p99lab.probe.documents import (
    Document,
    Passage,
    Span,
    Tokenize,
    fresh,
    question,
    stdlib_documents,
    synthetic_documents,
    synthetic_question,
)
from p99lab.strict import StrictModel

CacheState = Literal["cold", "primed", "mixed"]


class Workload(StrictModel):
    """Long-document question answering: a client picks a document and asks a short question about it.

    Lengths are (least, most) in tokens, drawn uniformly from `seed`. `vocab_size` makes documents of random token ids
    for models without a tokenizer. `fresh_documents`: every query's document starts with a line of its own, so that no
    prefix of it was ever sent.
    """

    num_documents: int = Field(4, ge=1)
    document_tokens: Span = (1000, 2000)
    question_tokens: Span = (48, 80)
    answer_tokens: Span = (16, 16)
    ignore_eos: bool = True
    fresh_documents: bool = False
    vocab_size: int | None = Field(None, ge=2)
    seed: int = Field(0, ge=0)

    @field_validator("document_tokens", "question_tokens", "answer_tokens")
    @classmethod
    def _is_a_range(cls, span: Span) -> Span:
        if not 1 <= span[0] <= span[1]:
            raise ValueError(f"{span[0]}-{span[1]} is not a range of at least 1 token")
        return span

    @property
    def max_context_len(self) -> int:
        return self.document_tokens[1] + self.question_tokens[1] + self.answer_tokens[1]


class _Limits(StrictModel):
    """How long a load runs and which part of it counts.

    `duration_s` is the whole time of sending, warm-up included: its first `warmup_share` is not measured.
    `num_requests` is the number of *measured* requests; before them come `warmup_share` of as many, and at least one
    round of the clients (unless the share is 0). With both, `num_requests` decides the warm-up and whichever ends first
    ends the run. `cache` declares the state of the target's cache; it is checked against its hit counters.
    """

    duration_s: float | None = Field(None, gt=0)
    num_requests: int | None = Field(None, ge=1)
    warmup_share: float = Field(0.1, ge=0, lt=1)
    timeout_s: float = Field(600.0, gt=0)
    cache: CacheState = "primed"

    @model_validator(mode="after")
    def _has_an_end(self) -> _Limits:
        if self.duration_s is None and self.num_requests is None:
            raise ValueError("a load needs duration_s or num_requests")
        return self

    def num_warmup_requests(self, concurrency: int) -> int:
        if self.num_requests is None or self.warmup_share == 0:
            return 0
        return max(concurrency, -(-int(self.num_requests * self.warmup_share * 1000) // 1000))


class ClosedLoad(_Limits):
    """`concurrency` clients, each sending its next request when the last is answered: it measures capacity."""

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(4, ge=1)
    think_time_s: float = Field(0.0, ge=0)


class OpenLoad(_Limits):
    """Requests arrive at `rate` per second whatever the target does.

    `poisson`: exponential gaps. `gamma`: gaps of coefficient of variation `cv` (> 1: bursts). `constant`: even gaps.
    """

    kind: Literal["open"] = "open"
    rate: float = Field(gt=0)
    arrivals: Literal["poisson", "gamma", "constant"] = "poisson"
    cv: float = Field(2.0, gt=0)


Load = ClosedLoad | OpenLoad


def parse_load(values: dict[str, Any]) -> Load:
    """A load from a plain dict with its `kind`.

    Raises:
        BadParameterError: one line with every key at fault.
    """
    kind = values.get("kind")
    if kind not in ("closed", "open"):
        raise BadParameterError(f"kind: a load is 'closed' or 'open', got {kind!r}")
    return OpenLoad.parse(values) if kind == "open" else ClosedLoad.parse(values)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One request to send. `intended_s`: seconds after the start of the run; None in a closed loop."""

    index: int
    document: int
    prompt: Passage
    num_document_tokens: int
    max_tokens: int
    ignore_eos: bool
    intended_s: float | None = None


def make_documents(workload: Workload, tokenize: Tokenize | None = None) -> tuple[Document, ...]:
    """The workload's documents; lengths in the tokenizer's tokens, or estimated without one."""
    if workload.vocab_size is not None:
        endless = synthetic_documents(workload.seed, workload.document_tokens, workload.vocab_size)
    else:
        endless = stdlib_documents(workload.seed, workload.document_tokens, tokenize)
    return tuple(islice(endless, workload.num_documents))


def queries(
    workload: Workload, documents: Sequence[Document], load: Load, tokenize: Tokenize | None = None
) -> Iterator[Query]:
    """The endless sequence of queries. Query i depends on the workload and i alone, its arrival on the load besides:
    every arm of an experiment sees the same ones."""
    times = arrivals(load, workload.seed) if isinstance(load, OpenLoad) else None
    for index in count():
        yield _query(workload, documents, tokenize, index, next(times) if times is not None else None)


def arrivals(load: OpenLoad, seed: int) -> Iterator[float]:
    """Intended arrivals in seconds after the start, ascending, without end."""
    rng = np.random.default_rng([seed, 3])
    now_s = 0.0
    while True:
        now_s += _gap(load, rng)
        yield now_s


def digest(workload: Workload, documents: Sequence[Document]) -> str:
    """What a run sent, in one line: the specification and the content of the documents."""
    hashed = hashlib.blake2b(workload.model_dump_json().encode(), digest_size=16)
    for document in documents:
        hashed.update(document.passage.digest.encode())
    return hashed.hexdigest()


def _query(
    workload: Workload, documents: Sequence[Document], tokenize: Tokenize | None, index: int, intended_s: float | None
) -> Query:
    rng = np.random.default_rng([workload.seed, 4, index])
    document = documents[int(rng.integers(len(documents)))]
    max_tokens = int(rng.integers(workload.answer_tokens[0], workload.answer_tokens[1] + 1))
    if workload.vocab_size is not None:
        asked = synthetic_question(rng, workload.question_tokens, workload.vocab_size)
    else:
        asked = question(document, rng, workload.question_tokens, tokenize)
    if workload.fresh_documents:
        document = fresh(document, rng, tokenize, workload.vocab_size)
    return Query(
        index=index,
        document=document.index,
        prompt=document.passage.then(asked),
        num_document_tokens=document.passage.num_tokens,
        max_tokens=max_tokens,
        ignore_eos=workload.ignore_eos,
        intended_s=intended_s,
    )


def _gap(load: OpenLoad, rng: np.random.Generator) -> float:
    if load.arrivals == "constant":
        return 1.0 / load.rate
    shape = 1.0 if load.arrivals == "poisson" else 1.0 / load.cv**2
    return float(rng.gamma(shape, 1.0 / (load.rate * shape)))
