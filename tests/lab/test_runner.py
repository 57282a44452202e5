"""What the runner records when things go right and when they do not: each in a kernel of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
import yaml

from p99lab.lab import execution, runner
from p99lab.lab.job import Job
from p99lab.lab.run_folder import RunFolder
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


def printed(outcome: Outcome) -> str:
    cells = (cell for cell in executed(outcome).cells if cell.cell_type == "code")
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


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


def test_a_killed_kernel(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    start = "import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid)"
    die = "print('last words', flush=True); import os; os.kill(os.getpid(), 9)"
    outcome = run(tmp_path, make_job(tmp_path, start, die, "print('after')"), quiet)
    assert_ended(outcome, "kernel died", 30)
    assert statuses(outcome)[2:] == ["completed", "failed", "not run"]
    assert "killed by SIGKILL in cell 4 of 5" in outcome.ending.reason
    assert not is_running(int(printed(outcome).split()[0]))


def test_a_cell_that_takes_too_long(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    slow = "print('waiting', flush=True); import time; time.sleep(600)"
    outcome = run(tmp_path, make_job(tmp_path, slow, "print('after')"), quiet, cell_timeout_s=1.5)
    assert_ended(outcome, "timed out", 20)
    assert statuses(outcome)[2:] == ["failed", "not run"]
    assert "waiting" in printed(outcome)
    error = next(output for output in executed(outcome).cells[3].outputs if output.output_type == "error")
    assert error.ename == "KeyboardInterrupt"  # the traceback shows where it hung


@pytest.mark.parametrize(
    ("name", "status", "exit_code"),
    [("SIGTERM", "pre-empted", 40), ("SIGUSR1", "pre-empted", 40), ("SIGINT", "interrupted", 130)],
)
def test_a_stopped_run_keeps_its_state(
    tmp_path: Path, make_job: MakeJob, quiet: Any, name: str, status: str, exit_code: int
) -> None:
    stubborn = "import signal; _ = signal.signal(signal.SIGINT, signal.SIG_IGN)" if name == "SIGUSR1" else ""
    stop = (
        f"import os, signal, time; print('so far', flush=True); os.kill(os.getppid(), signal.{name}); time.sleep(600)"
    )
    outcome = run(tmp_path, make_job(tmp_path, f"{stubborn}\n{stop}", "print('after')"), quiet)
    assert_ended(outcome, status, exit_code)
    assert name in outcome.ending.reason
    assert statuses(outcome)[2:] == ["failed", "not run"]
    assert "so far" in printed(outcome)


def test_sys_exit_is_the_runs_exit(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, "import sys; sys.exit(3)", "print('after')"), quiet)
    assert_ended(outcome, "exited", 3)
    assert "called sys.exit(3)" in outcome.ending.reason
    assert statuses(outcome)[2:] == ["failed", "not run"]


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


def test_a_page_that_cannot_be_made_does_not_cost_the_figures(
    tmp_path: Path, make_job: MakeJob, quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> str:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(runner.report, "render", broken)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, make_job(tmp_path), quiet)
    folder = only_run(tmp_path)
    assert folder.verify() == []
    assert folder.read_json("run.json")["status"] == "completed"


def test_a_killed_runner_takes_its_kernel_with_it(tmp_path: Path, make_job: MakeJob) -> None:
    kill = "import os, time; open(pid_file, 'w').write(str(os.getpid())); os.kill(os.getppid(), 9); time.sleep(600)"
    job = make_job(tmp_path, kill.replace("pid_file", repr(str(tmp_path / "pid"))))
    script = f"""
from pathlib import Path
from p99lab.lab import job, parameters, progress, runner
from p99lab.strict import StrictModel
from rich.console import Console
class Tiny(StrictModel):
    word: str
tiny = job.Job(Path({str(job.notebook)!r}), parameters.Contract("tiny", Tiny), "smoke", Tiny(word="b"))
runner.run(tiny, progress.ConsoleProgress(Console()), Path({str(tmp_path / "outputs")!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not is_running(int((tmp_path / "pid").read_text()))
    (run_file,) = (tmp_path / "outputs").glob("tiny/*/run.json")
    assert json.loads(run_file.read_bytes())["status"] == "running"  # nothing claims that it ended
    assert not (run_file.parent / "SHA256SUMS").exists()


def p99lab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p99lab.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "100"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["00", "-p", "bufer_mib=3"], "unknown parameter 'bufer_mib'; did you mean 'buffer_mib'?"),
        (["00", "-p", "repeats=12e4567"], "repeats"),
        (["00", "--tier", "smok"], "did you mean 'smoke'?"),
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
