"""A run's progress on a console: one live line on a terminal, a plain line per cell everywhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow.parquet as pq
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from p99lab import project
from p99lab.lab import resume
from p99lab.lab.results import shown
from p99lab.lab.runner import Outcome
from p99lab.lab.secrets import Secrets

NOTE = "note"  # a column of remarks, too long for a cell of a console
_WIDEST_WORD = 30


class ConsoleProgress:
    """An observer of cells; use it as a context manager around the run. A terminal that goes away fails no run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._live.add_task("starting the kernel")
        self._heading = ""

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._live.stop()

    def cell_started(self, number: int, total: int, heading: str) -> None:
        self._heading = heading
        with suppress(OSError):
            self._live.reset(self._task, description=escape(f"[{number}/{total}] {heading}"))

    def cell_ended(self, number: int, total: int, status: str, seconds: float) -> None:
        with suppress(OSError):
            self._console.print(escape(f"[{number}/{total}] {self._heading}: {status} in {seconds:.1f} s"))


def print_outcome(outcome: Outcome, console: Console) -> None:
    """The notebook's summary table where it left one, how the run ended, and where its report is."""
    summary = outcome.folder.path / "metrics" / "summary.parquet"
    if summary.exists():
        for part in _summary(pq.read_table(summary).to_pylist(), outcome.secrets):
            console.print(part)
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


def _summary(rows: list[dict[str, Any]], secrets: Secrets) -> Iterator[RenderableType]:
    """The table, and beneath it its notes: each once, by the number that stands in the table."""
    texts = [{name: secrets.redact(shown(value)) for name, value in row.items()} for row in rows]
    notes = list(dict.fromkeys(text for row in texts if (text := row.get(NOTE))))
    for row in texts:
        if text := row.get(NOTE):
            row[NOTE] = f"{notes.index(text) + 1}"
    yield from (Text(), _table(texts), Text())
    yield from (Text(f"{number}  {note}") for number, note in enumerate(notes, start=1))


def _table(rows: list[dict[str, str]]) -> Table:
    """Broken between words where the console is too narrow, and not inside them."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    for name in rows[0] if rows else ():
        header = name.replace("/", "\n/").replace(" (", "\n(")
        words = [word for text in (header, *(row[name] for row in rows)) for word in text.split()]
        table.add_column(escape(header), overflow="fold", min_width=min(_WIDEST_WORD, max(map(len, words), default=1)))
    for row in rows:
        table.add_row(*(escape(text) for text in row.values()))
    return table


def _shown_path(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
