"""`p99lab run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p99lab.commands.console import needs_extra, out


def run(
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
