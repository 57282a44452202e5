"""Running tiny jobs, and reading what became of them. Needs the lab extra."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil

from p99lab.lab import runner
from p99lab.lab.job import Job
from p99lab.lab.runner import Outcome

MakeJob = Callable[..., Job]


def run(tmp_path: Path, job: Job, quiet: Any, **options: Any) -> Outcome:
    return runner.run(job, quiet(), tmp_path / "outputs", **options)


def record(outcome: Outcome) -> dict[str, Any]:
    return outcome.folder.read_json("run.json")


def statuses(outcome: Outcome) -> list[str]:
    return [cell["status"] for cell in record(outcome)["cells"]]


def executed(outcome: Outcome) -> nbformat.NotebookNode:
    return nbformat.read(outcome.folder.path / "notebook.ipynb", as_version=4)


def printed_in(notebook: nbformat.NotebookNode) -> str:
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def printed(outcome: Outcome) -> str:
    return printed_in(executed(outcome))


def assert_ended(outcome: Outcome, status: str, exit_code: int) -> None:
    """Every run ends whole, however it ended: record, page and checksums agree."""
    assert (outcome.ending.status, outcome.ending.exit_code) == (status, exit_code)
    assert (record(outcome)["status"], record(outcome)["exit_code"]) == (status, exit_code)
    assert outcome.folder.verify() == []
    page = outcome.report.read_text()
    assert (f"exit code {exit_code}" in page) == (exit_code != 0)
    nbformat.validate(executed(outcome))


def is_running(pid: int, patience_s: float = 10.0) -> bool:
    """Whether the process is still there after `patience_s` at most; a zombie is gone."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.05)
    return True
