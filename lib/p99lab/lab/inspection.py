"""One run in full: how it ended, what it measured, what follows from that, and whether it is still what was written.

Works on the base install.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from p99lab import project
from p99lab.errors import P99labError
from p99lab.lab import resume, units
from p99lab.lab.claims import Claim, Verdict, load_claims, machine_conditions, verdict
from p99lab.lab.figures import FIGURES, Figure, read_figures
from p99lab.lab.results import shown
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.runs import Run, took

REPORT = "report.html"
SUMMARY = "metrics/summary.parquet"
JUDGED = ("metrics/", "run.json", "hardware.json", "parameters.yaml", "sources.json")  # verdicts and staleness
VOID = "void: "  # how a remark in a summary's `note` begins
RESUMED = MappingProxyType({"restored": "units taken over", "damaged": "damaged", "measured": "measured here"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim, and what the run's figures say to it by the rule of claims.yaml."""

    claim: str
    says: str
    verdict: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """A run and what its files say. `changes` since it was sealed, None where it never was; `problems`: unreadable.

    `units`: the finished ones of a run that has not completed, and `damaged`; `resume`: how it is taken up, or why not.
    `withdrawn`: what takes the verdicts away in the ledger too, None where nothing does (see the function so named).
    """

    run: Run
    changes: tuple[str, ...] | None
    figures: tuple[Figure, ...]
    verdicts: tuple[Judged, ...]
    void: tuple[str, ...]
    problems: tuple[str, ...]
    report: Path | None
    withdrawn: str | None
    units: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    resume: str = ""

    @property
    def cells(self) -> list[Mapping[str, Any]]:
        cells = self.run.record.get("cells")
        return [cell for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []

    def as_record(self) -> dict[str, Any]:
        """What `p99lab runs show --json` prints."""
        return {
            **self.run.as_record(),
            "resumed_from": self.run.record.get("resumed_from"),
            "changes": None if self.changes is None else list(self.changes),
            "cells": self.cells,
            "figures": [asdict(figure) for figure in self.figures],
            "claims": [asdict(judged) for judged in self.verdicts],
            "withdrawn": self.withdrawn,
            "void": list(self.void),
            "problems": list(self.problems),
            "report": None if self.report is None else str(self.report),
            "units": list(self.units),
            "damaged": list(self.damaged),
            "resume": self.resume,
        }


def inspect(run: Run) -> Inspection:
    """Read a run, checksums included. A file that cannot be read is a problem named, not an error."""
    problems: list[str] = []
    figures = _read_or_note(problems, FIGURES, lambda: read_figures(run.path / FIGURES)) or {}
    reasons = _read_or_note(problems, SUMMARY, lambda: void(run)) or ()
    report = run.path / REPORT
    whole, damaged = _read_or_note(problems, units.FOLDER, lambda: _units(run)) or ((), ())
    return Inspection(
        run=run,
        changes=changes(run),
        figures=tuple(figures.values()),
        verdicts=tuple(judge(run, figures, load_claims())),
        void=reasons,
        problems=tuple(problems),
        report=report if report.is_file() else None,
        withdrawn=withdrawn(run),
        units=whole,
        damaged=damaged,
        resume=_how_to_resume(run, has_units=bool(whole)),
    )


def _units(run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The finished units of a run that has not completed, and those that are damaged."""
    if not run.record or run.status in ("completed", "unreadable"):
        return (), ()
    try:
        whole, damaged = units.finished(RunFolder(run.path))
    except P99labError as error:
        raise ValueError(str(error)) from None
    return tuple(unit.manifest.name for unit in whole), tuple(damaged)


def _how_to_resume(run: Run, has_units: bool) -> str:
    """A line for a run that ended early and has something to save; empty for others."""
    if run.status in ("running", "completed") or not (has_units or run.status in ("pre-empted", "cut off")):
        return ""
    folder = RunFolder(run.path)
    try:
        resume.prepare(folder)
    except P99labError as error:
        return str(error)
    return f"resume with: {resume.command(folder, project.outputs_dir())}"


def changes(run: Run) -> tuple[str, ...] | None:
    """What differs from the sealed run, one line each; None where it was never sealed."""
    try:
        return tuple(RunFolder(run.path).verify())
    except P99labError:
        return None


def withdrawn(run: Run) -> str | None:
    """Why nothing that the run's figures say counts any more: which of the files that it follows from have changed.

    The one rule of the ledger, the decisions and the index; only those files are read. Stricter, since they show or
    hand on the whole run: `page` and `lab.compare` give no verdict of a run of which any file has changed, and
    `lab.publish` does not publish it.
    """
    try:
        return ", ".join(RunFolder(run.path).verify(JUDGED)) or None
    except P99labError:
        return "it was never sealed"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def void(run: Run) -> tuple[str, ...]:
    """`arm, load: reason` for everything that the run's summary calls void."""
    found = (
        (row, remark.removeprefix(VOID))
        for row in _rows(run.path / SUMMARY)
        for remark in str(row.get("note") or "").split("; ")
        if remark.startswith(VOID)
    )
    return tuple(f"{row.get('arm')}, {row.get('load')}: {reason}" for row, reason in found)


def judge(run: Run, figures: Mapping[str, Figure], claims: Iterable[Claim]) -> Iterator[Judged]:
    """What the run's figures say to the claims that its notebook tests; nothing of claims they do not touch."""
    machine = conditions(run)
    for claim in claims:
        if claim.notebook == run.notebook and (found := verdict(claim, figures, machine)).figure is not None:
            yield _judged(claim, found)


def conditions(run: Run) -> dict[str, Any]:
    """What the run's machine is, in the names of claims.yaml; little where it did not say."""
    try:
        content = RunFolder(run.path).read_json("hardware.json")
    except (OSError, ValueError):
        content = None
    return machine_conditions(content if isinstance(content, dict) else {})


def page(found: Inspection) -> RenderableType:
    """For a terminal."""
    return Group(*_head(found), *_tables(found), *_feet(found))


def _judged(claim: Claim, found: Verdict) -> Judged:
    return Judged(claim.id, claim.says, None if found.name is None else found.name.value, found.why)


def _read_or_note(problems: list[str], name: str, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{name} cannot be read: {str(error).splitlines()[0]}")
        return None


def _rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist()) if path.is_file() else []


# --- for a terminal -------------------------------------------------------------------------------------------------


def _head(found: Inspection) -> Iterator[RenderableType]:
    run = found.run
    yield Text(f"{run.id}  {run.notebook}", style="bold")
    exit_code = run.record.get("exit_code")
    ended = run.status + ("" if exit_code is None else f" (exit code {exit_code})")
    facts = {
        "tier": run.tier,
        "ended": f"{ended}, {run.record['reason']}" if run.record.get("reason") else ended,
        "began": f"{run.started[:19].replace('T', ' ')} UTC" if run.started else "",
        "took": took(run.seconds),
        "hardware": run.hardware,
        "code": run.revision,
        "resumed from": _resumed(run.record.get("resumed_from")),
        "checksums": _checksums(found.changes),
        "published": "" if run.published is None else str(run.published),
        "report": "" if found.report is None else str(found.report),
    }
    yield Text("\n".join(f"{name:<12}  {value}" for name, value in facts.items() if value))


def _resumed(said: Any) -> str:
    """`20261129-… (failed): 3 units taken over, 2 measured here`."""
    if not isinstance(said, dict):
        return shown(said) if said else ""
    counts = {word: len(said.get(key) or ()) for key, word in RESUMED.items()}
    units = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{said.get('run_id')} ({said.get('status')}): {units or 'no unit taken over'}"


def _checksums(changed: Sequence[str] | None) -> str:
    if changed is None:
        return "none: the run was never sealed"
    return f"CHANGED since the run ended: {', '.join(changed)}" if changed else "every file is as it was written"


def _tables(found: Inspection) -> Iterator[RenderableType]:
    if found.cells:
        keys = ("number", "id", "status")
        rows = [(*map(cell.get, keys), _cell_time(cell), cell.get("heading")) for cell in found.cells]
        yield _table(("cell", "id", "status", "took", "part"), rows, folded={"part"})
    if found.figures:
        yield _table(
            ("figure", "value", "95 % CI", "n"),
            [_figure_row(figure) for figure in found.figures],
            folded={"figure", "95 % CI"},
        )
    if found.verdicts:
        taken_away = "withdrawn: files were changed" if found.changes else None
        rows = [(judged.claim, taken_away or judged.verdict or "no verdict", judged.why) for judged in found.verdicts]
        yield _table(("claim", "verdict", "why"), rows, folded={"why"})


def _cell_time(cell: Mapping[str, Any]) -> str:
    seconds = cell.get("seconds")
    return took(float(seconds)) if isinstance(seconds, int | float) else ""


def _figure_row(figure: Figure) -> tuple[Any, ...]:
    if figure.value is None:
        return figure.metric, "not testable here", f"takes {figure.takes}", ""
    bounds = "none" if figure.ci95 is None else f"{shown(figure.ci95[0])} – {shown(figure.ci95[1])}"
    return figure.metric, f"{shown(figure.value)} {figure.unit}", bounds, "" if figure.n is None else figure.n


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], folded: Set[str]) -> Table:
    """Nothing is cut: on a narrow terminal `folded` columns give way, the others only where that is not enough."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold", no_wrap=name not in folded)
    for row in rows:
        table.add_row(*(escape("" if value is None else str(value)) for value in row))
    return table


def _unfinished(found: Inspection) -> Iterator[str]:
    """Which parts of a run that has not completed are done, and how it is taken up."""
    if found.units:
        yield f"{len(found.units)} units done: {', '.join(found.units)}"
    elif found.run.status in ("running", "pre-empted", "cut off"):
        yield "no unit is done"
    if found.damaged:
        yield f"damaged, to be measured again: {', '.join(found.damaged)}"
    if found.resume:
        yield found.resume


def _feet(found: Inspection) -> Iterator[RenderableType]:
    if found.verdicts and found.run.tier == "smoke":
        yield Text("a smoke run shows that the notebook works: its verdicts do not count in the ledger")
    elif found.run.is_counted and found.verdicts and found.changes and found.withdrawn is None:
        yield Text("the ledger still counts this run: what has changed is nothing that its verdicts follow from")
    yield from (Text(line) for line in _unfinished(found))
    yield from (Text(f"void: {reason}") for reason in found.void)
    yield from (Text(f"problem: {problem}") for problem in found.problems)
