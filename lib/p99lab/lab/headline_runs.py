"""Runs of notebook 01 that belong together: one publication measured in several commands, each with its anchor.

Where one command cannot hold all arms and loads, each holds `stock` under the closed load besides. How far that arm
moved between the commands says how far the others may be compared across them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import yaml

from p99lab.lab import inspection, runs
from p99lab.lab.headline import NOTEBOOK
from p99lab.lab.headline_arms import BASELINE
from p99lab.lab.runs import Run

PERCENTILES = "metrics/percentiles.parquet"
ALIKE = (  # what runs must have in common
    "model",
    "dtype",
    "transport",
    "exact_lengths",
    "num_documents",
    "document_tokens_min",
    "document_tokens_max",
    "question_tokens_max",
    "answer_tokens_max",
    "concurrency",
    "seed",
)
COLUMNS = ("hardware", "run", "arm", "load", "n", "E2E P50 (s)", "E2E P99 (s)", "low", "high", "anchor drift (%)")


def together(outputs: Path) -> pd.DataFrame:
    """One row per run, arm and load, of runs that have company; oldest run first within a group.

    `anchor drift`: by how much the run's `stock` under the closed load has another median E2E than the group's first.
    """
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(_counted(outputs), key=lambda run: run.started):
        groups.setdefault(_kind(run), []).append(run)
    rows = [row for group in groups.values() if len(group) > 1 for row in _rows(group)]
    return pd.DataFrame(rows, columns=COLUMNS)


def _counted(outputs: Path) -> Iterable[Run]:
    for run in runs.catalogue(outputs):
        is_whole = run.notebook == NOTEBOOK and run.is_counted and (run.path / PERCENTILES).is_file()
        if is_whole and inspection.withdrawn(run) is None:
            yield run


def _kind(run: Run) -> tuple[str, ...]:
    parameters = yaml.safe_load((run.path / "parameters.yaml").read_text()) or {}
    return (run.hardware, *(str(parameters.get(name)) for name in ALIKE))


def _rows(group: list[Run]) -> Iterable[tuple[Any, ...]]:
    first: float | None = None
    for run in group:
        cells = [row for row in pq.read_table(run.path / PERCENTILES).to_pylist() if row["metric"] == "e2e"]
        anchor = next((row["p50"] for row in cells if (row["arm"], row["load"]) == (BASELINE, "closed")), None)
        first = first or anchor
        drift = 100 * (anchor / first - 1) if anchor and first else None
        for row in cells:
            figures = [None if row["void"] else row[name] for name in ("p50", "p99", "p99 low", "p99 high")]
            yield run.hardware, run.id, row["arm"], row["load"], row["n"], *figures, drift
