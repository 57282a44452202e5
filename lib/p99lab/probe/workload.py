"""What is sent, and when: a workload (documents, questions, answers) and a load (closed, open, or a trace)."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Annotated, Any, Literal

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
from p99lab.probe.trace import Prompts, TraceRow, read_trace
from p99lab.strict import StrictModel

CacheState = Literal["cold", "primed", "mixed"]
FIRST_COLD = 1_000_000_000  # far above any other query's index


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
    ends the run. A request counts as timed out when it has not ended after `timeout_s`, or, where `idle_timeout_s` is
    given, when that long nothing of its answer came, its first token included. `cache` declares the state of the
    target's cache; it is checked against its hit counters.
    """

    duration_s: float | None = Field(None, gt=0)
    num_requests: int | None = Field(None, ge=1)
    warmup_share: float = Field(0.1, ge=0, lt=1)
    timeout_s: float = Field(600.0, gt=0)
    idle_timeout_s: float | None = Field(None, gt=0)
    cache: CacheState = "primed"

    def num_warmup_requests(self, concurrency: int) -> int:
        if self.num_requests is None or self.warmup_share == 0:
            return 0
        return max(concurrency, -(-int(self.num_requests * self.warmup_share * 1000) // 1000))


class _Endless(_Limits):
    """A load that has to be told when to end."""

    @model_validator(mode="after")
    def _has_an_end(self) -> _Endless:
        if self.duration_s is None and self.num_requests is None:
            raise ValueError("a load needs duration_s or num_requests")
        return self


class ClosedLoad(_Endless):
    """`concurrency` clients, each sending its next request when the last is answered: it measures capacity."""

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(4, ge=1)
    think_time_s: float = Field(0.0, ge=0)


class OpenLoad(_Endless):
    """Requests arrive at `rate` per second whatever the target does.

    `poisson`: exponential gaps. `gamma`: gaps of coefficient of variation `cv` (> 1: bursts). `constant`: even gaps.
    `ramp`: Poisson arrivals whose rate changes evenly from `rate` to `rate_end` over `duration_s`, then stays.
    `cold_every_s`: so often there arrives, besides, a question about a document that nobody has sent before (churn).
    """

    kind: Literal["open"] = "open"
    rate: float = Field(gt=0)
    arrivals: Literal["poisson", "gamma", "constant", "ramp"] = "poisson"
    cv: float = Field(2.0, gt=0)
    rate_end: float | None = Field(None, gt=0)
    cold_every_s: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _ramp_is_whole(self) -> OpenLoad:
        if self.arrivals == "ramp" and (self.rate_end is None or self.duration_s is None):
            raise ValueError("a ramp needs rate_end and duration_s")
        if self.arrivals != "ramp" and self.rate_end is not None:
            raise ValueError(f"rate_end is for a ramp, not for {self.arrivals} arrivals")
        return self


class TraceLoad(_Limits):
    """Requests arrive as a file recorded them (`probe.trace`), as long as recorded where it holds lengths.

    It ends with the file; limits end it earlier. `speedup`: 2 halves the time between arrivals. `start_s`: of the
    recorded time, what is left out. `block_tokens`: what a `hash_id` stands for.
    """

    kind: Literal["trace"] = "trace"
    path: Path
    speedup: float = Field(1.0, gt=0)
    start_s: float = Field(0.0, ge=0)
    block_tokens: int = Field(512, ge=1)
    cache: CacheState = "mixed"

    def rows(self) -> tuple[TraceRow, ...]:
        """The rows to send, their times in seconds of the run; reads the file.

        Raises:
            BadParameterError: see `read_trace`; or nothing comes after `start_s`.
        """
        kept = [row for row in read_trace(self.path, self.block_tokens) if row.time_s >= self.start_s]
        if not kept:
            raise BadParameterError(f"trace {self.path} has ended before start_s = {self.start_s:g}")
        return tuple(replace(row, time_s=(row.time_s - self.start_s) / self.speedup) for row in kept)


Load = ClosedLoad | OpenLoad | TraceLoad
AnyLoad = Annotated[Load, Field(discriminator="kind")]  # a load as a field of another model


def parse_load(values: dict[str, Any]) -> Load:
    """A load from a plain dict with its `kind`.

    Raises:
        BadParameterError: one line with every key at fault.
    """
    for load in (ClosedLoad, OpenLoad, TraceLoad):
        if values.get("kind") == load.model_fields["kind"].default:
            return load.parse(values)
    raise BadParameterError(f"kind: a load is 'closed', 'open' or 'trace', got {values.get('kind')!r}")


def with_end(load: Load) -> Load:
    """The load; a trace without limits gets the number of its rows: the first `warmup_share` of them are its warm-up.

    Raises:
        BadParameterError: see `TraceLoad.rows`.
    """
    if not isinstance(load, TraceLoad) or load.num_requests is not None or load.duration_s is not None:
        return load
    num_rows = len(load.rows())
    num_warmup = min(num_rows - 1, math.ceil(load.warmup_share * num_rows))
    num_measured = num_rows - num_warmup  # of which `warmup_share` is a share where requests are counted
    return load.model_copy(update={"num_requests": num_measured, "warmup_share": num_warmup / num_measured})


def needs_documents(load: Load) -> bool:
    """Whether the load's queries are about documents: those of a trace with lengths have prompts of their own."""
    return not isinstance(load, TraceLoad) or load.rows()[0].num_prompt_tokens is None


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One request to send. `intended_s`: seconds after the start of the run; None in a closed loop.

    In a trace with lengths the document is the first block's id, and `num_document_tokens` counts the blocks at the
    prompt's beginning that an earlier request of the trace had: what a cache without bounds would hold.
    """

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
    workload: Workload, documents: Sequence[Document], load: Load, tokenize: Tokenize | None = None, first: int = 0
) -> Iterator[Query]:
    """The sequence of queries, endless unless the load is a trace. Query i depends on the workload and i alone, its
    arrival on the load besides: every arm of an experiment sees the same ones.

    Args:
        documents: may be empty for a trace that records lengths (`needs_documents`).
        first: the index to begin with; arrivals begin at the start of the run all the same.
    """
    if isinstance(load, TraceLoad):
        yield from _trace_queries(workload, documents, load, tokenize, first)
        return
    if not isinstance(load, OpenLoad):
        yield from (_query(workload, documents, tokenize, index, None) for index in count(first))
        return
    times = arrivals(load, workload.seed)
    usual = (_query(workload, documents, tokenize, first + place, at_s) for place, at_s in enumerate(times))
    if load.cold_every_s is None:
        yield from usual
    else:
        cold = cold_queries(workload, documents, load.cold_every_s, tokenize, first)
        yield from heapq.merge(usual, cold, key=_due_s)


def cold_queries(
    workload: Workload, documents: Sequence[Document], every_s: float, tokenize: Tokenize | None = None, first: int = 0
) -> Iterator[Query]:
    """Without end, one query every so many seconds about a new version of a document that differs from its first line
    on. Their indices begin at `FIRST_COLD`, their documents' where those of `documents` end."""
    changing = workload.model_copy(update={"fresh_documents": True})
    for place in count():
        index, at_s = FIRST_COLD + first + place, (place + 1) * every_s
        query = _query(changing, documents, tokenize, index, at_s)
        yield replace(query, document=len(documents) + place)


def _due_s(query: Query) -> float:
    assert query.intended_s is not None  # those of an open load have one
    return query.intended_s


def arrivals(load: OpenLoad, seed: int) -> Iterator[float]:
    """Intended arrivals in seconds after the start, ascending, without end."""
    rng = np.random.default_rng([seed, 3])
    if load.arrivals == "ramp":
        yield from _ramp(load, rng)
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


def _ramp(load: OpenLoad, rng: np.random.Generator) -> Iterator[float]:
    """A Poisson process of rate 1 on a clock that runs as fast as arrivals are expected.

    Up to t that clock shows rate · t + slope · t² / 2; solved for t in the form that also holds for a slope of 0.
    """
    rate, end, duration_s = load.rate, load.rate_end, load.duration_s
    assert end is not None  # by the load's own check
    assert duration_s is not None
    slope, expected = (end - rate) / duration_s, 0.0
    at_end = (rate + end) / 2 * duration_s
    while True:
        expected += float(rng.exponential())
        if expected <= at_end:
            yield 2 * expected / (rate + math.sqrt(rate**2 + 2 * slope * expected))
        else:
            yield duration_s + (expected - at_end) / end


def _trace_queries(
    workload: Workload, documents: Sequence[Document], load: TraceLoad, tokenize: Tokenize | None, first: int
) -> Iterator[Query]:
    rows = load.rows()
    begin_s = rows[first].time_s if 0 < first < len(rows) else 0.0
    recorded = rows[0].num_prompt_tokens is not None
    prompts = Prompts(workload.seed, load.block_tokens, tokenize, workload.vocab_size) if recorded else None
    seen: set[int] = set()
    for index, row in enumerate(rows):
        num_known = next((place for place, block in enumerate(row.block_ids) if block not in seen), len(row.block_ids))
        seen.update(row.block_ids)
        if index < first:
            continue
        intended_s = row.time_s - begin_s
        if prompts is None:
            query = _query(workload, documents, tokenize, index, intended_s)
            yield replace(query, max_tokens=row.num_output_tokens or query.max_tokens)
            continue
        prompt = prompts.of(row, index)
        yield Query(
            index=index,
            document=row.block_ids[0] if row.block_ids else -1 - index,
            prompt=prompt,
            num_document_tokens=min(num_known * load.block_tokens, prompt.num_tokens),
            max_tokens=row.num_output_tokens or _answer_len(workload, index),
            ignore_eos=workload.ignore_eos,
            intended_s=intended_s,
        )


def _answer_len(workload: Workload, index: int) -> int:
    low, high = workload.answer_tokens
    return int(np.random.default_rng([workload.seed, 4, index]).integers(low, high + 1))
