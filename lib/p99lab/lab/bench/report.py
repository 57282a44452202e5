"""`p99lab bench NAME`: run a benchmark by name, and its rows as JSON or as a table."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Any

from rich.table import Table

from p99lab import project
from p99lab.errors import BadParameterError, did_you_mean
from p99lab.lab.bench.rows import BenchRow
from p99lab.lab.provenance import git_state
from p99lab.observe.hardware import fingerprint, label

BENCHES = {name: f"p99lab.lab.bench.{name}" for name in ("plan", "cpu", "ingest")}


def run(name: str) -> list[BenchRow]:
    """The rows of one benchmark, with its default sizes.

    Raises:
        BadParameterError: no benchmark of that name.
    """
    if name not in BENCHES:
        raise BadParameterError(f"no benchmark '{name}'{did_you_mean(name, BENCHES)} (known: {', '.join(BENCHES)})")
    rows: list[BenchRow] = importlib.import_module(BENCHES[name]).run()
    return rows


def as_record(rows: list[BenchRow]) -> dict[str, Any]:
    """What `p99lab bench NAME --json` prints."""
    return {
        "hardware": label(fingerprint()),
        "git": git_state(project.root()).as_record(),
        "rows": [asdict(row) for row in rows],
    }


def table(rows: list[BenchRow]) -> Table:
    shown = Table("", "value", "floor", "× floor", "peer", "peer's value", "× peer", box=None, pad_edge=False)
    for row in rows:
        shown.add_row(
            row.name,
            f"{row.value:.4g} {row.unit}",
            _number(row.floor),
            _number(row.ratio_to_floor),
            row.peer or "",
            _number(row.peer_value),
            _number(row.ratio_to_peer),
        )
    return shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
