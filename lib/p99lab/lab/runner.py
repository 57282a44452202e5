"""`p99lab run`: one notebook, one tier, one folder.

Papermill injects the parameters; the cells run in `execution`, as an engine of papermill's. Exit codes: 0 done · 2 bad
parameters · 3 deliverable missing · 10 error in a cell · 20 timed out · 30 kernel died · 40 pre-empted (SIGTERM or
SIGUSR1) · 130 interrupted from the keyboard · the notebook's own where a cell calls `sys.exit(n)`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill  # type: ignore[import-untyped]
import yaml
from papermill.engines import Engine, papermill_engines  # type: ignore[import-untyped]

from p99lab import project
from p99lab.lab import provenance, report
from p99lab.lab.execution import Ending, Execution, Observer, StopSignal, of_failure
from p99lab.lab.job import Job
from p99lab.lab.parameters import Contract
from p99lab.lab.run_folder import RunFolder
from p99lab.observe import hardware

NOTEBOOK = "notebook.ipynb"
REPORT = "report.html"


class LabEngine(Engine):  # type: ignore[misc]
    """Papermill's engine interface onto an `Execution`, which keeps the record instead of papermill."""

    @classmethod
    def execute_notebook(cls, nb: nbformat.NotebookNode, _kernel: str, *, execution: Execution, **_: Any) -> Any:
        nb.metadata.papermill.update(input_path=Path(nb.metadata.papermill["input_path"]).name, output_path=NOTEBOOK)
        execution.run(nb)
        return nb


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, well or not; its folder is sealed."""

    folder: RunFolder
    ending: Ending

    @property
    def report(self) -> Path:
        return self.folder.path / REPORT


def run(job: Job, observer: Observer, parent: Path | None = None, cell_timeout_s: float | None = None) -> Outcome:
    """Run a job to its end in a new folder under `parent` (default: the project's outputs) and seal it.

    Must be called from the main thread: it takes SIGTERM, SIGUSR1 and SIGINT as requests to stop. Errors of the
    notebook do not raise; they are the outcome's ending. An error of the runner itself does, after it was recorded in
    the folder and that was sealed.
    """
    with StopSignal() as stop:
        started, started_s = datetime.datetime.now(datetime.UTC), time.monotonic()
        folder = RunFolder.create((parent or project.outputs_dir()) / job.contract.notebook)
        record = _begin(folder, job, started)
        execution = Execution(
            run_dir=folder.path.resolve(),
            environment={"OMP_WAIT_POLICY": "PASSIVE"},
            save=lambda notebook: folder.write(NOTEBOOK, nbformat.writes(notebook)),  # type: ignore[no-untyped-call]
            observer=observer,
            stop=stop,
            cell_timeout_s=cell_timeout_s,
        )
        failure = _execute(job, execution)
        ending = _ending(execution, failure, folder, job.contract)
        folder.write_json("run.json", record | _end(execution, ending, time.monotonic() - started_s))
        _report_and_seal(folder)
    if failure is not None:
        raise failure
    return Outcome(folder, ending)


def _begin(folder: RunFolder, job: Job, started: datetime.datetime) -> dict[str, Any]:
    """Write what is known before the first cell runs; returns run.json's first half."""
    root = project.root()
    git = provenance.git_state(root)
    fingerprint = hardware.fingerprint()
    folder.write("parameters.yaml", yaml.safe_dump(job.parameters.model_dump(mode="json"), sort_keys=False))
    folder.write_json("environment.json", provenance.environment())
    folder.write_json("hardware.json", fingerprint)
    folder.write_json("git.json", git.as_record())
    if git.patch:
        folder.write("patch.diff", git.patch)
    record = {
        "run_id": folder.run_id,
        "notebook": job.contract.notebook,
        "tier": job.tier,
        "status": "running",
        "exit_code": None,
        "reason": "",
        "started": started.isoformat(timespec="milliseconds"),
        "p99lab": importlib.metadata.version("p99lab"),
        "revision": git.revision,
        "dirty": git.is_dirty,
        "hardware": hardware.label(fingerprint),
    }
    folder.write_json("run.json", record)
    return record


def _execute(job: Job, execution: Execution) -> Exception | None:
    """Run the notebook; what is returned is an error of the runner, never one of the notebook."""
    papermill_engines.register("p99lab", LabEngine)
    try:
        papermill.execute_notebook(
            str(job.notebook),
            None,  # the execution saves, atomically
            parameters=job.parameters.model_dump(mode="json"),
            engine_name="p99lab",
            kernel_name="python3",
            language="python",
            progress_bar=False,
            execution=execution,
        )
    except papermill.PapermillExecutionError:
        pass  # said again by papermill from the outputs; the ending already tells
    except Exception as error:
        return error
    return None if execution.ending is not None else RuntimeError("papermill came back without having run a cell")


def _ending(execution: Execution, failure: Exception | None, folder: RunFolder, contract: Contract) -> Ending:
    """A run is completed when its execution says so, nothing failed beside it, and every deliverable is there."""
    if failure is not None or execution.ending is None:
        return of_failure(failure or RuntimeError("no ending"))
    missing = folder.missing(contract.deliverables)
    if execution.ending.exit_code != 0 or not missing:
        return execution.ending
    return Ending("deliverable missing", 3, f"the notebook owes {', '.join(missing)}")


def _report_and_seal(folder: RunFolder) -> None:
    """A page that cannot be made costs the page alone. Without a notebook nothing ran, and there is none to make."""
    try:
        if (folder.path / NOTEBOOK).is_file():
            folder.write(REPORT, report.render(folder))
    finally:
        folder.seal()


def _end(execution: Execution, ending: Ending, seconds: float) -> dict[str, Any]:
    """run.json's second half."""
    return {
        "status": ending.status,
        "exit_code": ending.exit_code,
        "reason": ending.reason,
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "seconds": round(seconds, 3),
        "cells": execution.cells,
        "save_problems": execution.save_problems,
    }
