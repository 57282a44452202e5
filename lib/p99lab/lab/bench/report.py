"""`p99lab bench NAME`: run a benchmark by name, and its rows as JSON or as a table."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

from p99lab import project
from p99lab.errors import BadParameterError, did_you_mean
from p99lab.lab.bench.rows import BenchRow
from p99lab.lab.provenance import git_state
from p99lab.observe.hardware import fingerprint, label

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("value", pa.float64()),
        ("unit", pa.string()),
        ("floor", pa.float64()),
        ("ratio_to_floor", pa.float64()),
        ("peer", pa.string()),
        ("peer_value", pa.float64()),
        ("ratio_to_peer", pa.float64()),
        ("n", pa.int64()),
        ("bar", pa.float64()),
        ("note", pa.string()),
        ("detail", pa.bool_()),
        ("verdict", pa.string()),
    ]
)
BENCHES = {name: f"p99lab.lab.bench.{name}" for name in ("plan", "cpu", "ingest")}
H200 = "h200"  # apart from these: it takes sizes, and gives row by row


def run(name: str) -> list[BenchRow]:
    """The rows of one benchmark, with its default sizes.

    Raises:
        BadParameterError: no benchmark of that name.
    """
    check(name)
    rows: list[BenchRow] = importlib.import_module(BENCHES[name]).run()
    return rows


def check(name: str) -> None:
    """Return if there is a benchmark of that name.

    Raises:
        BadParameterError: there is none.
    """
    known = (*BENCHES, H200)
    if name not in known:
        raise BadParameterError(f"no benchmark '{name}'{did_you_mean(name, known)} (known: {', '.join(known)})")


def as_record(rows: list[BenchRow]) -> dict[str, Any]:
    """What `p99lab bench NAME --json` prints."""
    return {
        "hardware": label(fingerprint()),
        "git": git_state(project.root()).as_record(),
        "rows": [_as_record(row) for row in rows],
    }


def _as_record(row: BenchRow) -> dict[str, Any]:
    value = None if math.isnan(row.value) else row.value  # JSON has no NaN
    return {**asdict(row), "value": value, "verdict": row.verdict}


def write(folder: Path, name: str, rows: list[BenchRow]) -> None:
    """`bench_NAME.json`, `.parquet` and `.md` (a table for people) in a folder, in place of those that were there."""
    folder.mkdir(parents=True, exist_ok=True)
    record = as_record(rows)
    (folder / f"bench_{name}.json").write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2))
    pq.write_table(pa.Table.from_pylist(record["rows"], SCHEMA), folder / f"bench_{name}.parquet")
    (folder / f"bench_{name}.md").write_text(markdown(rows))


def markdown(rows: list[BenchRow]) -> str:
    """A table as a README shows it, without details."""
    heads = ("", "measured", "floor", "× floor", "bar", "", "peer", "its value", "× peer", "n", "note")
    lines = [_line(heads), _line(("---",) * len(heads)), *(_line(_cells(row)) for row in rows if not row.detail)]
    return "\n".join(lines) + "\n"


def _cells(row: BenchRow) -> tuple[str, ...]:
    bar = "" if row.bar is None else f"≤ {_number(row.bar)}"
    n = "" if row.n is None else str(row.n)
    measured = (row.name, _measured(row, _number(row.value)), _number(row.floor), _number(row.ratio_to_floor))
    peer = (row.peer or "", _number(row.peer_value), _number(row.ratio_to_peer))
    return (*measured, bar, row.verdict or "", *peer, n, row.note or "")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(rows: list[BenchRow]) -> Table:
    """For a terminal, without details; bars only where there are any."""
    rows = [row for row in rows if not row.detail]
    has_bars = any(row.bar is not None for row in rows)
    shown = Table(box=None, pad_edge=False)
    shown.add_column("", min_width=24)
    for head in ("value", "floor", "× floor", "peer", "peer's value", "× peer", *(("bar", "") if has_bars else ())):
        shown.add_column(head)
    for row in rows:
        shown.add_row(
            row.name,
            _measured(row, f"{row.value:.4g}"),
            _number(row.floor),
            _number(row.ratio_to_floor),
            row.peer or "",
            _number(row.peer_value),
            _number(row.ratio_to_peer),
            *((_number(row.bar), row.verdict or "") if has_bars else ()),
        )
    return shown


def notes(rows: list[BenchRow]) -> list[str]:
    """What goes with a table: the notes of its rows, each with its row's name."""
    return [f"{row.name}: {row.note}" for row in rows if row.note and not row.detail]


def _measured(row: BenchRow, number: str) -> str:
    return "–" if math.isnan(row.value) else f"{number} {row.unit}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
