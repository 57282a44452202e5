"""`p99lab claims`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p99lab.commands.console import out
from p99lab.errors import BadParameterError


def claims(
    every: Annotated[bool, typer.Option("--all", help="Also the claims that no run speaks to yet.")] = False,
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
        out.print(table(rows, every), soft_wrap=False)
