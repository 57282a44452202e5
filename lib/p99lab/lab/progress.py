"""A run's progress on a console: one live line on a terminal, a plain line per cell everywhere else."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from p99lab import project
from p99lab.lab import resume
from p99lab.lab.results import shown
from p99lab.lab.runner import Outcome
from p99lab.lab.secrets import Secrets


class ConsoleProgress:
    """An observer of cells; use it as a context manager around the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._live.add_task("starting the kernel")
        self._heading = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def cell_started(self, number: int, total: int, heading: str) -> None:
        self._heading = heading
        self._live.reset(self._task, description=escape(f"[{number}/{total}] {heading}"))

    def cell_ended(self, number: int, total: int, status: str, seconds: float) -> None:
        self._console.print(escape(f"[{number}/{total}] {self._heading}: {status} in {seconds:.1f} s"))


def print_outcome(outcome: Outcome, console: Console) -> None:
    """The notebook's summary table where it left one, how the run ended, and where its report is."""
    summary = outcome.folder.path / "metrics" / "summary.parquet"
    if summary.exists():
        console.print(_table(pq.read_table(summary), outcome.secrets))
    if outcome.ending.reason:
        console.print(f"{outcome.ending.status}: {outcome.ending.reason}", markup=False)
    if outcome.contains_secret:
        console.print(f"contains a secret, not to be published: {', '.join(outcome.contains_secret)}", markup=False)
    if outcome.report.is_file():
        console.print(f"report: {_shown_path(outcome.report)}", markup=False)
    else:
        problem = outcome.folder.read_json("run.json").get("report_problem") or "nothing ran"
        console.print(f"no report: {problem}; the run is in {_shown_path(outcome.folder.path)}", markup=False)
    if outcome.can_be_resumed:
        console.print(f"resume with: {resume.command(outcome.folder, project.outputs_dir())}", markup=False)


def _table(columns: pa.Table, secrets: Secrets) -> Table:
    table = Table(box=box.SIMPLE)
    for name in columns.column_names:
        table.add_column(name, overflow="fold")
    for row in columns.to_pylist():
        table.add_row(*(escape(secrets.redact(shown(value))) for value in row.values()))
    return table


def _shown_path(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
