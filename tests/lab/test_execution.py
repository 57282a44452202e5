from __future__ import annotations

import errno
import importlib
import pkgutil
import subprocess
import sys
from typing import Any
from unittest import mock

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import p99lab
from p99lab.errors import ModelError, P99labError
from p99lab.lab import execution
from p99lab.lab.execution import COMPLETED, Ending, Journal
from p99lab.lab.run_folder import UnwritableError


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    cells = [
        new_markdown_cell("# Title\n\ntext"),
        new_code_cell("a = 1"),
        new_code_cell("  \n"),
        new_markdown_cell("## Run"),
        new_code_cell("b = 2"),
        new_code_cell("c = 3"),
    ]
    return new_notebook(cells=cells, metadata={"papermill": {}})


def statuses(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.metadata.papermill["status"] for cell in notebook.cells if cell.cell_type == "code"]


def test_a_cell_is_completed_only_once_it_ended(notebook: nbformat.NotebookNode, quiet: Any) -> None:
    observer = quiet()
    journal = Journal(notebook, lambda _: None, observer)
    journal.cell_started(1)
    assert statuses(notebook) == ["running", "empty", "pending", "pending"]
    journal.cell_ended(1, "completed")
    journal.cell_started(4)
    journal.cell_ended(4, "failed")
    journal.run_ended(Ending("failed", 10), 1.0)
    assert statuses(notebook) == ["completed", "empty", "failed", "not run"]
    assert notebook.metadata.papermill.exception is True
    assert [row["status"] for row in journal.cells()] == ["completed", "failed", "not run"]
    assert observer.told == [
        ("started", 1, 3, "Title"),
        ("ended", 1, 3, "completed"),
        ("started", 2, 3, "Run"),
        ("ended", 2, 3, "failed"),
    ]


def test_saving_costs_a_bounded_share_of_the_time(notebook: nbformat.NotebookNode, quiet: Any) -> None:
    now, spent = 0.0, 0.0

    def save(_: object) -> None:
        nonlocal now, spent
        now, spent = now + 2.0, spent + 2.0  # a notebook so large that each save takes two seconds

    with mock.patch.object(execution.time, "monotonic", side_effect=lambda: now):
        journal = Journal(notebook, save, quiet())
        while now < 1000.0:
            now += 0.5
            journal.save_if_due()
    assert 0.02 * now <= spent <= 0.06 * now


def test_a_save_at_once_does_not_wait_for_its_turn(notebook: nbformat.NotebookNode, quiet: Any) -> None:
    save = mock.Mock()
    journal = Journal(notebook, save, quiet())
    journal.cell_started(1)
    journal.save_if_due()
    assert save.call_count == 1  # too recent
    journal.save_at_once()
    assert save.call_count == 2


def test_a_full_disk_is_noted_and_the_run_goes_on(notebook: nbformat.NotebookNode, quiet: Any) -> None:
    full = UnwritableError("no space")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    journal = Journal(notebook, mock.Mock(side_effect=full), quiet())
    journal.cell_started(1)
    assert "no space" in journal.save_problems[0]
    with pytest.raises(UnwritableError):
        journal.run_ended(COMPLETED, 1.0)


@pytest.mark.parametrize(
    ("name", "value", "ending"),
    [
        ("ValueError", "first\nsecond", ("failed", 10, "cell 1: ValueError: first")),
        ("ValueError", "", ("failed", 10, "cell 1: ValueError")),
        ("ModelError", "shard 1 is cut short", ("failed", 4, "cell 1: ModelError: shard 1 is cut short")),
        ("BadParameterError", "no arm", ("failed", 2, "cell 1: BadParameterError: no arm")),
        ("RequestTooLargeError", "9 pages", ("failed", 2, "cell 1: RequestTooLargeError: 9 pages")),
        ("TargetError", "no answer", ("failed", 5, "cell 1: TargetError: no answer")),
        ("EngineFailedError", "a step", ("failed", 10, "cell 1: EngineFailedError: a step")),
        ("AccountingError", "a page", ("failed", 10, "cell 1: AccountingError: a page")),
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2 GiB",
            ("out of GPU memory", 32, "cell 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        ),
        ("MemoryError", "", ("failed", 10, "cell 1: MemoryError")),
        ("SystemExit", "3", ("exited", 3, "cell 1 called sys.exit(3)")),
        ("SystemExit", "-1", ("exited", 255, "cell 1 called sys.exit(-1)")),
        ("SystemExit", "256", ("exited", 1, "cell 1 called sys.exit(256)")),
        ("SystemExit", "--5", ("exited", 1, "cell 1 called sys.exit(--5)")),
        ("SystemExit", "no luck", ("exited", 1, "cell 1 called sys.exit(no luck)")),
        ("SystemExit", "0", ("completed", 0, "ended early: cell 1 called sys.exit(0)")),
        ("SystemExit", "", ("completed", 0, "ended early: cell 1 called sys.exit()")),
    ],
)
def test_what_an_exception_in_a_cell_means(name: str, value: str, ending: tuple[str, int, str]) -> None:
    assert execution.of_error(name, value, "cell 1") == Ending(*ending)


@pytest.mark.parametrize(
    ("name", "value", "is_one"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB.", True),
        ("OutOfMemoryError", "HIP out of memory. Tried to allocate 20.00 GiB.", True),
        ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be", True),
        ("RuntimeError", "CUDA driver error: out of memory", True),
        (
            "RuntimeError",
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
            False,
        ),
        ("OutOfMemoryError", "the queue", False),
        ("ValueError", "somebody wrote: CUDA out of memory", False),
        ("AssertionError", "OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_what_is_out_of_gpu_memory(name: str, value: str, is_one: bool) -> None:
    assert execution.is_out_of_gpu_memory(name, value) is is_one


def test_a_gpu_without_memory_is_found_as_the_cause_and_not_in_source_code() -> None:
    red, plain = "\x1b[31m", "\x1b[0m"
    caused = f"{red}OutOfMemoryError{plain}: CUDA out of memory. Tried to allocate 2 GiB\n\nThe above exception was"
    quoted = "----> 3 raise ValueError('OutOfMemoryError: CUDA out of memory')\n\nValueError: no"
    assert execution.is_out_of_gpu_memory("ValueError", "no", caused)
    assert not execution.is_out_of_gpu_memory("ValueError", "no", quoted)


def test_every_error_of_the_package_that_has_an_exit_code_keeps_it_in_a_cell() -> None:
    for module in pkgutil.walk_packages(p99lab.__path__, "p99lab."):
        importlib.import_module(module.name)
    codes = execution.exit_codes()
    pending, found = [P99labError], {}
    while pending:
        error = pending.pop()
        pending += error.__subclasses__()
        found[error.__name__] = error.exit_code
    assert {name: code for name, code in found.items() if code != 1} == codes


def test_exit_codes_are_known_before_anything_else_was_imported() -> None:
    ask = "from p99lab.lab.execution import exit_codes; print(sorted(exit_codes()))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(sorted(execution.exit_codes()))


def test_a_failure_of_the_runner_says_so() -> None:
    assert execution.of_failure(KeyError("x")) == Ending("failed", 1, "runner: KeyError: 'x'")
    assert execution.of_failure(ModelError("gone")) == Ending("failed", 4, "runner: ModelError: gone")


def test_a_cell_that_was_running_when_the_runner_failed_has_failed(notebook: nbformat.NotebookNode, quiet: Any) -> None:
    journal = Journal(notebook, lambda _: None, quiet())
    journal.cell_started(1)
    journal.run_ended(execution.of_failure(KeyError("x")), 1.0)
    assert statuses(notebook) == ["failed", "empty", "not run", "not run"]
