"""Faults of a headless run: what plain papermill makes of them, and what the runner does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from p99lab.lab import cgroups, reaping
from p99lab.lab.execution import StopSignal
from p99lab.lab.proof import fault_runs, faults
from p99lab.lab.proof.faults import Trial
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.watchdog import Limits
from tests.lab.outcomes import (
    MakeJob,
    assert_ended,
    executed,
    is_running,
    printed,
    printed_in,
    record,
    run,
    statuses,
)

KILLED = "print('last words', flush=True); import os; os.kill(os.getpid(), 9)"
SLOW = "print('waiting', flush=True); import time; time.sleep(600)"
STOPPED = "print('so far', flush=True); import os, time; os.kill(os.getppid(), 15); time.sleep(600)"
EXITS = "import sys; sys.exit(3)"
BIG = "print('x' * 200_000)"
NUM_BIG = 12
TALK = "print('y' * (3 << 19), flush=True)"  # four of them do not fit on the small disk
DISK_BYTES = 5 << 20
FILL = """
try:
    with open({file!r}, "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)): ...
except OSError as error:
    print(error)
"""
WHO = """
import json
from ipykernel.connect import get_connection_file
print("transport", json.load(open(get_connection_file()))["transport"])
"""

# --- plain papermill, all at once -------------------------------------------------------------------------------------

COUNT_WRITES = """
import sys
from papermill import cli, iorw
log, write = sys.argv.pop(1), iorw.LocalHandler.write
def counted(self, text, path):
    with open(log, "a") as file:
        file.write(f"{len(text)}\\n")
    return write(self, text, path)
iorw.LocalHandler.write = counted
cli.papermill(sys.argv[1:])
"""


@dataclass(frozen=True)
class Papermilled:
    """What papermill left: its exit code and the output notebook's text."""

    exit_code: int
    text: str
    folder: Path

    @property
    def notebook(self) -> nbformat.NotebookNode:
        return nbformat.reads(self.text, as_version=4)

    def marks(self) -> list[str]:
        return [cell.metadata.papermill.status for cell in self.notebook.cells if cell.cell_type == "code"]

    def is_called_a_success(self) -> bool:
        """Every cell is marked completed, none as an exception, and neither is the notebook."""
        marks = [cell.metadata.papermill for cell in self.notebook.cells]
        return {mark.status for mark in marks} == {"completed"} and not any(mark.exception for mark in marks)


Papermills = Callable[[str], Papermilled]


def source(folder: Path, *sources: str, tag: str = "parameters") -> Path:
    cells = [new_code_cell("sha = 'a'", metadata={"tags": [tag]}), *map(new_code_cell, sources)]
    kernelspec = {"name": "another-kernel", "display_name": "Elsewhere", "language": "python"}
    folder.mkdir(parents=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), folder / "in.ipynb")
    return folder / "in.ipynb"


@pytest.fixture(scope="module")
def papermills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Papermills]:
    """Papermill on a notebook per fault; all were started together, each is waited for when it is asked for."""
    root = tmp_path_factory.mktemp("papermill")
    sources = {
        "healthy": ["print(sha)", WHO, *[BIG] * NUM_BIG],
        "killed": ["1", KILLED, "print('after')"],
        "slow": [SLOW, "print('after')"],
        "stopped": [STOPPED, "print('after')"],
        "exits": [EXITS, "print('after')"],
        "full": [TALK] * 4,
    }
    given = {"healthy": ["-p", "sha", "12e4567", "-p", "unknown", "1"], "slow": ["--execution-timeout", "2"]}
    commands = {}
    for name, cells in sources.items():
        command = fault_runs.papermill(source(root / name, *cells), root / name / "out.ipynb", "-k", "python3")
        commands[name] = [*command, *given.get(name, [])]
    commands["healthy"][1:3] = ["-c", COUNT_WRITES, str(root / "healthy" / "writes")]
    commands["full"][4] = str(root / "full" / "disk" / "out.ipynb")
    disk = root / "full" / "disk"
    commands["full"] = fault_runs.on_small_disk(commands["full"], disk, root / "full", DISK_BYTES)
    running = {name: fault_runs.start(command) for name, command in commands.items()}

    def ended(name: str) -> Papermilled:
        running[name].communicate(timeout=120)
        return Papermilled(running[name].returncode, (root / name / "out.ipynb").read_text(), root / name)

    yield ended
    for process in running.values():
        process.kill()
        process.communicate()


# --- beside papermill -------------------------------------------------------------------------------------------------


def test_a_killed_kernel(tmp_path: Path, make_job: MakeJob, quiet: Any, papermills: Papermills) -> None:
    assert papermills("killed").is_called_a_success()  # though the last cell never ran

    start = "import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True); print(child.pid)"
    outcome = run(tmp_path, make_job(tmp_path, start, KILLED, "print('after')"), quiet)
    assert_ended(outcome, "kernel died", 30)
    assert statuses(outcome)[2:] == ["completed", "failed", "not run"]
    assert "killed by SIGKILL in cell 4 of 5" in outcome.ending.reason
    assert not is_running(int(printed(outcome).split()[0]))


def test_a_cell_that_takes_too_long(tmp_path: Path, make_job: MakeJob, quiet: Any, papermills: Papermills) -> None:
    assert papermills("slow").is_called_a_success()

    outcome = run(tmp_path, make_job(tmp_path, SLOW, "print('after')"), quiet, limits=Limits(cell_s=1.5))
    assert_ended(outcome, "timed out", 20)
    assert outcome.ending.reason.startswith("cell 3 of 4 (A tiny question): ran longer than 1.5 s")
    assert statuses(outcome)[2:] == ["failed", "not run"]
    assert "waiting" in printed(outcome)
    error = next(output for output in executed(outcome).cells[3].outputs if output.output_type == "error")
    assert error.ename == "KeyboardInterrupt"  # the traceback shows where it hung


def test_output_of_the_running_cell(tmp_path: Path, make_job: MakeJob, quiet: Any, papermills: Papermills) -> None:
    theirs = papermills("stopped")
    assert theirs.exit_code != 0
    assert "so far" not in printed_in(theirs.notebook)

    outcome = run(tmp_path, make_job(tmp_path, STOPPED, "print('after')"), quiet)
    assert_ended(outcome, "pre-empted", 40)
    assert outcome.ending.reason == "pre-empted by SIGTERM"
    assert statuses(outcome)[2:] == ["failed", "not run"]
    assert "so far" in printed(outcome)


def test_sys_exit_is_the_runs_exit(tmp_path: Path, make_job: MakeJob, quiet: Any, papermills: Papermills) -> None:
    assert papermills("exits").exit_code == 1

    outcome = run(tmp_path, make_job(tmp_path, EXITS, "print('after')"), quiet)
    assert_ended(outcome, "exited", 3)
    assert "called sys.exit(3)" in outcome.ending.reason
    assert statuses(outcome)[2:] == ["failed", "not run"]


def test_a_full_disk(tmp_path: Path, papermills: Papermills) -> None:
    theirs = papermills("full")
    assert theirs.exit_code != 0
    assert theirs.text  # written over the good one that it had saved before
    with pytest.raises(ValueError, match=r"Unterminated|Expecting|JSON"):
        json.loads(theirs.text)

    ledger, disk = tmp_path / "ledger", tmp_path / "disk"
    cells = [FILL.format(file=str(disk / "fill")), *[TALK] * 4]
    notebook = fault_runs.write_notebook(tmp_path / "struck.ipynb", cells, ledger)
    command = fault_runs.ours(notebook, disk / "outputs")
    process = fault_runs.start(fault_runs.on_small_disk(command, disk, tmp_path / "kept", DISK_BYTES))
    ours = fault_runs.struck(process, tmp_path / "kept" / "outputs", ledger)
    assert ours.exit_code == 1
    assert (ours.record()["status"], ours.record()["exit_code"]) == ("failed", 1)
    assert "cannot write notebook.ipynb" in ours.record()["reason"]
    assert [cell["status"] for cell in ours.record()["cells"]] == ["completed"] * 5
    assert ours.folder is not None
    assert fault_runs.is_valid_notebook(ours.folder.path / "notebook.ipynb")  # the one saved before
    assert ours.marks_are_true()
    assert ours.is_sealed()


def test_parameters_kernel_and_transport(papermills: Papermills) -> None:
    """Ours: `test_bad_parameters_start_nothing` and the good run in test_runner.py."""
    theirs = papermills("healthy")
    assert theirs.exit_code == 0  # an unknown parameter is none of its concern
    assert printed_in(theirs.notebook).splitlines()[:2] == ["inf", "transport tcp"]
    assert theirs.notebook.metadata.kernelspec.name == "another-kernel"  # it ran python3


def test_big_outputs_are_not_saved_again_with_every_cell(
    tmp_path: Path, make_job: MakeJob, quiet: Any, monkeypatch: pytest.MonkeyPatch, papermills: Papermills
) -> None:
    theirs = papermills("healthy")
    assert sum(map(int, (theirs.folder / "writes").read_text().split())) > NUM_BIG / 2 * len(theirs.text)

    written, write = [], RunFolder.write

    def counted(folder: RunFolder, name: str, content: bytes | str) -> Path:
        if name == "notebook.ipynb":
            written.append(len(content))
        return write(folder, name, content)

    monkeypatch.setattr(RunFolder, "write", counted)
    outcome = run(tmp_path, make_job(tmp_path, *[BIG] * NUM_BIG), quiet)
    assert_ended(outcome, "completed", 0)
    assert len(written) <= 2 + record(outcome)["seconds"] / 5  # as the first cell begins, at the end, every 5 s


# --- stopped ----------------------------------------------------------------------------------------------------------

HOLD_THE_INTERPRETER = "import itertools; all(itertools.repeat(True))"  # in C, deaf to Ctrl-C
LET_IT_OUT = "time.sleep(0.5)"  # ipykernel sends from a thread that needs the interpreter, after `flush` has returned


@pytest.mark.parametrize(
    ("name", "status", "exit_code"), [("SIGUSR1", "pre-empted", 40), ("SIGINT", "interrupted", 130)]
)
def test_a_stopped_run_keeps_its_state(
    tmp_path: Path, make_job: MakeJob, quiet: Any, name: str, status: str, exit_code: int
) -> None:
    hang = HOLD_THE_INTERPRETER if name == "SIGUSR1" else "time.sleep(600)"
    say = f"import os, signal, time; print('so far', flush=True); {LET_IT_OUT}"
    stop = f"{say}; os.kill(os.getppid(), signal.{name}); {hang}"
    outcome = run(tmp_path, make_job(tmp_path, stop, "print('after')"), quiet)
    assert_ended(outcome, status, exit_code)
    assert name in outcome.ending.reason
    assert statuses(outcome)[2:] == ["failed", "not run"]
    assert "so far" in printed(outcome)


IN_A_TERMINAL = """
import os, pty, select, signal, sys
from pathlib import Path
folder, *command = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    os.execv(command[0], command)
while not list(Path(folder).glob("99_ledger/*/notebook.ipynb")):  # its first cell has not begun
    if select.select([terminal], [], [], 0.02)[0]:
        print(os.read(terminal, 1 << 12).decode(), flush=True)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_terminal_that_goes_stops_a_run_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "p99lab.cli", "run", "99", "--tier", "smoke", "--out", str(tmp_path)]
    code = subprocess.run([sys.executable, "-c", IN_A_TERMINAL, str(tmp_path), *command]).returncode
    (path,) = tmp_path.glob("99_ledger/*")
    told = RunFolder(path).read_json("run.json")
    assert (code, told["exit_code"], told["status"]) == (40, 40, "pre-empted")
    assert told["reason"] == "pre-empted by SIGHUP"
    assert RunFolder(path).verify() == []


def test_a_run_under_nohup_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


STALL = f"""
import threading, time
def waiting_for_a_lock():
    with lock: lock.acquire()
def stuck():
    {HOLD_THE_INTERPRETER}
lock = threading.Lock()
threading.Thread(target=waiting_for_a_lock, daemon=True).start()
print("so far", flush=True)
{LET_IT_OUT}
stuck()
"""


def test_a_stalled_cell_shows_where(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, STALL, "print('after')"), quiet, limits=Limits(stall_s=1.0))
    assert_ended(outcome, "timed out", 20)
    where, what = "cell 3 of 4 (A tiny question)", "no output, no finished cell and no file for 1 s"
    assert outcome.ending.reason == f"{where}: {what}; every thread's stack is in stacks.txt"
    assert statuses(outcome)[2:] == ["failed", "not run"]
    assert "so far" in printed(outcome)
    stacks = (outcome.folder.path / "stacks.txt").read_text()
    assert stacks.startswith(f"{where}: {what}\n")
    assert "in stuck" in stacks
    assert "in waiting_for_a_lock" in stacks


def test_a_deadline_holds_before_the_first_cell_too(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, "print('after')"), quiet, limits=Limits(deadline_s=0.0))
    assert_ended(outcome, "timed out", 20)
    assert outcome.ending.reason.startswith("the kernel's start: the run's deadline of 0 s has passed")
    assert set(statuses(outcome)) == {"not run"}


def test_a_crash_in_c_shows_where(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    crash = "import ctypes\ndef broken(): ctypes.string_at(0)\nbroken()"
    outcome = run(tmp_path, make_job(tmp_path, crash), quiet)
    assert_ended(outcome, "kernel died", 30)
    assert "SIGSEGV" in outcome.ending.reason
    assert "in broken" in (outcome.folder.path / "stacks.txt").read_text()


# --- nothing is left --------------------------------------------------------------------------------------------------

UNTRACKED = """
from ipykernel.connect import get_connection_file
from pathlib import Path
foreign = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(foreign._name, "shared_memory")
tell(shared_memory=foreign.name)
noted = Path(get_connection_file()).parent / "shared-memory"
while not noted.exists() or foreign.name not in noted.read_text():
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """Runners at work, all started together, each with a server, shared memory and, as root, a cgroup of its run's."""
    started = {}
    for victim in ("kernel", "runner", "both"):
        folder = tmp_path_factory.mktemp(victim)
        cells = [fault_runs.OWN_THINGS, UNTRACKED, "print('so far', flush=True); time.sleep(600)"]
        notebook = fault_runs.write_notebook(folder / "struck.ipynb", cells, folder / "ledger")
        started[victim] = fault_runs.start(fault_runs.ours(notebook, folder / "outputs")), folder
    yield started
    for process, _ in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("victim", "exit_code", "statuses"),
    [
        ("kernel", 30, ["completed", "completed", "failed"]),
        ("runner", -signal.SIGKILL, None),
        ("both", -signal.SIGKILL, None),
    ],
)
def test_after_any_death_nothing_is_left(
    runners: dict[str, tuple[subprocess.Popen[str], Path]], victim: str, exit_code: int, statuses: list[str] | None
) -> None:
    runner, folder = runners[victim]
    while 3 not in fault_runs.Ledger.read(folder / "ledger").all("began"):
        assert runner.poll() is None, runner.communicate()
        time.sleep(0.02)
    kernel, run_folder = fault_runs.kernel_of(runner), fault_runs.run_under(folder / "outputs")
    assert kernel is not None
    assert run_folder is not None
    left = reaping.left_by(run_folder.path.resolve())
    assert {" ".join(line.split()[:-1]) for line in left} >= {"process", "shared memory", "socket folder"}
    if victim != "runner":
        kernel.kill()
    if victim != "kernel":
        runner.kill()
    run_after = fault_runs.struck(runner, folder / "outputs", folder / "ledger")
    assert run_after.exit_code == exit_code
    assert run_after.left() == []
    assert not is_running(kernel.pid)
    assert run_after.notebook_is_whole()
    assert run_after.marks_are_true()
    assert run_after.is_sealed() == (statuses is not None)
    ended = run_after.record()
    assert ended["status"] == ("running" if statuses is None else "kernel died")  # nothing claims that it ended
    assert [cell["status"] for cell in ended.get("cells") or []] == (statuses or [])


# --- memory -----------------------------------------------------------------------------------------------------------

HOG = "hog = []\nwhile True:\n    hog.append(b'x' * (1 << 24))"
MEMORY_BYTES = 400 << 20


@contextlib.contextmanager
def limited_group() -> Iterator[Path]:
    """A memory cgroup of this test's own. Skips where none can be made: not as root, in most containers."""
    trees = cgroups.hierarchies()
    tree = next((tree for tree in trees if "memory" in tree.controllers), None)
    tree = tree or next((tree for tree in trees if not tree.controllers), None)
    if tree is None:
        pytest.skip("no memory cgroup can be made here: none is mounted")
    group = tree.mount / f"p99lab-test-{os.getpid()}"
    try:
        group.mkdir()
        limit, swap = ("limit_in_bytes", "memsw.limit_in_bytes") if tree.controllers else ("max", "swap.max")
        (group / f"memory.{limit}").write_text(str(MEMORY_BYTES))
        with contextlib.suppress(OSError):  # no accounting of swap
            (group / f"memory.{swap}").write_text(str(MEMORY_BYTES) if tree.controllers else "0")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def test_out_of_host_memory_is_said_where_the_cgroup_proves_it(tmp_path: Path) -> None:
    with limited_group() as group:
        notebook = fault_runs.write_notebook(tmp_path / "struck.ipynb", ["1", HOG], tmp_path / "ledger")
        command = fault_runs.ours(notebook, tmp_path / "outputs")
        enter = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
        process = fault_runs.start([*enter, *command])
        struck = fault_runs.struck(process, tmp_path / "outputs", tmp_path / "ledger")
        assert struck.left() == []
    assert struck.exit_code == 31
    assert (struck.record()["status"], struck.record()["exit_code"]) == ("out of memory", 31)
    assert "the kernel was killed by SIGKILL in cell 2 of 2" in struck.record()["reason"]
    assert [cell["status"] for cell in struck.record()["cells"]] == ["completed", "failed"]
    assert struck.is_sealed()


def test_out_of_gpu_memory_is_known_in_a_wrapped_error(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    raises = """
class OutOfMemoryError(RuntimeError): ...
def allocate():
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139 GiB")
try:
    allocate()
except OutOfMemoryError as error:
    raise ValueError("the step failed") from error
"""
    outcome = run(tmp_path, make_job(tmp_path, raises), quiet)
    assert_ended(outcome, "out of GPU memory", 32)
    assert outcome.ending.reason == "cell 3 of 3 (A tiny question): ValueError: the step failed"


# --- `make proof` -----------------------------------------------------------------------------------------------------


def test_the_proof_counts_every_kind_of_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Trial(1.0, 40, True, True, True, True, 3.0, ())
    wrongs: list[dict[str, Any]] = [
        {"right_code": False},
        {"marks_are_true": False},
        {"notebook_is_whole": False},
        {"seal_is_right": False},
        {"left": ("process 7",)},
        {"over_after_s": 11.0},
    ]
    trials = [good, *(replace(good, **wrong) for wrong in wrongs)]
    monkeypatch.setattr(faults, "FAULTS", {"runner told to stop": lambda _folder, number, _moment: trials[number]})
    made = list(faults.checks(tmp_path, repeats=len(trials), papermills=0))[:-1]
    assert [(check.expected, check.found, check.passed) for check in made] == [("7 of 7", "6 of 7", False)] * 6
    assert "process 7" in made[4].note
    monkeypatch.setattr(faults, "FAULTS", {"runner told to stop": lambda *_: good})
    assert all(check.passed for check in faults.checks(tmp_path / "again", repeats=2, papermills=0))
