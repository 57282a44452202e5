"""`p99lab probe`, and `latency-probe` with the article's options."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from p99lab.commands.console import out
from p99lab.errors import BadParameterError

if TYPE_CHECKING:
    from p99lab.probe.command import OnProgress, ProbeResult
    from p99lab.probe.load import Progress
    from p99lab.probe.options import ProbeOptions
    from p99lab.probe.output import Folder
    from p99lab.probe.sweep import Sweep

VOID_EXIT_CODE = 6
SIGNAL_EXIT_CODE = 128  # and the signal's number: 130 after Ctrl-C, 143 after SIGTERM

Target = Annotated[
    str,
    typer.Option(
        metavar="serve|in-process|URL",
        help="serve: the engine behind a server in a process of its own. in-process: beside the clients, for "
        "exploring. Or the URL of an OpenAI-compatible endpoint.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="A model name.", show_default="smollm2-135m, or an endpoint's first one")
]
OutputFormat = Annotated[str, typer.Option(metavar="table|json|csv", help="What is printed.")]
Output = Annotated[Path | None, typer.Option(help="Folder for every request, summary, histograms and plots.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in --output.")]
Strict = Annotated[bool, typer.Option("--strict", help=f"Exit code {VOID_EXIT_CODE} where a result is void.")]


def probe(
    target: Target = "serve",
    model: Model = None,
    endpoint: Annotated[str, typer.Option(metavar="completions|chat", help="Of an URL or of serve.")] = "completions",
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable that holds the key.", show_default="OPENAI_API_KEY, if set"
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The endpoint's, a model name or a path: exact lengths, and the server's counts checked.",
            show_default="none for a URL: lengths are estimated",
        ),
    ] = None,
    documents: Annotated[int, typer.Option(help="Number of documents.")] = 4,
    document_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="Length of a document.")] = "1000-2000",
    question_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="Length of a question.")] = "48-80",
    answer_tokens: Annotated[str, typer.Option(metavar="MIN-MAX", help="Length of an answer.")] = "16",
    random_tokens: Annotated[
        int | None, typer.Option(help="Random ids of this vocabulary instead of text.", show_default="text")
    ] = None,
    load: Annotated[
        str, typer.Option(metavar="closed|open|trace", help="Clients, arrivals at a rate, or a recorded trace.")
    ] = "closed",
    concurrency: Annotated[int, typer.Option(help="Clients of a closed load.")] = 4,
    rate: Annotated[float | None, typer.Option(help="Requests per second of an open load.")] = None,
    rate_end: Annotated[float | None, typer.Option(help="The rate that a ramp ends with.")] = None,
    arrivals: Annotated[
        str, typer.Option(metavar="poisson|gamma|constant|ramp", help="How the requests of an open load come.")
    ] = "poisson",
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals; above 1: bursts.")] = 2.0,
    trace: Annotated[Path | None, typer.Option(help="A trace: JSON lines (Mooncake's too), CSV, or seconds.")] = None,
    speedup: Annotated[float, typer.Option(help="How many times faster than recorded a trace is sent.")] = 1.0,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="RATES|SHARES|auto",
            help="Latency over rates: 0.5,1,2 or 25%,50%,90% of the capacity measured first; auto: 30 to 110 %.",
        ),
    ] = None,
    slo_ms: Annotated[float | None, typer.Option(help="Of a sweep: the latency that goodput must keep.")] = None,
    slo_metric: Annotated[str, typer.Option(metavar="e2e|ttft", help="What the SLO is about.")] = "e2e",
    slo_quantile: Annotated[str, typer.Option(metavar="p50|p90|p99|p999", help="Which quantile keeps it.")] = "p99",
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds of sending, warm-up included.", show_default="30 without --requests; a trace's own length"
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Measured requests; P99 needs 368.", show_default="as --duration allows; 800 at each rate of a sweep"
        ),
    ] = None,
    warmup_share: Annotated[float, typer.Option(help="Share of the run that is not measured.")] = 0.1,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds after which a request counts as failed.", show_default="600; 120 in a sweep"),
    ] = None,
    idle_timeout: Annotated[
        float | None, typer.Option(help="Seconds without anything of an answer that fail it.", show_default="none")
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="cold|primed|mixed", help="Declared cache state.", show_default="primed; mixed for a trace"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of documents, questions and arrivals.")] = 0,
    repetition: Annotated[
        int, typer.Option(help="Other questions about the same documents, for a server that knows the last ones.")
    ] = 0,
    output_format: OutputFormat = "table",
    output: Output = None,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Measure a target's latency: percentiles with confidence intervals, checked for what would spoil them.

    Exit code 0: measured, though the result may be VOID (it says so; --strict makes that 6); 2: a parameter that does
    not fit; 4: a model that cannot be used; 5: an endpoint that does not answer; 130, 143: ended by Ctrl-C, SIGTERM.
    """
    from p99lab.probe.options import ProbeOptions, parse_span, require_key

    values = {
        "target": target,
        "model": model,
        "endpoint": endpoint,
        "tokenizer": tokenizer,
        "documents": documents,
        "document_tokens": parse_span(document_tokens, "--document-tokens"),
        "question_tokens": parse_span(question_tokens, "--question-tokens"),
        "answer_tokens": parse_span(answer_tokens, "--answer-tokens"),
        "random_tokens": random_tokens,
        "load": load,
        "concurrency": concurrency,
        "rate": rate,
        "rate_end": rate_end,
        "arrivals": arrivals,
        "cv": cv,
        "trace": trace,
        "speedup": speedup,
        "duration_s": duration,
        "requests": requests,
        "warmup_share": warmup_share,
        "timeout_s": timeout if timeout is not None else 600.0 if sweep is None else 120.0,
        "idle_timeout_s": idle_timeout,
        "cache": cache,
        "seed": seed,
        "repetition": repetition,
    }
    if api_key_env is not None:
        values["api_key_env"] = require_key(api_key_env)
    options = ProbeOptions.parse(values)
    if sweep is None:
        if slo_ms is not None:
            raise BadParameterError("--slo-ms is for --sweep: one load has no goodput")
        is_void = _probe(options, output_format, _folder(output, overwrite))
    else:
        slo = None if slo_ms is None else (slo_ms, slo_metric, slo_quantile)
        is_void = _sweep(_asked(options, sweep, slo), output_format, _folder(output, overwrite))
    if strict and is_void:
        raise typer.Exit(VOID_EXIT_CODE)


def latency_probe(
    model: Model = None,
    context_length: Annotated[int, typer.Option(help="Document + question + answer, in tokens.")] = 2048,
    concurrency: Annotated[int, typer.Option(help="Clients, without think time.")] = 4,
    duration: Annotated[float, typer.Option(min=1, help="Seconds of sending, warm-up included.")] = 120.0,
    output_format: OutputFormat = "table",
    target: Target = "serve",
    output: Output = None,
    overwrite: Overwrite = False,
    strict: Strict = False,
) -> None:
    """Long-document questions under a closed load; figures from second 60 on.

    Runs of up to 80 seconds give their figures from the end of their first quarter on. Exit codes as p99lab probe.
    """
    from p99lab.probe.options import article_options

    options = article_options(target, model, context_length, concurrency, duration)
    if _probe(options, output_format, _folder(output, overwrite)) and strict:
        raise typer.Exit(VOID_EXIT_CODE)


def _probe(options: ProbeOptions, output_format: str, folder: Folder | None) -> bool:
    """Run, write, print; whether the result is void."""
    from p99lab.commands.figures import figure_table
    from p99lab.probe import command, tables
    from p99lab.probe import output as files

    shape = files.Printed.parse({"format": output_format})
    with _ended_by_signals(), _progress() as on_progress:
        result = command.probe(options, on_progress)
    also = files.write(result, folder) if folder is not None else []
    if shape.format == "json":
        sys.stdout.write(files.to_json(result.as_dict()).decode())
    elif shape.format == "csv":
        sys.stdout.write(files.to_csv(result))
    else:
        _print_lines(tables.void_lines(result.summary.void))
        figure_table(tables.probe_rows(result))
        _print_lines([*tables.remarks(result), *also])
    return bool(result.summary.void)


def _sweep(asked: Sweep, output_format: str, folder: Folder | None) -> bool:
    """Run, write, print; whether one of the results is void."""
    from p99lab.commands.figures import figure_table
    from p99lab.probe import output as files
    from p99lab.probe import sweep as sweeping
    from p99lab.probe import tables

    shape = files.Printed.parse({"format": output_format})

    def keep(name: str, result: ProbeResult) -> None:
        if folder is not None:
            files.write(result, folder.part(name))

    kept = "nothing was kept" if folder is None else f"what was measured whole is in {folder.path}"
    with _ended_by_signals(kept), _progress() as on_progress:
        result = sweeping.sweep(asked, lambda line: typer.echo(line, err=True), keep, on_progress)
    also = files.write_sweep(result, folder) if folder is not None else []
    void = [reason for point in result.points for reason in point.result.summary.void]
    if shape.format == "json":
        sys.stdout.write(files.to_json(result.as_dict()).decode())
    elif shape.format == "csv":
        sys.stdout.write(files.sweep_csv(result))
    else:
        figure_table(tables.sweep_rows(result), tables.sweep_header(result))
        _print_lines([*tables.sweep_remarks(result), *also])
    return bool(void)


def _asked(options: ProbeOptions, rates: str, slo: tuple[float, str, str] | None) -> Sweep:
    """
    Raises:
        BadParameterError: rates or an SLO that are none, or a load of its own beside them.
    """
    from p99lab.probe.sweep import Sweep, parse_rates

    if options.rate is not None or options.load == "trace" or options.arrivals == "ramp":
        raise BadParameterError("--sweep chooses the rates itself: no --rate, ramp or trace beside it")
    numbers, of_capacity = parse_rates(rates)
    limit = None if slo is None else {"limit_s": slo[0] / 1000, "metric": slo[1], "quantile": slo[2]}
    return Sweep.parse({"probe": options, "rates": numbers, "of_capacity": of_capacity, "slo": limit})


def _folder(path: Path | None, overwrite: bool) -> Folder | None:
    from p99lab.probe.output import Folder

    return None if path is None else Folder(path, overwrite)


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        out.print(escape(line), style="bold red" if line.startswith("VOID") else None)


@contextmanager
def _ended_by_signals(kept: str = "nothing was kept") -> Iterator[None]:
    """Ctrl-C and SIGTERM are one line that says what is left of the run, and the end.

    Nothing is waited for, were it a step of an engine or a server's drain: what was started for the probe ends with
    this process. A signal that is ignored stays so.
    """

    def end(number: int, frame: object) -> None:
        how = "interrupted" if number == signal.SIGINT else "terminated"
        clear = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""  # the line of progress goes, the cursor comes back
        with suppress(OSError):
            os.write(2, f"{clear}p99lab: {how}: {kept}\n".encode())
        os._exit(SIGNAL_EXIT_CODE + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[OnProgress | None]:
    """A line that moves, on a terminal; nothing elsewhere."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield None
        return
    with terminal.status("starting …") as status:
        yield _shown_by(status.update)


def _shown_by(update: Callable[[Any], None]) -> OnProgress:
    def show(progress: Progress) -> None:
        counts = f"{progress.num_measured} measured, {progress.num_in_flight} in flight, {progress.num_failed} failed"
        update(f"{progress.latest.phase} · {progress.elapsed_s:.0f} s · {counts}")

    return show
