"""`p99lab doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p99lab.commands.console import out


def doctor(
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 if something is missing that a run needs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Every line as JSON.")] = False,
    outputs: Annotated[Path | None, typer.Option(help="Where runs are to be written (default: outputs/).")] = None,
) -> None:
    """What this machine can measure, and what each missing thing would take. Looks and times; changes nothing."""
    from p99lab import project
    from p99lab.lab import doctor as examining

    findings = examining.examine(outputs or project.outputs_dir())
    if as_json:
        out.print_json(data=[finding.as_record() for finding in findings])
    else:
        out.print(examining.page(findings), soft_wrap=False)
    raise typer.Exit(1 if strict and any(finding.hinders for finding in findings) else 0)
