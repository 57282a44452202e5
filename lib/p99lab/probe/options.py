"""What can be asked of a probe: one frozen model, and how the command line's texts become it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from p99lab.errors import BadParameterError
from p99lab.probe.documents import Span
from p99lab.probe.openai_target import Endpoint
from p99lab.probe.workload import CacheState, Load, Workload, parse_load
from p99lab.strict import StrictModel

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_DURATION_S = 30.0
COLLECT_FROM_S = 60.0


class ProbeOptions(StrictModel):
    """One probe.

    `target`: `serve` (the engine behind a server in a process of its own), `in-process` (the engine beside the clients,
    for exploring), or the URL of an OpenAI-compatible endpoint. `tokenizer`: the endpoint's, a model's name or a path;
    with it lengths are exact, prompts are sent as token ids, and the server's counts are checked. `random_tokens`:
    documents of random ids of this vocabulary, for a target whose weights mean nothing. `repetition`: other questions
    about the same documents, for a target whose cache still holds those of an earlier run.
    """

    target: str = "serve"
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key_env: str = "OPENAI_API_KEY"
    documents: int = Field(4, ge=1)
    document_tokens: Span = (1000, 2000)
    question_tokens: Span = (48, 80)
    answer_tokens: Span = (16, 16)
    tokenizer: str | None = None
    random_tokens: int | None = Field(None, ge=2)
    load: Literal["closed", "open", "trace"] = "closed"
    concurrency: int = Field(4, ge=1)
    rate: float | None = Field(None, gt=0)
    rate_end: float | None = Field(None, gt=0)
    arrivals: Literal["poisson", "gamma", "constant", "ramp"] = "poisson"
    cv: float = Field(2.0, gt=0)
    trace: Path | None = None
    speedup: float = Field(1.0, gt=0)
    duration_s: float | None = Field(None, gt=0)
    requests: int | None = Field(None, ge=1)
    warmup_share: float = Field(0.1, ge=0, lt=1)
    timeout_s: float = Field(600.0, gt=0)
    idle_timeout_s: float | None = Field(None, gt=0)
    cache: CacheState | None = None
    seed: int = Field(0, ge=0)
    repetition: int = Field(0, ge=0)

    @property
    def cache_state(self) -> CacheState:
        """As declared; else `primed`, or `mixed` for a trace, whose own prompts are not known beforehand."""
        return self.cache or ("mixed" if self.load == "trace" else "primed")

    @property
    def primes(self) -> bool:
        return self.cache_state == "primed"

    @property
    def workload(self) -> Workload:
        """Cold means that nothing of a query was sent before: each document starts with a line of its own."""
        return Workload.parse(
            {
                "num_documents": self.documents,
                "document_tokens": self.document_tokens,
                "question_tokens": self.question_tokens,
                "answer_tokens": self.answer_tokens,
                "fresh_documents": self.cache_state == "cold",
                "vocab_size": self.random_tokens,
                "seed": self.seed,
            }
        )

    @property
    def asked(self) -> Workload:
        """The workload as its questions and arrivals are drawn: documents stay, a repetition draws anew."""
        if self.repetition == 0:
            return self.workload
        seed = int(np.random.SeedSequence([self.seed, self.repetition]).generate_state(1)[0])
        return self.workload.model_copy(update={"seed": seed})

    @property
    def load_spec(self) -> Load:
        """The load; 30 s where neither a duration nor a number of requests is given, a trace from end to end.

        Raises:
            BadParameterError: what was given does not belong to this kind of load, or is missing for it.
        """
        self._refuse_strangers()
        common: dict[str, Any] = {"kind": self.load, "cache": self.cache_state, "warmup_share": self.warmup_share}
        common |= {"timeout_s": self.timeout_s, "idle_timeout_s": self.idle_timeout_s}
        common |= {"num_requests": self.requests, "duration_s": self._limit_s}
        return parse_load({**common, **self._of_its_kind()})

    @property
    def _limit_s(self) -> float | None:
        endless = self.duration_s is None and self.requests is None and self.load != "trace"
        return DEFAULT_DURATION_S if endless else self.duration_s

    def _of_its_kind(self) -> dict[str, Any]:
        if self.load == "closed":
            return {"concurrency": self.concurrency}
        if self.load == "open":
            return {"rate": self.rate, "rate_end": self.rate_end, "arrivals": self.arrivals, "cv": self.cv}
        return {"path": self.trace, "speedup": self.speedup}

    def _refuse_strangers(self) -> None:
        if self.load == "open" and self.rate is None:
            raise BadParameterError("an open load needs a rate: --rate")
        if self.load != "open" and self.rate is not None:
            raise BadParameterError(f"a {self.load} load has no rate: add --load open")
        if (self.load == "trace") != (self.trace is not None):
            raise BadParameterError(
                "a trace load needs a file, and only a trace load has one: --load trace --trace FILE"
            )
        self._refuse_half_a_ramp()

    def _refuse_half_a_ramp(self) -> None:
        is_ramp = self.load == "open" and self.arrivals == "ramp"
        if is_ramp != (self.rate_end is not None):
            raise BadParameterError(
                "a ramp needs the rate that it ends with, and only a ramp has one: "
                "--load open --arrivals ramp --rate-end RATE"
            )
        if is_ramp and self._limit_s is None:
            raise BadParameterError("a ramp needs the seconds that it takes: --duration")


def require_key(name: str) -> str:
    """The name of an environment variable that was asked for by name, and so must hold a key.

    Raises:
        BadParameterError: it is not set, or empty.
    """
    if not os.environ.get(name, "").strip():
        raise BadParameterError(f"the environment variable '{name}' holds no API key")
    return name


def parse_span(text: str, flag: str) -> Span:
    """`1000-2000`, or `1500` for exactly that.

    Raises:
        BadParameterError: neither of these.
    """
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise BadParameterError(f"{flag} '{text}' is neither a number nor a range like 1000-2000") from None


def article_options(
    target: str, model: str | None, context_len: int, concurrency: int, duration_s: float
) -> ProbeOptions:
    """`latency-probe`: a closed load over 4 primed documents whose length makes up the context with a question of 64
    and an answer of 16 tokens. Figures are collected from second 60 on, or after a quarter of a run of up to 80 s.

    Raises:
        BadParameterError: a context without room for a document.
    """
    question, answer = 64, 16
    if context_len <= question + answer:
        raise BadParameterError(f"context length {context_len} leaves no document beside {question} + {answer} tokens")
    document = context_len - question - answer
    return ProbeOptions.parse(
        {
            "target": target,
            "model": model,
            "document_tokens": (document, document),
            "question_tokens": (question, question),
            "answer_tokens": (answer, answer),
            "concurrency": concurrency,
            "duration_s": duration_s,
            "warmup_share": COLLECT_FROM_S / duration_s if duration_s > 80.0 else 0.25,
        }
    )
