"""`p99lab probe`, and `latency-probe` with the article's options."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from p99lab.commands.console import out

if TYPE_CHECKING:
    from p99lab.probe.command import ProbeOptions
    from p99lab.probe.load import Progress


def probe(
    target: Annotated[
        str, typer.Option(help="in-process, or the URL of an OpenAI-compatible endpoint.")
    ] = "in-process",
    model: Annotated[str | None, typer.Option(help="A model name; an endpoint's first one when not given.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat (URLs only).")] = "completions",
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the API key.")] = "OPENAI_API_KEY",
    documents: Annotated[int, typer.Option(help="Number of documents.")] = 4,
    document_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="Length of a document.")] = "1000-2000",
    question_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="Length of a question.")] = "48-80",
    answer_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="Length of an answer.")] = "16",
    random_tokens: Annotated[int | None, typer.Option(help="Random ids of this vocabulary, not text.")] = None,
    load: Annotated[str, typer.Option(help="closed (clients) or open (arrivals).")] = "closed",
    concurrency: Annotated[int, typer.Option(help="Clients of a closed load.")] = 4,
    rate: Annotated[float | None, typer.Option(help="Requests per second of an open load.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, gamma or constant.")] = "poisson",
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals.")] = 2.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of sending, warm-up included. [default: 30]")] = None,
    requests: Annotated[int | None, typer.Option(help="Measured requests; P99 needs 368.")] = None,
    warmup_share: Annotated[float, typer.Option(help="Share of the run that is not measured.")] = 0.1,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request counts as failed.")] = 600.0,
    cache: Annotated[str, typer.Option(help="Declared cache state: cold, primed or mixed.")] = "primed",
    seed: Annotated[int, typer.Option(help="Seed of documents, questions and arrivals.")] = 0,
    output_format: Annotated[str, typer.Option(help="table, json or csv.")] = "table",
    output: Annotated[Path | None, typer.Option(help="Folder for records, summary and histograms.")] = None,
) -> None:
    """Measure a target's latency: percentiles with confidence intervals, checked for what would spoil them.

    Exit code 2: a parameter that does not fit; 4: a model that cannot be used; 5: an endpoint that does not answer.
    """
    from p99lab.probe.command import ProbeOptions, parse_span

    options = ProbeOptions.parse(
        {
            "target": target,
            "model": model,
            "endpoint": endpoint,
            "api_key_env": api_key_env,
            "documents": documents,
            "document_tokens": parse_span(document_tokens, "--document-tokens"),
            "question_tokens": parse_span(question_tokens, "--question-tokens"),
            "answer_tokens": parse_span(answer_tokens, "--answer-tokens"),
            "random_tokens": random_tokens,
            "load": load,
            "concurrency": concurrency,
            "rate": rate,
            "arrivals": arrivals,
            "cv": cv,
            "duration_s": duration,
            "requests": requests,
            "warmup_share": warmup_share,
            "timeout_s": timeout,
            "cache": cache,
            "seed": seed,
        }
    )
    _probe_and_print(options, output_format, output)


def latency_probe(
    model: Annotated[str | None, typer.Option(help="A model name; an endpoint's first one when not given.")] = None,
    context_length: Annotated[int, typer.Option(help="Document + question + answer, in tokens.")] = 2048,
    concurrency: Annotated[int, typer.Option(help="Clients, without think time.")] = 4,
    duration: Annotated[float, typer.Option(min=1, help="Seconds of sending, warm-up included.")] = 120.0,
    output_format: Annotated[str, typer.Option(help="table, json or csv.")] = "table",
    target: Annotated[
        str, typer.Option(help="in-process, or the URL of an OpenAI-compatible endpoint.")
    ] = "in-process",
    output: Annotated[Path | None, typer.Option(help="Folder for records, summary and histograms.")] = None,
) -> None:
    """Long-document questions under a closed load; figures from second 60 on.

    Runs of up to 80 seconds give their figures from the end of their first quarter on.
    """
    from p99lab.probe.command import article_options

    _probe_and_print(article_options(target, model, context_length, concurrency, duration), output_format, output)


def _probe_and_print(options: ProbeOptions, output_format: str, folder: Path | None) -> None:
    from p99lab.probe import command

    output = command.Output.parse({"format": output_format, "folder": folder})
    terminal = Console(stderr=True)
    with terminal.status("priming …") if terminal.is_terminal else nullcontext() as status:
        result = command.probe(options, _show_progress(status) if isinstance(status, Status) else None)
    if output.folder is not None:
        command.write(result, output.folder)
    if output.format == "table":
        table = Table(*command.table_header(), box=SIMPLE, pad_edge=False)
        for row in command.to_rows(result):
            table.add_row(*row)
        out.print(table, *(escape(line) for line in command.remarks(result)), sep="\n")
    else:
        sys.stdout.write(command.to_json(result).decode() if output.format == "json" else command.to_csv(result))


def _show_progress(status: Status) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        counts = f"{progress.num_measured} measured, {progress.num_in_flight} in flight, {progress.num_failed} failed"
        status.update(f"{progress.latest.phase} · {progress.elapsed_s:.0f} s · {counts}")

    return show
