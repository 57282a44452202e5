"""`p99lab bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from p99lab.commands.console import needs_extra, out


def bench(
    name: Annotated[str, typer.Argument(help="plan (the control plane alone), cpu (beside transformers) or ingest (HTTP).")],
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
