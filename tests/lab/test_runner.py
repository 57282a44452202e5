"""What the runner records when things go right and when they do not: each in a kernel of its own."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from p99lab.lab import execution, progress, reserve, runner
from p99lab.lab.run_folder import RunFolder, UnwritableError
from p99lab.lab.runner import Outcome
from tests.lab.outcomes import MakeJob, assert_ended, executed, printed, record, run, statuses

TELL = """
import json, os, sys
from ipykernel.connect import get_connection_file
told = {"word": word, "python": sys.executable, "policy": os.environ["OMP_WAIT_POLICY"]}
told |= {"transport": json.load(open(get_connection_file()))["transport"], "run": os.environ["P99LAB_RUN_DIR"]}
print(json.dumps(told))
"""
KEEP = """
import pandas as pd
from p99lab.lab import results
results.table("summary", pd.DataFrame({"what": ["x"], "here": [1.5]}))
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, make_job: MakeJob, quiet: Any) -> Outcome:
    folder = tmp_path_factory.mktemp("good")
    job = make_job(folder, TELL, KEEP, deliverables=("metrics/summary.parquet",), word='12e4567 "{x}"')
    return run(folder, job, quiet)


def test_a_good_run_is_completed(good: Outcome) -> None:
    assert_ended(good, "completed", 0)
    assert statuses(good) == ["completed"] * 4  # parameters, injected parameters, two of its own
    assert record(good)["seconds"] > 0


def test_a_run_folder_holds_everything(good: Outcome) -> None:
    files = {path.relative_to(good.folder.path).as_posix() for path in good.folder.path.rglob("*") if path.is_file()}
    assert files - {"patch.diff"} == {
        "SHA256SUMS",
        "environment.json",
        "git.json",
        "hardware.json",
        "metrics/summary.parquet",
        "notebook.ipynb",
        "parameters.yaml",
        "report.html",
        "run.json",
        "sources.json",
    }
    assert yaml.safe_load((good.folder.path / "parameters.yaml").read_text()) == {"word": '12e4567 "{x}"'}


def test_the_kernel_is_this_interpreter_on_a_private_socket(good: Outcome) -> None:
    told = json.loads(printed(good))
    assert told == {
        "word": '12e4567 "{x}"',
        "python": sys.executable,
        "policy": "PASSIVE",
        "transport": "ipc",
        "run": str(good.folder.path),
    }


def test_the_notebook_names_the_kernel_that_ran(good: Outcome) -> None:
    metadata = executed(good).metadata
    assert metadata.kernelspec.name == "python3"
    assert metadata.language_info.version == ".".join(map(str, sys.version_info[:3]))
    assert metadata.papermill.input_path == "tiny.ipynb"


def test_records_name_no_path_of_this_machine(good: Outcome) -> None:
    for name in ("run.json", "environment.json", "hardware.json", "git.json"):
        assert str(Path.home()) not in (good.folder.path / name).read_text()
        assert str(good.folder.path) not in (good.folder.path / name).read_text()


def test_an_error_in_a_cell(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, "print('before'); raise ValueError('too bad')", "print('after')"), quiet)
    assert_ended(outcome, "failed", 10)
    assert statuses(outcome)[2:] == ["failed", "not run"]
    assert outcome.ending.reason == "cell 3 of 4 (A tiny question): ValueError: too bad"
    assert printed(outcome) == "before\n"


def test_sys_exit_zero_ends_early_and_well(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, "import sys; sys.exit(0)", "print('after')"), quiet)
    assert_ended(outcome, "completed", 0)
    assert statuses(outcome)[2:] == ["completed", "not run"]


def test_a_missing_deliverable(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, deliverables=("metrics/a.parquet", "figures/b.png")), quiet)
    assert_ended(outcome, "deliverable missing", 3)
    assert "metrics/a.parquet, figures/b.png" in outcome.ending.reason


def only_run(tmp_path: Path) -> RunFolder:
    (path,) = (tmp_path / "outputs" / "tiny").iterdir()
    return RunFolder(path)


def test_a_failure_of_the_runner_is_recorded_sealed_and_raised(
    tmp_path: Path, make_job: MakeJob, quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(execution, "run_kernel", broken)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, make_job(tmp_path, "print('never')"), quiet)
    folder = only_run(tmp_path)
    assert folder.verify() == []
    told = folder.read_json("run.json")
    assert (told["status"], told["exit_code"]) == ("failed", 1)
    assert told["reason"] == "runner: ZeroDivisionError: a defect"
    assert {cell["status"] for cell in told["cells"]} == {"not run"}
    assert "a defect" in (folder.path / "report.html").read_text()


def test_a_notebook_that_cannot_be_read_is_a_failed_run(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    job = make_job(tmp_path, "print('never')")
    job.notebook.write_text("{")
    with pytest.raises(Exception, match="JSON"):
        run(tmp_path, job, quiet)
    folder = only_run(tmp_path)
    assert folder.verify() == []
    assert folder.read_json("run.json")["status"] == "failed"


def test_a_run_without_an_ending_is_never_completed(
    tmp_path: Path, make_job: MakeJob, quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Execution, "run", lambda *_: None)
    with pytest.raises(RuntimeError, match="without having run"):
        run(tmp_path, make_job(tmp_path, "print('never')"), quiet)
    assert only_run(tmp_path).read_json("run.json")["status"] == "failed"


def p99lab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p99lab.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "100"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["00", "-p", "bufer_mib=3"], "unknown parameter 'bufer_mib'; did you mean 'buffer_mib'?"),
        (["00", "-p", "repeats=12e4567"], "repeats"),
        (["00", "--tier", "smok"], "did you mean 'smoke'?"),
        (["00", "--tier", ""], "no tier ''"),
        (["01", "-p", "arms=[vLLM]"], "arms: vLLM needs vllm_site and vllm_model"),
        (["00_enviroment"], "did you mean '00_environment'?"),
    ],
)
def test_bad_parameters_start_nothing(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = p99lab("run", *arguments, "--out", tmp_path / "outputs")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (tmp_path / "outputs").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = p99lab("run", "99", "--tier", "smoke", "--out", tmp_path / "file")
    says = f"p99lab: cannot write to {tmp_path}/file/99_ledger: Not a directory\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_a_disk_without_room_for_the_end_of_a_run_starts_nothing(
    tmp_path: Path, make_job: MakeJob, quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UnwritableError, match=r"^no room for 4 MiB in .*tiny: No space left on device$") as caught:
        run(tmp_path, make_job(tmp_path, "print('never')"), quiet)
    assert caught.value.exit_code == 1
    assert list((tmp_path / "outputs" / "tiny").iterdir()) == []


def test_a_disk_that_can_promise_no_room_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    reserve.make_writable(tmp_path / "outputs")
    assert (tmp_path / "outputs").is_dir()


def test_a_page_that_cannot_be_made_costs_the_page_alone(
    tmp_path: Path, make_job: MakeJob, quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: RunFolder) -> str:
        raise ValueError("no template 'base'\nin /usr/share")

    monkeypatch.setattr("p99lab.lab.report.render", broken)
    outcome = run(tmp_path, make_job(tmp_path, "1 + 1"), quiet)
    assert (outcome.ending.status, outcome.ending.exit_code) == ("completed", 0)
    assert record(outcome)["report_problem"] == "ValueError: no template 'base' in /usr/share"
    assert not outcome.report.exists()
    assert outcome.folder.verify() == []
    console = Console(width=200, record=True, file=io.StringIO())
    progress.print_outcome(outcome, console)
    assert "no report: ValueError: no template 'base' in /usr/share" in console.export_text()
