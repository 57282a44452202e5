"""Runs as a runner leaves them, made without running anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from p99lab.lab.figures import Figure, write_figures
from p99lab.lab.run_folder import RunFolder

NOTEBOOK = "01_headline_p99"
FIRST, SECOND = "20261129-120000-000-aaaa", "20261130-120000-000-bbbb"
FIGURES = (
    Figure("p99_e2e_stock", 1.8, "s", 1.7, 2.0, 400),
    Figure("p99_ratio", 1.5, "x", 1.3, 1.7, 400),
    Figure.untestable("warm_lengths_done", takes="a GPU"),
)
MACHINE = {"id": "0123456789ab", "numa_nodes": 1, "gpus": []}


def make_run(
    outputs: Path,
    run_id: str = FIRST,
    notebook: str = NOTEBOOK,
    figures: Iterable[Figure] = FIGURES,
    tables: dict[str, Sequence[dict[str, Any]]] | None = None,
    parameters: str = "seed: 0\n",
    is_sealed: bool = True,
    report: str = "<!DOCTYPE html><title>a run</title>",
    **record: Any,
) -> Path:
    """A completed laptop run, sealed; `tables` are rows by the name of their Parquet file."""
    path = outputs / notebook / run_id
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_json("run.json", {"run_id": run_id, "notebook": notebook, **_record(run_id), **record})
    folder.write_json("hardware.json", MACHINE)
    folder.write("parameters.yaml", parameters)
    folder.write("report.html", report)
    if figures := list(figures):
        write_figures(folder, figures)
    for name, rows in (tables or {}).items():
        (path / "metrics").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(list(rows)), path / "metrics" / f"{name}.parquet")
    if is_sealed:
        folder.seal()
    return path


def tamper(path: Path, content: bytes = b"changed") -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def _record(run_id: str) -> dict[str, Any]:
    return {
        "tier": "laptop",
        "status": "completed",
        "exit_code": 0,
        "reason": "",
        "started": f"{run_id[:4]}-{run_id[4:6]}-{run_id[6:8]}T12:00:00.000+00:00",
        "seconds": 320.2,
        "revision": "0123456789abcdef" * 2,
        "dirty": False,
        "hardware": "EPYC, 2 CPUs, no GPU",
        "cells": [{"number": 1, "id": "run", "heading": "Run", "status": "completed", "seconds": 316.0}],
    }
