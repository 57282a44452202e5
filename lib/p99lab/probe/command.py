"""What `p99lab probe` and `latency-probe` do: build a target, prime it, drive a load, summarise, write."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import Field

from p99lab.errors import BadParameterError
from p99lab.probe.documents import Span
from p99lab.probe.intervals import Figure, min_n
from p99lab.probe.load import Progress, Run, drive
from p99lab.probe.records import write_parquet
from p99lab.probe.stats import QUANTILES, Distribution, Summary, measured, metric_values, summarise, write_histograms
from p99lab.probe.targets import Endpoint, InProcessTarget, OpenAITarget, Target, shared_interpreter
from p99lab.probe.workload import CacheState, Load, Workload, digest, make_documents, parse_load, queries
from p99lab.strict import StrictModel

OutputFormat = Literal["table", "json", "csv"]
COLLECT_FROM_S = 60.0
DEFAULT_MODEL = "smollm2-135m"


class Output(StrictModel):
    """How a result is printed, and the folder that gets its files, if any."""

    format: OutputFormat = "table"
    folder: Path | None = None


class ProbeOptions(StrictModel):
    """One probe. `target`: `in-process` or the URL of an OpenAI-compatible endpoint.

    `random_tokens`: documents of random ids of this vocabulary, for a target whose weights mean nothing.
    """

    target: str = "in-process"
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key_env: str = "OPENAI_API_KEY"
    documents: int = Field(4, ge=1)
    document_tokens: Span = (1000, 2000)
    question_tokens: Span = (48, 80)
    answer_tokens: Span = (16, 16)
    random_tokens: int | None = Field(None, ge=2)
    load: Literal["closed", "open"] = "closed"
    concurrency: int = Field(4, ge=1)
    rate: float | None = Field(None, gt=0)
    arrivals: Literal["poisson", "gamma", "constant"] = "poisson"
    cv: float = Field(2.0, gt=0)
    duration_s: float | None = Field(None, gt=0)
    requests: int | None = Field(None, ge=1)
    warmup_share: float = Field(0.1, ge=0, lt=1)
    timeout_s: float = Field(600.0, gt=0)
    cache: CacheState = "primed"
    seed: int = Field(0, ge=0)

    @property
    def workload(self) -> Workload:
        """Cold means that nothing of a query was sent before: each document starts with a line of its own."""
        return Workload.parse(
            {
                "num_documents": self.documents,
                "document_tokens": self.document_tokens,
                "question_tokens": self.question_tokens,
                "answer_tokens": self.answer_tokens,
                "fresh_documents": self.cache == "cold",
                "vocab_size": self.random_tokens,
                "seed": self.seed,
            }
        )

    @property
    def load_spec(self) -> Load:
        """The load; 30 s where neither a duration nor a number of requests is given."""
        duration_s = 30.0 if self.duration_s is None and self.requests is None else self.duration_s
        limits = {"duration_s": duration_s, "num_requests": self.requests, "warmup_share": self.warmup_share}
        common = {"kind": self.load, **limits, "timeout_s": self.timeout_s, "cache": self.cache}
        if self.load == "closed":
            return parse_load({**common, "concurrency": self.concurrency})
        if self.rate is None:
            raise BadParameterError("an open load needs a rate")
        return parse_load({**common, "rate": self.rate, "arrivals": self.arrivals, "cv": self.cv})


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was asked, what happened, and the figures."""

    options: ProbeOptions
    target: str
    transport: str
    workload_digest: str
    began_unix_s: float
    run: Run
    summary: Summary

    @property
    def prompt_tokens(self) -> dict[str, int | None]:
        """Shortest and longest prompt sent, as the target counts tokens, or as estimated where it does not."""
        lengths = [record.num_prompt_tokens for record in self.run.records]
        return {"min": min(lengths, default=None), "max": max(lengths, default=None)}

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `--output-format json`."""
        return {
            "target": {"name": self.target, "transport": self.transport},
            "options": self.options.model_dump(mode="json"),
            "workload_digest": self.workload_digest,
            "began_unix_s": self.began_unix_s,
            "prompt_tokens": self.prompt_tokens,
            **self.summary.as_dict(),
        }


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


def probe(options: ProbeOptions, on_progress: Callable[[Progress], None] | None = None) -> ProbeResult:
    """Run one probe to its end, in the caller's thread.

    Raises:
        BadParameterError: options that do not fit together or the target.
        TargetError: the target cannot be reached.
        ModelError: the in-process engine's model cannot be used.
    """
    return asyncio.run(probe_async(options, on_progress))


async def probe_async(options: ProbeOptions, on_progress: Callable[[Progress], None] | None = None) -> ProbeResult:
    """`probe`, inside a running event loop (a notebook's)."""
    workload, load = options.workload, options.load_spec
    async with _opened(options) as target:
        documents = make_documents(workload, target.tokenize)
        if load.cache == "primed":
            await target.prime(documents)
        began = time.time()
        run = await drive(target, load, queries(workload, documents, load, target.tokenize), on_progress=on_progress)
        summary = summarise(run, load)
        return ProbeResult(options, target.name, target.transport, digest(workload, documents), began, run, summary)


def write(result: ProbeResult, folder: Path) -> None:
    """`requests.parquet`, `summary.json` and `latency.hlog` into a folder, which is made.

    Raises:
        BadParameterError: the folder cannot be written.
    """
    counted = measured(result.run.records)
    window = result.summary.steady_window
    used = counted[window.first : window.last + 1]
    seconds = max((record.end_s for record in result.run.records), default=0.0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_parquet(result.run.records, folder / "requests.parquet")
        (folder / "summary.json").write_bytes(to_json(result))
        write_histograms(metric_values(used), folder / "latency.hlog", result.began_unix_s, seconds)
    except OSError as error:
        raise BadParameterError(f"cannot write to {folder}: {error.strerror}") from None


def to_json(result: ProbeResult) -> bytes:
    return orjson.dumps(result.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def to_csv(result: ProbeResult) -> str:
    """One line per metric and figure: metric, figure, value_s, low_s, high_s, n, effective_n, reason."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["metric", "figure", "value_s", "low_s", "high_s", "n", "effective_n", "reason"])
    for metric, distribution in result.summary.metrics.items():
        for name, figure in _figures(distribution).items():
            bounds = [figure.value, figure.low, figure.high]
            lines.writerow([metric, name, *bounds, figure.n, figure.effective_n, figure.reason])
    return text.getvalue()


def to_rows(result: ProbeResult) -> list[list[str]]:
    """The table for people, milliseconds: metric, n, then a cell per figure with its interval.

    Figures from send are left to the other formats where they are the same (closed loads).
    """
    closed = result.options.load == "closed"
    return [
        [
            name.replace("_from_send", ", sent"),
            str(metric.n),
            *(_cell(column, figure) for column, figure in _figures(metric).items()),
        ]
        for name, metric in result.summary.metrics.items()
        if metric.n and not (closed and name.endswith("_from_send"))
    ]


def table_header() -> list[str]:
    return ["ms", "n", *QUANTILES, "max", "std"]


def remarks(result: ProbeResult) -> list[str]:
    """What belongs under the table: label, counts, cache, window, reasons for doubt."""
    summary = result.summary
    counts = ", ".join(f"{count} {name}" for name, count in summary.counts.items())
    window, hits = summary.steady_window, summary.hit_rates
    share = "not reported" if hits.cached_share is None else f"{hits.cached_share:.1%} of prompt tokens"
    return [
        f"target: {result.target}, {result.transport}",
        f"requests: {counts}",
        f"prompts: {_shortest_and_longest(result)} tokens as the target counts them",
        f"cache: declared {hits.declared}, {hits.verdict}, hits {share}",
        f"window: {window.verdict}, {window.start_s:.1f}–{window.end_s:.1f} s, {window.num_requests} requests",
        *(f"note: {note}" for note in summary.notes),
        *(f"VOID: {reason}" for reason in summary.void),
    ]


def _shortest_and_longest(result: ProbeResult) -> str:
    return "–".join(str(bound) for bound in dict.fromkeys(result.prompt_tokens.values()))


@asynccontextmanager
async def _opened(options: ProbeOptions) -> AsyncIterator[Target]:
    if options.target == "in-process":
        with shared_interpreter(), _engine(options) as engine:
            yield InProcessTarget(engine, options.model or DEFAULT_MODEL)
        return
    endpoint = OpenAITarget(options.target, options.model, options.endpoint, options.api_key_env)
    await endpoint.open()
    try:
        yield endpoint
    finally:
        await endpoint.close()


def _engine(options: ProbeOptions) -> Any:
    try:
        from p99lab.engine.engine import Engine
    except ModuleNotFoundError as error:
        raise BadParameterError(
            f"an in-process target needs the engine ({error.name} is missing): install the extra 'engine' "
            "(in a checkout: pip install '.[engine]'), or give the URL of an endpoint"
        ) from None
    from p99lab.engine.config import EngineConfig

    return Engine(EngineConfig.parse({"model": options.model or DEFAULT_MODEL}))


def _figures(distribution: Distribution) -> dict[str, Figure]:
    largest = Figure(distribution.max_s, None, None, distribution.n, distribution.effective_n)
    return {**distribution.percentiles, "max": largest, "std": distribution.std}


def _cell(name: str, figure: Figure) -> str:
    if figure.value is None:
        needed = min_n(QUANTILES[name]) if name in QUANTILES else 1
        return f"n < {needed}" if figure.n < needed else "–" if name == "std" else "failed"
    bounds = "" if figure.low is None and figure.high is None else f"\n{_ms(figure.low)}–{_ms(figure.high)}"
    return f"{_ms(figure.value)}{bounds}"


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"
