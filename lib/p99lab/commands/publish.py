"""`p99lab publish`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p99lab.commands.console import out
from p99lab.errors import BadParameterError


def publish(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or an unambiguous beginning of it.")],
    allow_smoke: Annotated[bool, typer.Option("--allow-smoke", help="Smoke runs too; no ledger counts them.")] = False,
    outputs: Annotated[Path | None, typer.Option(help="Where the runs are (default: outputs/).")] = None,
) -> None:
    """Copy a run as a small page with its figures into outputs/published/, which git holds, under new checksums.

    Refused, with exit code 1, are runs that did not complete, were changed since, hold a secret, a host's name or a
    path of this machine, and what would make the published folder larger than 10 MiB.
    """
    from p99lab import project
    from p99lab.lab import index, runs
    from p99lab.lab import publish as publishing

    if outputs is not None and not outputs.is_dir():
        raise BadParameterError(f"{outputs} is no directory of runs")
    where = outputs or project.outputs_dir()
    found = runs.find(where, run)
    if found.status == "no record":
        raise BadParameterError(f"{found.path} is no run: it has no run.json")
    published = publishing.publish(where, found, allow_smoke)
    index.write(where)
    out.print(f"{published.path} ({published.num_bytes / 1024:.0f} KiB)", markup=False)
    if published.left_out:
        out.print(f"left out: {', '.join(published.left_out)}", markup=False)
    for remark in publishing.remarks(found):
        out.print(f"note: {remark}", markup=False)
