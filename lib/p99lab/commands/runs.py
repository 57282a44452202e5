"""`p99lab runs`: list, show, compare, sql, index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from p99lab.commands.console import out
from p99lab.errors import BadParameterError

Outputs = Annotated[Path | None, typer.Option(help="Where the runs are (default: outputs/).")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
Notebook = Annotated[str | None, typer.Option(help="Only of this notebook: its number, its name, or a beginning.")]
Status = Annotated[str | None, typer.Option(help="Only those that ended so: completed, failed, 'timed out', …")]
Last = Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the newest N.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, an unambiguous beginning of it, or its folder.")]


def overview(
    context: typer.Context,
    notebook: Notebook = None,
    status: Status = None,
    last: Last = None,
    as_json: AsJson = False,
    outputs: Outputs = None,
) -> None:
    """The runs below outputs/, newest first; `show`, `compare`, `sql` and `index` do more with them."""
    if context.invoked_subcommand is None:
        list_runs(notebook, status, last, as_json, outputs)


def list_runs(
    notebook: Notebook = None,
    status: Status = None,
    last: Last = None,
    as_json: AsJson = False,
    outputs: Outputs = None,
) -> None:
    """The runs below outputs/, newest first. Checksums are not looked at here: `show` does.

    `cut off`: no end was recorded and the run's runner is not alive on this machine. `+` after the code: with changes.
    """
    from p99lab.lab import runs

    chosen = runs.choose(runs.catalogue(_outputs(outputs)), notebook, status, last)
    if as_json:
        out.print_json(data=[run.as_record() for run in chosen])
    elif chosen:
        is_cut = out.is_terminal  # at the terminal's edge; whole lines for a file or a pipe
        out.print(
            runs.table(chosen), markup=False, no_wrap=True, crop=is_cut, overflow="ellipsis" if is_cut else "ignore"
        )
        if any(run.revision.endswith("+") for run in chosen):
            out.print("+ after the code: with changes that were not committed", markup=False)
    else:
        out.print(f"no such run in {_outputs(outputs)}", markup=False)


def show(run: RunId, as_json: AsJson = False, outputs: Outputs = None) -> None:
    """One run in full: how it ended, its cells, figures and claims, and whether its files are as it wrote them."""
    from p99lab.lab import inspection, runs

    found = inspection.inspect(runs.find(_outputs(outputs), run))
    if as_json:
        out.print_json(data=found.as_record())
    else:
        out.print(inspection.page(found), soft_wrap=False)


def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run, as for `show`, or a folder of `p99lab probe --output`.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What is compared with it.")],
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Verdicts even if tier, workload, load or hardware differ.")
    ] = False,
    as_json: AsJson = False,
    outputs: Outputs = None,
) -> None:
    """For each metric whether B is better or worse than A, or that nobody can tell; first, what is not alike.

    The verdict is the 95 % interval of the ratio B/A (MOVER, from the two intervals): better or worse if it leaves 1
    out. There is none where the two were asked different things. Exit code 2: they are of different kinds, or the
    same; 1: a run was changed after its end.
    """
    from p99lab.lab import compare as comparing

    found = comparing.compare(_outputs(outputs), a, b, anyway)
    if as_json:
        out.print_json(data=found.as_record())
    else:
        out.print(comparing.page(found), soft_wrap=False)


def sql(
    query: Annotated[str, typer.Argument(help="SELECT … over the views runs, figures, percentiles and requests.")],
    as_json: AsJson = False,
    outputs: Outputs = None,
) -> None:
    """DuckDB's SQL over all runs, in memory; every view has a column `run`."""
    from p99lab.lab import runs
    from p99lab.lab.results import shown

    columns, rows = runs.query(_outputs(outputs), query)
    if as_json:
        out.print_json(data=[dict(zip(columns, row, strict=True)) for row in rows], default=str)
        return
    table = Table(*map(escape, columns), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(shown(value)) for value in row))
    out.print(table)


def index(outputs: Outputs = None) -> None:
    """Write outputs/index.html, the page of all runs, and say where it is."""
    from p99lab.lab import index as page

    out.print(str(page.write(_outputs(outputs))), markup=False)


def _outputs(given: Path | None) -> Path:
    from p99lab import project

    if given is not None and not given.is_dir():
        raise BadParameterError(f"{given} is no directory of runs")
    return given or project.outputs_dir()
