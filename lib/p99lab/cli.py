"""The command line: `p99lab …` and `latency-probe`. Thin: each command parses, calls one function, prints."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning OpenMP threads starve busy cores

import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console

from p99lab.errors import P99labError

app = typer.Typer(name="p99lab", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
models_app = typer.Typer(no_args_is_help=True, help="Models on this machine.")
app.add_typer(models_app, name="models")

out = Console(highlight=False, soft_wrap=True)


# --- models ---------------------------------------------------------------------------------------------------------

# --- run, claims ----------------------------------------------------------------------------------------------------

# --- probe ----------------------------------------------------------------------------------------------------------

# --- bench ----------------------------------------------------------------------------------------------------------


def guarded(command: Callable[[], Any]) -> None:
    """Run a command line; a user's error is one line on stderr and its own exit code."""
    try:
        command()
    except P99labError as error:
        print(f"p99lab: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)


def main() -> None:
    guarded(app)


if __name__ == "__main__":
    main()
