"""The command line: `p99lab …` and `latency-probe`. Thin: each command parses, calls one function, prints."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning OpenMP threads starve busy cores

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from p99lab.errors import BadParameterError, P99labError, did_you_mean

if TYPE_CHECKING:
    from p99lab.probe.command import ProbeOptions
    from p99lab.probe.load import Progress

_UsageError: Any = typer.BadParameter.__base__  # click's, or typer's own copy of it, as the release has it

app = typer.Typer(name="p99lab", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
models_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
app.add_typer(models_app, name="models")

out = Console(highlight=False, soft_wrap=True)


# --- models ---------------------------------------------------------------------------------------------------------


@models_app.command("fetch")
def models_fetch(name: Annotated[str, typer.Argument(help="A name of `p99lab models list`.")]) -> None:
    """Bring a model to this machine's cache, once, and print its directory."""
    from p99lab.engine import model_store

    with out.status(f"fetching {name}") if out.is_terminal else nullcontext():
        directory = model_store.fetch(name)
    out.print(escape(str(directory)))


@models_app.command("list")
def models_list(json_output: Annotated[bool, typer.Option("--json", help="As a JSON list.")] = False) -> None:
    """The models that can be named, and which of them are here."""
    from p99lab.engine import model_store

    models = model_store.list_models()
    if json_output:
        out.print_json(data=[asdict(model) for model in models])
        return
    table = Table("name", "state", "parameters", "KV per token", "note", box=None, pad_edge=False)
    for model in models:
        parameters, kib = f"{model.num_parameters / 1e6:,.0f} M", f"{model.kv_bytes_per_token_fp16 / 1024:.1f} KiB"
        table.add_row(model.name, model.state, parameters, kib, model.note)
    out.print(table)


# --- run, claims ----------------------------------------------------------------------------------------------------


@app.command("run")
def run_command(
    notebook: Annotated[str, typer.Argument(help="A notebook's number or the beginning of its name: 01, headline.")],
    tier: Annotated[str, typer.Option(help="Which set of parameters: smoke, laptop or h200.")] = "laptop",
    parameter: Annotated[list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="Overrides one.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Where runs are written (default: outputs/).")] = None,
    cell_timeout: Annotated[float | None, typer.Option(min=0.0, help="Seconds that one cell may take.")] = None,
) -> None:
    """Run a notebook into a folder of its own, and say where its report is.

    Exit codes: 0 done, 2 bad parameters, 3 deliverable missing, 10 error in a cell, 20 timed out, 30 kernel died,
    40 pre-empted (SIGTERM or SIGUSR1), 130 interrupted from the keyboard.
    """
    from p99lab.lab.job import prepare

    job = prepare(notebook, tier, parameter or [])
    with needs_extra("lab", "p99lab run"):
        from p99lab.lab import progress, runner
    with progress.ConsoleProgress(out) as observer:
        outcome = runner.run(job, observer, out_dir, cell_timeout)
    progress.print_outcome(outcome, out)
    raise typer.Exit(outcome.ending.exit_code)


@app.command("claims")
def claims_command(
    as_json: Annotated[bool, typer.Option("--json", help="Every row as JSON.")] = False,
    outputs: Annotated[Path | None, typer.Option(help="Where the runs are (default: outputs/).")] = None,
) -> None:
    """What the article states, what was measured here, and the verdict of the rule in params/claims.yaml."""
    from p99lab import project
    from p99lab.lab.ledger import as_records, ledger, table

    if outputs is not None and not outputs.is_dir():
        raise BadParameterError(f"{outputs} is no directory of runs")
    rows = ledger(outputs or project.outputs_dir())
    if as_json:
        out.print_json(data=as_records(rows))
    else:
        out.print(table(rows), soft_wrap=False)


# --- probe ----------------------------------------------------------------------------------------------------------

article_app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
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


@article_app.command()
def article_probe(
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


# --- bench ----------------------------------------------------------------------------------------------------------


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="plan (the control plane alone) or cpu (beside transformers).")],
    as_json: Annotated[bool, typer.Option("--json", help="Rows with hardware and revision as JSON.")] = False,
) -> None:
    """Measure speed: each figure beside its floor by arithmetic, and beside a peer in the same run.

    `× floor` is 1 at the floor and larger when worse; `× peer` is above 1 where this project is better.
    """
    with needs_extra("engine", f"p99lab bench {name}"):
        from p99lab.lab.bench import report

        rows = report.run(name)
    if as_json:
        out.print_json(data=report.as_record(rows))
    else:
        out.print(report.table(rows))


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Say in one line which extra brings a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise P99labError(
            f"{what} needs {error.name}: install the extra '{extra}' (in a checkout: pip install '.[{extra}]')"
        ) from None


def guarded(commands: Callable[..., Any]) -> None:
    """Run a command line; a user's error, a mistyped flag too, is one line on stderr and its own exit code."""
    try:
        sys.exit(commands(standalone_mode=False))
    except _UsageError as error:
        _fail(_usage_problem(error), BadParameterError.exit_code)
    except P99labError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def _usage_problem(error: Any) -> str:
    """In one line; empty where the whole help was printed instead."""
    if near := getattr(error, "possibilities", None):
        return f"{error.message}{did_you_mean(error.option_name, near)}"
    return " ".join(error.format_message().split())


def _fail(problem: str, exit_code: int) -> NoReturn:
    if problem:
        print(f"p99lab: {problem}", file=sys.stderr)  # noqa: T201
    sys.exit(exit_code)


def main() -> None:
    guarded(app)


def latency_probe() -> None:
    guarded(article_app)


if __name__ == "__main__":
    main()
