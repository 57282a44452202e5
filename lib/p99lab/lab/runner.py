"""`p99lab run`: one notebook, one tier, one folder.

Papermill injects the parameters; the cells run in `execution`, as an engine of papermill's. Exit codes: 0 done · 2 bad
parameters · 3 deliverable missing · 10 error in a cell · 20 timed out · 30 kernel died · 31 kernel killed for want of
host memory, as its cgroup counted · 32 out of GPU memory · 40 pre-empted (SIGTERM, SIGUSR1, or SIGHUP as its terminal
goes) · 130 interrupted from the keyboard · the notebook's own where a cell calls `sys.exit(n)`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat
import papermill  # type: ignore[import-untyped]
from papermill.engines import Engine, papermill_engines  # type: ignore[import-untyped]

from p99lab import project
from p99lab.lab import parameters, report, secrets, units
from p99lab.lab.execution import Ending, Execution, Observer, StopSignal, of_failure
from p99lab.lab.job import Job
from p99lab.lab.parameters import Contract
from p99lab.lab.reserve import make_writable
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.run_record import RunRecord
from p99lab.lab.secrets import Secrets
from p99lab.lab.watchdog import Limits

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
    """A run that has ended, well or not; its folder is sealed.

    `contains_secret`: its files that hold one. `can_be_resumed`: whether `p99lab run --resume` may save something: it
    was pre-empted, or has finished units.
    """

    folder: RunFolder
    ending: Ending
    secrets: Secrets = field(default_factory=lambda: Secrets({}))
    contains_secret: tuple[str, ...] = ()
    can_be_resumed: bool = False

    @property
    def report(self) -> Path:
        return self.folder.path / REPORT


class Discreet:
    """An observer that passes on what it is told, without the secrets in it."""

    def __init__(self, observer: Observer, secrets: Secrets) -> None:
        self._observer = observer
        self._redact = secrets.redact

    def cell_started(self, number: int, total: int, heading: str) -> None:
        self._observer.cell_started(number, total, self._redact(heading))

    def cell_ended(self, number: int, total: int, status: str, seconds: float) -> None:
        self._observer.cell_ended(number, total, status, seconds)


def run(job: Job, observer: Observer, parent: Path | None = None, limits: Limits | None = None) -> Outcome:
    """Run a job to its end in a new folder under `parent` (default: the project's outputs) and seal it.

    Must be called from the main thread: it takes SIGTERM, SIGUSR1, SIGHUP and SIGINT as requests to stop. Errors of the
    notebook do not raise; they are the outcome's ending. An error of the runner itself does, after it was recorded in
    the folder and that was sealed.

    Raises:
        BadParameterError: a secret of the environment is too short, the claims cannot be read, or `parent` cannot be
            written; no run was begun.
        UnwritableError: the disk has no room for the end of a run; likewise.
    """
    hidden = Secrets.of()
    place = (parent or project.outputs_dir()) / job.contract.notebook
    make_writable(place)
    with StopSignal() as stop:
        started_s = time.monotonic()
        record = RunRecord.begin(job, place, hidden)
        folder = record.folder
        execution = Execution(
            run_dir=folder.path.resolve(),
            environment={"OMP_WAIT_POLICY": "PASSIVE"},
            save=lambda notebook: folder.write(NOTEBOOK, hidden.redact(nbformat.writes(notebook))),  # type: ignore[no-untyped-call]
            observer=Discreet(observer, hidden),
            stop=stop,
            limits=limits or Limits(),
        )
        failure = _execute(job, execution)
        ending = _ending(execution, failure, folder, job.contract)
        ending = replace(ending, reason=hidden.redact(ending.reason))
        record.end(**_end(execution, ending, time.monotonic() - started_s))
        found = _report_and_seal(record, hidden)
    if failure is not None:
        raise failure
    resumable = ending.exit_code != 0 and (ending.status == "pre-empted" or bool(units.finished(folder)[0]))
    return Outcome(folder, ending, hidden, found, resumable)


def _execute(job: Job, execution: Execution) -> Exception | None:
    """Run the notebook; what is returned is an error of the runner, never one of the notebook."""
    papermill_engines.register("p99lab", LabEngine)
    try:
        papermill.execute_notebook(
            str(job.notebook),
            None,  # the execution saves, atomically
            parameters=parameters.plain(job.parameters),
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


def _report_and_seal(record: RunRecord, hidden: Secrets) -> tuple[str, ...]:
    """The page, the last look for secrets, the checksums; returns the files that hold a secret.

    A page that cannot be made costs the page alone, and run.json says why. Without a notebook nothing ran, and there is
    none to make.
    """
    folder = record.folder
    try:
        if (folder.path / NOTEBOOK).is_file():
            _make_page(record, hidden)
        found = tuple(sorted({file for file, _ in secrets.scan(folder.path, hidden)}))
        record.update(contains_secret=found)
        return found
    finally:
        folder.seal()


def _make_page(record: RunRecord, hidden: Secrets) -> None:
    try:
        record.folder.write(REPORT, hidden.redact(report.render(record.folder)))
    except Exception as error:  # a template, a font, the disk: nothing of the measurement depends on it
        said = " ".join(f"{type(error).__name__}: {error}".split())
        record.update(report_problem=hidden.redact(said))


def _end(execution: Execution, ending: Ending, seconds: float) -> dict[str, Any]:
    """run.json's second half."""
    return {
        "status": ending.status,
        "exit_code": ending.exit_code,
        "reason": ending.reason,
        "seconds": round(seconds, 3),
        "cells": execution.cells,
        "save_problems": execution.save_problems,
    }
