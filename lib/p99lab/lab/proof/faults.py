"""Each fault many times at random moments: the exit code, the marks, the notebook, the seal, and what is left.

Beside it plain papermill, with a kernel that was killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from p99lab.lab.proof import fault_runs
from p99lab.lab.proof.check import Check
from p99lab.lab.proof.fault_runs import OWN_THINGS, Struck

REPEATS = 50
PAPERMILL_REPEATS = 5

_SEED = 20261129
_LATEST_S = 2.5  # after the run's folder was made, or its first cell began; the last cell never ends
_STEPS = tuple(f"print('step {number}', flush=True); time.sleep(0.4)" for number in range(1, 5))
_ENDLESS = ("time.sleep(600)", "import itertools; all(itertools.repeat(True))")  # the second is deaf to an interrupt
_MAX_STOP_S = 10.0
_DISK_BYTES = 8 << 20

_FILL = """
import threading
full = threading.Event()
def fill():
    time.sleep({after_s})
    try:
        with open({disk!r} + "/fill", "wb") as file:
            while True:
                file.write(bytes(1 << 16)), file.flush()
    except OSError:
        full.set()
threading.Thread(target=fill, daemon=True).start()
"""
_KEEP = """
from p99lab.lab.run_folder import RunFolder
RunFolder.current().write("metrics/step-{number}.json", "{{}}")
time.sleep(0.4)
"""
_OUTLAST = 'full.wait(); RunFolder.current().write("metrics/last.json", "{}")'
_PRINT = "print('x' * {length}, flush=True); time.sleep(0.2)"


@dataclass(frozen=True)
class Trial:
    """One run that was struck, and whether it ended as it should."""

    moment_s: float
    exit_code: int
    right_code: bool
    marks_are_true: bool
    notebook_is_whole: bool
    seal_is_right: bool
    over_after_s: float
    left: tuple[str, ...]


def checks(work: Path, repeats: int = REPEATS, papermills: int = PAPERMILL_REPEATS) -> Iterator[Check]:
    """All faults, `repeats` times each, as many at a time as there are CPUs."""
    for fault, strike in FAULTS.items():
        generator = random.Random(f"{_SEED} {fault}")
        moments = [round(generator.uniform(0.0, _LATEST_S), 3) for _ in range(repeats)]
        folders = [work / fault.replace(" ", "-") / str(number) for number in range(repeats)]
        for folder in folders:
            folder.mkdir(parents=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            yield from _judged(fault, list(pool.map(strike, folders, range(repeats), moments)))
    yield _papermill(work / "papermill", papermills)


def _judged(fault: str, trials: Sequence[Trial]) -> Iterator[Check]:
    right: Mapping[str, Callable[[Trial], bool]] = {
        "the right exit code": lambda trial: trial.right_code,
        "true marks": lambda trial: trial.marks_are_true,
        "a whole notebook": lambda trial: trial.notebook_is_whole,
        "sealed if it ended, and only then": lambda trial: trial.seal_is_right,
        "nothing left over": lambda trial: not trial.left,
    }
    if fault == _STOPPED:
        right = {**right, f"over within {_MAX_STOP_S:g} s": lambda trial: trial.over_after_s <= _MAX_STOP_S}
    for name, holds in right.items():
        wrong = [
            f"struck at {trial.moment_s:g} s: exit code {trial.exit_code} after {trial.over_after_s:.1f} s"
            + "".join(f", {thing}" for thing in trial.left)
            for trial in trials
            if not holds(trial)
        ]
        found = len(trials) - len(wrong)
        expected = f"{len(trials)} of {len(trials)}"
        yield Check(f"{fault}: {name}", expected, f"{found} of {len(trials)}", not wrong, "; ".join(wrong[:5]))


def _kernel_killed(folder: Path, number: int, moment_s: float) -> Trial:
    process = _started(folder, number, moment_s)
    _kill_kernel(process)
    return _ended(folder, process, moment_s, 30)


def _runner_terminated(folder: Path, number: int, moment_s: float) -> Trial:
    process = _started(folder, number, moment_s)
    process.send_signal(signal.SIGTERM if number % 2 else signal.SIGUSR1)
    return _ended(folder, process, moment_s, 40)


def _runner_killed(folder: Path, number: int, moment_s: float) -> Trial:
    process = _started(folder, number, moment_s)
    if number % 2:
        _kill_kernel(process)
    process.kill()
    return _ended(folder, process, moment_s, -signal.SIGKILL, sealed=False)


def _disk_filled(folder: Path, number: int, moment_s: float) -> Trial:
    """By a file, which a cell then stumbles on, or by the notebook itself, which then cannot be saved as it ended."""
    disk, kept, ledger = folder / "disk", folder / "kept", folder / "ledger"
    by_file = number % 2 == 0 and fault_runs.can_mount()
    if by_file:
        filling = _FILL.format(after_s=moment_s, disk=str(disk))
        cells = [filling, *(_KEEP.format(number=step) for step in range(4)), _OUTLAST]
    else:
        cells = [_PRINT.format(length=int((1.0 + moment_s) * (1 << 20))) for _ in range(9)]
    notebook = fault_runs.write_notebook(folder / "struck.ipynb", cells, ledger)
    command = fault_runs.on_small_disk(fault_runs.ours(notebook, disk / "outputs"), disk, kept, _DISK_BYTES)
    run = fault_runs.struck(fault_runs.start(command), kept / "outputs", ledger)
    return _trial(run, moment_s, 10 if by_file else 1)


_STOPPED = "runner told to stop"
FAULTS: Mapping[str, Callable[[Path, int, float], Trial]] = MappingProxyType(
    {
        "kernel killed": _kernel_killed,
        _STOPPED: _runner_terminated,
        "runner killed, every other time with its kernel": _runner_killed,
        "disk filled": _disk_filled,
    }
)


def _started(folder: Path, number: int, moment_s: float) -> subprocess.Popen[str]:
    """A runner at work, `moment_s` after it made its folder or, for two numbers of four, its first cell began."""
    cells = [OWN_THINGS, *_STEPS, _ENDLESS[number % 3 == 0]]
    notebook = fault_runs.write_notebook(folder / "struck.ipynb", cells, folder / "ledger")
    process = fault_runs.start(fault_runs.ours(notebook, folder / "outputs"))
    awaited = "outputs/*/*/run.json" if number % 4 < 2 else "ledger"
    while not any(folder.glob(awaited)) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(moment_s)
    return process


def _kill_kernel(runner: subprocess.Popen[str]) -> None:
    while (kernel := fault_runs.kernel_of(runner)) is None and runner.poll() is None:
        time.sleep(0.01)
    if kernel is not None:
        kernel.kill()


def _ended(folder: Path, process: subprocess.Popen[str], moment_s: float, code: int, sealed: bool = True) -> Trial:
    return _trial(fault_runs.struck(process, folder / "outputs", folder / "ledger"), moment_s, code, sealed)


def _trial(run: Struck, moment_s: float, code: int, sealed: bool = True) -> Trial:
    recorded = run.record().get("exit_code")
    return Trial(
        moment_s=moment_s,
        exit_code=run.exit_code,
        right_code=run.exit_code == code and recorded == (run.exit_code if sealed else None),
        marks_are_true=run.marks_are_true(),
        notebook_is_whole=run.notebook_is_whole(),
        seal_is_right=run.is_sealed() == sealed,
        over_after_s=run.over_after_s,
        left=tuple(run.left()),
    )


def _papermill(work: Path, repeats: int) -> Check:
    """How often plain papermill calls cells completed that the death of the kernel kept from running."""
    work.mkdir(parents=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lies = sum(pool.map(lambda number: _papermill_lies(work / str(number)), range(repeats)))
    found, expected = f"{lies} of {repeats} said completed", f"{repeats} of {repeats} said completed"
    note = "of cells that never ran, their kernel dead"
    return Check("plain papermill, kernel killed", expected, found, lies == repeats, note)


def _papermill_lies(folder: Path) -> bool:
    folder.mkdir()
    cells = ["1", "2", "os.kill(os.getpid(), 9)", "4", "5"]
    notebook = fault_runs.write_notebook(folder / "struck.ipynb", cells, folder / "ledger")
    fault_runs.start(fault_runs.papermill(notebook, folder / "after.ipynb")).communicate(timeout=120)
    ended = fault_runs.Ledger.read(folder / "ledger").all("ended")
    marks = fault_runs.statuses(folder / "after.ipynb")
    return any(status == "completed" and number not in ended for number, status in marks.items())
