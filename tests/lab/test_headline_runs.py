"""Runs of notebook 01 that belong together, and how far their anchor moved between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from p99lab.lab import headline_runs
from tests.lab.run_folders import FIRST, SECOND, make_run, tamper

THIRD = "20261130-130000-000-cccc"


def make(outputs: Path, run_id: str, p50: dict[str, float], void: tuple[str, ...] = (), concurrency: int = 64) -> Path:
    """A completed run with these medians of the closed load by arm."""
    rows = [
        {"arm": arm, "load": "closed", "metric": metric, "void": arm in void, "n": 500}
        | {"p50": value, "p99": 2 * value, "p99 low": 1.9 * value, "p99 high": 2.1 * value}
        for arm, value in p50.items()
        for metric in ("ttft", "e2e")
    ]
    parameters = yaml.safe_dump({"model": "dummy:llama-3.1-8b", "num_documents": 4, "concurrency": concurrency})
    return make_run(outputs, run_id, tables={"percentiles": rows}, parameters=parameters)


def test_the_anchors_drift_is_from_the_oldest_run(tmp_path: Path) -> None:
    make(tmp_path, SECOND, {"stock": 8.4, "vLLM": 7.8}, void=("vLLM",))
    make(tmp_path, FIRST, {"stock": 8.0, "+graphs and overlap": 0.8})
    make(tmp_path, THIRD, {"stock": 1.0}, concurrency=8)  # another scenario, and alone in it
    table = headline_runs.together(tmp_path)
    assert list(table["run"]) == [FIRST, FIRST, SECOND, SECOND]
    assert list(table["anchor drift (%)"]) == pytest.approx([0.0, 0.0, 5.0, 5.0])
    assert list(table["E2E P99 (s)"][:3]) == pytest.approx([16.0, 1.6, 16.8])
    assert table["E2E P99 (s)"].isna().tolist() == [False, False, False, True]  # a void arm has no figures


def test_a_run_alone_or_changed_since_has_no_company(tmp_path: Path) -> None:
    make(tmp_path, FIRST, {"stock": 8.0})
    assert len(headline_runs.together(tmp_path)) == 0
    changed = make(tmp_path, SECOND, {"stock": 8.0})
    assert len(headline_runs.together(tmp_path)) == 2
    tamper(changed / headline_runs.PERCENTILES)
    assert len(headline_runs.together(tmp_path)) == 0
