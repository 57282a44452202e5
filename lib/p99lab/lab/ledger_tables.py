"""Notebook 99's tables: views of the ledger and of the decisions, with links to the runs that decide."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from p99lab import project
from p99lab.lab import ledger as _ledger
from p99lab.lab.claims import Name
from p99lab.lab.decisions import Decision
from p99lab.lab.decisions import decisions as _decisions
from p99lab.lab.headline_effects import measures
from p99lab.lab.ledger import Row
from p99lab.lab.results import shown
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.staleness import is_stale

STATES = (*(name.value for name in Name), "no verdict", "withdrawn", "not tested")  # from settled to open
REPORT = "report.html"


def outputs_folder(given: str | None) -> Path:
    return Path(given) if given else project.outputs_dir()


def rows(outputs: Path) -> list[Row]:
    """The ledger: every claim on every kind of hardware that has spoken to it."""
    return _ledger.ledger(outputs)


def decisions(outputs: Path) -> list[Decision]:
    """What is known of every measure, tried or not."""
    return _decisions(outputs, measures())


def ledger(found: Iterable[Row]) -> pd.DataFrame:
    """One row per claim and hardware, as the run keeps it."""
    frame = pd.DataFrame([{**row, "state": one.state} for one, row in zip(found, _records(found), strict=True)])
    return frame.astype({"n": "Int64"})


def counts(found: Iterable[Row]) -> pd.DataFrame:
    """Rows per chapter and state, chapters down, states across, none left out that occurs."""
    pairs = pd.DataFrame([{"chapter": row.chapter, "state": row.state} for row in found])
    table = pd.crosstab(pairs["chapter"], pairs["state"])
    return table[[state for state in STATES if state in table.columns]]


def inconsistencies(found: Iterable[Row]) -> pd.DataFrame:
    """What the article says against itself, once per claim."""
    said = {row.id.partition("/")[0]: (row.says, row.inconsistent) for row in found if row.inconsistent}
    return pd.DataFrame([(name, *both) for name, both in said.items()], columns=["claim", "says", "but"])


def decision_table(found: Iterable[Decision]) -> pd.DataFrame:
    """The decision page as the run keeps it."""
    columns = ["measure", "verdict", "size", "under", "hardware", "run", "stale"]
    lines = [[d.measure, d.verdict, d.size, d.under, d.hardware, d.run, "; ".join(d.stale)] for d in found]
    return pd.DataFrame(lines, columns=columns)


class Linked:
    """A table for a page: a cell may have a second, smaller line, and the last one links to the run that decides."""

    def __init__(self, columns: list[str], lines: Sequence[tuple[list[str], Path | None]]) -> None:
        self._columns = columns
        self._lines = lines

    def _repr_html_(self) -> str:
        if not self._lines:
            return '<p class="empty">nothing here: no run speaks to it</p>'
        head = "".join(f"<th>{html.escape(name)}</th>" for name in (*self._columns, "evidence"))
        rows = (f'{_cells(values)}<td class="short">{_link(report)}</td>' for values, report in self._lines)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<table class="dataframe"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def __repr__(self) -> str:
        return pd.DataFrame([values for values, _ in self._lines], columns=self._columns).to_string(index=False)


def spoken_to(found: Iterable[Row], outputs: Path) -> Linked:
    """The claims that some run speaks to, as the page shows them."""
    tested = [row for row in found if row.evidence]
    lines = [(_shown_row(row), _report_of(row, outputs)) for row in tested]
    return Linked(["claim", "stated", "measured", "verdict", "hardware"], lines)


def reservations(found: Iterable[Row]) -> pd.DataFrame:
    """What is not as the article states it, and what is not as it was: each once, with the claims it holds for."""
    claims: dict[tuple[str, str], list[str]] = {}
    for row in found:
        differing = row.why.partition("; ")[2].split("; ") if row.why else []
        for clause in (*differing, *(f"stale: {one}" if is_stale([one]) else one for one in row.stale)):
            claims.setdefault((str(row.run), clause), []).append(row.id)
    lines = [(clause, ", ".join(ids), run) for (run, clause), ids in claims.items() if clause]
    return pd.DataFrame(lines, columns=["reservation", "claims", "run"])


def decided(found: Iterable[Decision]) -> Linked:
    """The decision page."""
    lines = [([d.measure, _marked(d.verdict, d.stale), d.size, d.under, d.hardware or ""], d.report) for d in found]
    return Linked(["measure", "verdict", "size", "under", "hardware"], lines)


def not_tested(found: Iterable[Row]) -> pd.DataFrame:
    """The claims that no run speaks to."""
    open_rows = [(row.id, row.says, row.stated, row.unit) for row in found if row.evidence is None]
    return pd.DataFrame(open_rows, columns=["claim", "says", "stated", "unit"])


def _records(found: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as a table holds them: the interval as two columns."""
    records = _ledger.as_records(found)
    for record in records:
        record["ci_low"], record["ci_high"] = record.pop("ci95") or (None, None)
        record["stale"] = "; ".join(record["stale"])
    return records


def _shown_row(row: Row) -> list[str]:
    stated = "" if row.stated is None else f"{row.stated:g} {row.unit}"
    measured = "" if row.measured is None else f"{shown(row.measured)} {row.unit or ''}"
    ci95 = "" if row.ci95 is None else f"95 %: {shown(row.ci95[0])} – {shown(row.ci95[1])}"
    n = "" if row.n is None else f"n = {row.n}"
    beneath = ", ".join(part for part in (ci95, n) if part)
    return [f"{row.id}\n{row.says}", stated, f"{measured}\n{beneath}", _marked(row.state, row.stale), str(row.hardware)]


def _marked(state: str, stale: Iterable[str]) -> str:
    return f"{state}\nstale" if is_stale(stale) else state


def _report_of(row: Row, outputs: Path) -> Path:
    """Evidence is `outputs/notebook/run/metrics/…`; its report lies in the same run."""
    folder = str(row.evidence).partition("/metrics/")[0].partition("/")[2]
    return outputs / folder / REPORT


def _cells(values: list[str]) -> str:
    return "".join(f"<td>{_two_lines(value)}</td>" for value in values)


def _two_lines(value: str) -> str:
    first, _, second = value.partition("\n")
    return html.escape(first) + (f"<br><small>{html.escape(second)}</small>" if second else "")


def _link(report: Path | None) -> str:
    """Relative to the run's own page, so that a copied outputs folder still holds together."""
    if report is None:
        return "–"
    target = os.path.relpath(report, RunFolder.current().path)
    return f'<a href="{html.escape(target)}">{html.escape(report.parent.name)}</a>'
