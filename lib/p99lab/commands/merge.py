"""`p99lab merge`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from p99lab.commands.console import out


def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of p99lab probe --output.")],
    output_format: Annotated[str, typer.Option(help="table, json or csv.")] = "table",
    output: Annotated[Path | None, typer.Option(help="Folder for the merged figures and histograms.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier result in --output.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Merge results of other conditions, and void ones.")] = False,
) -> None:
    """Several runs of the same probe as one sample: P99 with the interval that all their requests give.

    Repeat a run with --repetition 1, 2, …, so that each asks questions of its own.

    Exit code 2: results that are not of one kind, or a parameter that does not fit.
    """
    from p99lab.commands.figures import figure_table
    from p99lab.probe import merge as merging
    from p99lab.probe import output as files
    from p99lab.probe import tables

    shape = files.Printed.parse({"format": output_format})
    result = merging.merge(folders, force)
    if output is not None:
        merging.write(result, files.Folder(output, overwrite))
    if shape.format == "json":
        sys.stdout.write(files.to_json(result.as_dict()).decode())
    elif shape.format == "csv":
        sys.stdout.write(files.figure_lines(result.metrics))
    else:
        for line in tables.void_lines(result.void):
            out.print(escape(line), style="bold red")
        figure_table(tables.rows(result.metrics, also_from_send=not result.is_closed))
        out.print(*map(escape, tables.merged_remarks(result)), sep="\n")
