"""The command line: `p99lab …` and `latency-probe`. The commands themselves are in `commands`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning OpenMP threads starve busy cores

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from p99lab.commands import bench, claims, models, probe, proof, run
from p99lab.errors import BadParameterError, P99labError, did_you_mean

_UsageError: Any = typer.BadParameter.__base__  # click's, or typer's own copy of it, as the release has it

app = typer.Typer(name="p99lab", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.command()(run.run)
app.command()(probe.probe)
app.command()(claims.claims)
app.command()(bench.bench)
app.command()(proof.proof)

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
