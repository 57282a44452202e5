"""The command line: `p99lab …` and `latency-probe`. The commands themselves are in `commands`."""

from __future__ import annotations

import importlib.metadata
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning OpenMP threads starve busy cores

import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from p99lab.commands import bench, claims, doctor, merge, models, probe, proof, publish, run, runs, serve
from p99lab.errors import BadParameterError, P99labError, did_you_mean

_UsageError: Any = typer.BadParameter.__base__  # click's, or typer's own copy of it, as the release has it

app = typer.Typer(name="p99lab", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"p99lab {importlib.metadata.version('p99lab')}\n")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """A lab for the tail latency of long-context LLM requests: measured, attributed, held against published claims."""


app.command()(run.run)
app.command()(probe.probe)
app.command()(merge.merge)
app.command()(serve.serve)
app.command()(claims.claims)
app.command()(publish.publish)
app.command()(doctor.doctor)
app.command()(bench.bench)
app.command()(proof.proof)

runs_app = typer.Typer(invoke_without_command=True, callback=runs.overview)
runs_app.command("list")(runs.list_runs)
for command in (runs.show, runs.compare, runs.sql, runs.index):
    runs_app.command()(command)
app.add_typer(runs_app, name="runs")

models_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
models_app.command()(models.fetch)
models_app.command("list")(models.list_models)
app.add_typer(models_app, name="models")

article_app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
article_app.command()(probe.latency_probe)


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
