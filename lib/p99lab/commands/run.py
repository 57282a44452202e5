"""`p99lab run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from p99lab.commands.console import needs_extra, out
from p99lab.errors import BadParameterError, P99labError

if TYPE_CHECKING:
    from p99lab.lab.job import Job


def run(
    notebook: Annotated[
        str | None, typer.Argument(help="A notebook's number or the beginning of its name: 01, headline.")
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="Which set of parameters: smoke, laptop or h200 (default: laptop).")
    ] = None,
    parameter: Annotated[list[str] | None, typer.Option("-p", metavar="NAME=VALUE", help="Overrides one.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Where runs are written (default: outputs/).")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Take up a run that did not end well: its id, or its folder.")
    ] = None,
    cell_timeout: Annotated[float | None, typer.Option(min=0.0, help="Seconds that one cell may take.")] = None,
    deadline: Annotated[float | None, typer.Option(min=0.0, help="Seconds that the whole run may take.")] = None,
    stall_timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds without output, a finished cell or a file of the run.")
    ] = None,
) -> None:
    """Run a notebook into a folder of its own, and say where its report is.

    Without limits a run takes as long as it needs. One that passes a limit keeps every thread's stack in stacks.txt.

    Exit codes: 0 done, 2 bad parameters, 3 deliverable missing, 10 error in a cell, 20 timed out, 30 kernel died,
    31 out of host memory, 32 out of GPU memory, 40 pre-empted (SIGTERM, SIGUSR1 or SIGHUP), 130 interrupted from the
    keyboard.
    """
    from p99lab.lab.job import check_here, prepare

    if resume is not None:
        job, out_dir = _resumed(resume, notebook, tier, parameter or [], out_dir)
    elif notebook is not None:
        job = prepare(notebook, "laptop" if tier is None else tier, parameter or [])
    else:
        raise BadParameterError("name a notebook (00, headline, …), or a run to --resume")
    check_here(job)
    with needs_extra("lab", "p99lab run"):
        from p99lab.lab import index, progress, runner
        from p99lab.lab.watchdog import Limits
    limits = Limits(cell_timeout, deadline, stall_timeout)
    with progress.ConsoleProgress(out) as observer:
        outcome = runner.run(job, observer, out_dir, limits)
    progress.print_outcome(outcome, out)
    try:
        index.write(outcome.folder.path.parent.parent)
    except (P99labError, OSError) as error:  # the run itself is over and kept
        out.print(f"no page of all runs: {error}", markup=False)
    raise typer.Exit(outcome.ending.exit_code)


def _resumed(
    name: str, notebook: str | None, tier: str | None, overrides: Sequence[str], out_dir: Path | None
) -> tuple[Job, Path]:
    """The job that takes up a run, and where its own folder goes: beside that run's, unless told otherwise."""
    from p99lab import project
    from p99lab.lab import resume, runs
    from p99lab.lab.run_folder import RunFolder

    earlier = runs.find(out_dir or project.outputs_dir(), name).path
    job = resume.prepare(RunFolder(earlier), resume.Asked(notebook, tier, overrides))
    out.print(resume.description(job), markup=False)
    return job, out_dir or earlier.parent.parent
