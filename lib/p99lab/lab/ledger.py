"""The ledger: every claim on every kind of hardware, read from the runs below `outputs/`. Works on the base install."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from p99lab.lab import inspection, runs
from p99lab.lab.claims import Claim, answer, load_claims, verdict
from p99lab.lab.figures import FIGURES, Figure, read_figures
from p99lab.lab.runs import Run
from p99lab.lab.staleness import Present, changes, is_by_hand, is_stale, rule_changed

WITHDRAWN = " · withdrawn: "
SHORT = 56  # characters of a statement that the table shows


@dataclass(frozen=True, slots=True)
class Row:
    """A claim on one kind of hardware; hardware, run and measurement are None where no run speaks to it.

    `stale`: what is no longer as it was when the run was made, a clause each; the verdict is by today's rule.
    """

    id: str
    chapter: str
    says: str
    stated: float | None
    unit: str | None
    inconsistent: str | None = None  # what the article itself says against the claim
    verdict: str | None = None
    measured: float | None = None
    ci95: tuple[float, float] | None = None
    n: int | None = None
    hardware: str | None = None
    run: str | None = None
    evidence: str | None = None  # the figures' file, `#` the metric, ` · ` why
    why: str | None = None  # what decided; then, after semicolons, each condition that is not as stated
    stale: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The verdict in a word or two, or why there is none."""
        if self.evidence is None:
            return "not tested"
        return self.verdict or ("withdrawn" if WITHDRAWN in self.evidence else "no verdict")

    @property
    def is_stale(self) -> bool:
        """Whether the run would be another one if it were made again on its own machine."""
        return is_stale(self.stale)


@dataclass(frozen=True)
class Completed:
    """A run that counts, and what its files say, each read once."""

    run: Run

    @property
    def hardware(self) -> str:
        return self.run.hardware or "unknown"

    @cached_property
    def withdrawn(self) -> str | None:
        """Why its figures do not count any more, if they do not."""
        return inspection.withdrawn(self.run)

    @cached_property
    def figures(self) -> dict[str, Figure]:
        return read_figures(self.run.path / FIGURES)

    @cached_property
    def conditions(self) -> dict[str, Any]:
        return inspection.conditions(self.run)

    def speaks_to(self, claim: Claim) -> bool:
        """Does the run answer this claim, or did it before its files were changed?"""
        if self.run.notebook != claim.notebook:
            return False
        return self.withdrawn is not None or answer(claim, self.figures) is not None


def ledger(outputs: Path, claims: Iterable[Claim] | None = None) -> list[Row]:
    """One row per claim and hardware: the latest completed run that speaks to the claim decides.

    A run of a tier as it stands goes before any whose parameters were given by hand, which answers another question.
    Smoke runs do not count (they show that a notebook works), nor runs that ended otherwise than completed. Where files
    of the deciding run were changed after its end, the verdict is withdrawn; where the code, the parameters, the
    machine or the claim's rule is another by now, the row says so.
    """
    present = Present()
    found = completed(outputs, present)
    rows: list[Row] = []
    for claim in load_claims() if claims is None else claims:
        latest: dict[str, Completed] = {}
        for one in found:
            if one.hardware not in latest and one.speaks_to(claim):
                latest[one.hardware] = one
        rows.extend(_entry(claim, latest[hardware], outputs, present) for hardware in sorted(latest))
        if not latest:
            rows.append(_row(claim))
    return rows


def completed(outputs: Path, present: Present) -> list[Completed]:
    """The runs that count: those of a tier as it stands, latest first, then those with parameters given by hand; a
    published copy only where the run itself is not here."""
    counted = [run for run in runs.catalogue(outputs) if run.is_counted]
    latest_first = sorted(counted, key=lambda run: run.started, reverse=True)
    ordered = sorted(latest_first, key=lambda run: is_by_hand(run.path, run.record, present))
    return [Completed(run) for run in ordered]


def _row(claim: Claim) -> Row:
    return Row(claim.id, claim.chapter, claim.says, claim.stated, claim.unit, claim.inconsistent)


def _entry(claim: Claim, found: Completed, outputs: Path, present: Present) -> Row:
    run = found.run
    row = dataclasses.replace(_row(claim), hardware=found.hardware, run=run.id)
    source = f"{outputs.name}/{run.path.relative_to(outputs).as_posix()}/{FIGURES}#{claim.test.metric}"
    if found.withdrawn is not None:
        return dataclasses.replace(row, evidence=f"{source}{WITHDRAWN}{found.withdrawn}")
    name, why, figure = verdict(claim, found.figures, found.conditions)
    assert figure is not None
    revision = str(run.record.get("revision") or "unknown")[:12] + (" with changes" if run.record.get("dirty") else "")
    since = [rule_changed(claim, run.record), *changes(run.path, run.record, present)]
    return dataclasses.replace(
        row,
        verdict=name and name.value,
        measured=figure.value,
        ci95=figure.ci95,
        n=figure.n,
        unit=figure.unit or claim.unit,
        evidence=f"{source} · {why} · code {revision}",
        why=why,
        stale=tuple(clause for clause in since if clause),
    )


def as_records(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows as plain values, in the shape that `p99lab claims --json` prints."""
    return [dataclasses.asdict(row) for row in rows]


def table(rows: Iterable[Row], every: bool = True) -> Table:
    """The ledger for a terminal of 80 columns or more; claims that no run speaks to are dim, or left out."""
    rows = list(rows)
    shown = Table(caption=_legend(rows), caption_justify="left", pad_edge=False, box=None)
    shown.add_column("claim", ratio=1, overflow="fold")
    for name, width in (("stated", 9), ("measured", 13), ("verdict", 10), ("evidence", 13)):
        shown.add_column(name, max_width=width, overflow="fold")
    said = ""
    for row in rows:
        if row.evidence is None and not every:
            continue
        claim = f"{row.id}\n{_short(row.says)}" if row.says != said else row.id
        decided = (row.why or "").partition("; ")[0]
        shown.add_row(
            f"{claim}\n→ {decided}" if decided else claim, *_cells(row), style=None if row.evidence else "dim"
        )
        said = row.says
    return shown


def _cells(row: Row) -> tuple[str, ...]:
    stated = "" if row.stated is None else f"{row.stated:g} {row.unit}"
    measured = "" if row.measured is None else f"{row.measured:.3g} {row.unit or ''}".rstrip()
    if row.ci95 is not None and row.ci95[0] != row.ci95[1]:
        measured += f"\n[{row.ci95[0]:.3g}, {row.ci95[1]:.3g}]"
    return stated, measured, f"{row.state}\n(stale)" if row.is_stale else row.state, row.run or ""


def _short(says: str) -> str:
    return says if len(says) <= SHORT else says[: SHORT - 1].rstrip(" ,") + "…"


def _legend(rows: Iterable[Row]) -> str:
    """How many claims stand where, and what the named runs ran on."""
    rows = list(rows)
    counts = Counter(row.state for row in rows)
    machines = {row.run: row.hardware for row in rows if row.run}
    stale = {row.run: "; ".join(row.stale) for row in rows if row.run and row.is_stale}
    withdrawn = {row.run: row.evidence.partition(WITHDRAWN)[2] for row in rows if row.evidence and not row.why}
    no_run = [] if machines else ["no completed run speaks to a claim (smoke runs do not count); --all lists them"]
    return "\n".join(
        (
            " · ".join(f"{count} {state}" for state, count in counts.most_common()),
            *(f"{run}  {hardware}" for run, hardware in machines.items()),
            *(f"stale, {run}: {why}" for run, why in stale.items()),
            *(f"withdrawn, {run}: {why}" for run, why in withdrawn.items() if why),
            *no_run,
        )
    )
