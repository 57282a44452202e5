"""Runs to be struck by faults: a notebook that tells a ledger of its own what it really did, and what became of it.

Executed as a module (`python -m p99lab.lab.proof.fault_runs NOTEBOOK OUTPUTS`) it runs one notebook, as `p99lab run`
would, and exits with its exit code.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil

from p99lab.errors import P99labError
from p99lab.lab import reaping
from p99lab.lab.run_folder import RunFolder
from p99lab.strict import StrictModel

_PATIENCE_S = 120.0

TELL = """
import json, os, time
def tell(**told):
    with open({ledger!r}, "a") as ledger:
        ledger.write(json.dumps(told) + "\\n")
"""

OWN_THINGS = """
import subprocess
from multiprocessing import resource_tracker, shared_memory
from p99lab.lab import cgroups, reaping
from p99lab.lab.run_folder import RunFolder

name = reaping.name_of(RunFolder.current().path)
server = subprocess.Popen(["sleep", "600"], start_new_session=True)
nameless = shared_memory.SharedMemory(create=True, size=1 << 20)
tell(shared_memory=nameless.name)
named = shared_memory.SharedMemory(f"{name}-pages", create=True, size=1 << 20)
resource_tracker.unregister(named._name, "shared_memory")  # nobody cleans up after this one
tell(shared_memory=named.name)
for tree in cgroups.hierarchies():
    try:
        (tree.mount / name / "below").mkdir(parents=True)
    except OSError:
        continue
    tell(cgroup=str(tree.mount / name))
    break
"""


@dataclass(frozen=True)
class Ledger:
    """What the cells themselves said: which began, which ended, what they own outside the run's folder."""

    entries: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> Ledger:
        lines = path.read_text().splitlines() if path.is_file() else []
        return cls(tuple(json.loads(line) for line in lines))

    def all(self, key: str) -> list[Any]:
        return [entry[key] for entry in self.entries if key in entry]

    def left(self) -> list[str]:
        segments = [Path("/dev/shm", name) for name in self.all("shared_memory")]
        return [str(path) for path in (*segments, *map(Path, self.all("cgroup"))) if path.exists()]


@dataclass(frozen=True)
class Struck:
    """A run after its fault: the exit code, its folder (None where it never got that far), what its cells told.

    `over_after_s`: how long its end was waited for.
    """

    exit_code: int
    over_after_s: float
    folder: RunFolder | None
    ledger: Ledger

    def record(self) -> dict[str, Any]:
        return {} if self.folder is None else dict(self.folder.read_json("run.json"))

    def notebook_is_whole(self) -> bool:
        """Valid where there is one: none is written before the first cell begins."""
        path = None if self.folder is None else self.folder.path / "notebook.ipynb"
        return path is None or not path.exists() or is_valid_notebook(path)

    def marks_are_true(self) -> bool:
        """No cell is called completed that did not end, none not run that began; in a sealed record none is open."""
        cells = self.record().get("cells")
        saved = {} if self.folder is None else statuses(self.folder.path / "notebook.ipynb")
        return self._fits(saved) and self._fits({cell["number"]: cell["status"] for cell in cells or []}, final=True)

    def is_sealed(self) -> bool:
        return self.folder is not None and self.folder.is_sealed and self.folder.verify() == []

    def left(self) -> list[str]:
        """What is left of it outside its folder; looks again for a while, as a guardian may be at work."""
        until = time.monotonic() + 15.0
        while (found := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        return self.ledger.left() + ([] if self.folder is None else reaping.left_by(self.folder.path.resolve()))

    def _fits(self, marks: dict[int, str], final: bool = False) -> bool:
        began, ended = self.ledger.all("began"), self.ledger.all("ended")
        wrong = [number for number, status in marks.items() if status == "completed" and number not in ended]
        wrong += [number for number, status in marks.items() if status == "not run" and number in began]
        return not wrong and not (final and {"running", "pending"} & set(marks.values()))


def write_notebook(path: Path, cells: Sequence[str], ledger: Path) -> Path:
    """A notebook of these code cells under a heading; each tells the ledger that it began, and that it ended."""
    told = [f"tell(began={number})\n{source}\ntell(ended={number})" for number, source in enumerate(cells, start=1)]
    told[0] = TELL.format(ledger=str(ledger)) + told[0]
    kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(  # type: ignore[no-untyped-call]
        cells=[
            nbformat.v4.new_markdown_cell("# A run to be struck"),  # type: ignore[no-untyped-call]
            *(nbformat.v4.new_code_cell(source) for source in told),  # type: ignore[no-untyped-call]
        ],
        metadata={"kernelspec": kernelspec},
    )
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
    return path


def statuses(notebook: Path) -> dict[int, str]:
    """Papermill's marks of the code cells, numbered from 1; none of a notebook that is absent or broken."""
    if not is_valid_notebook(notebook):
        return {}
    cells = [cell for cell in json.loads(notebook.read_bytes())["cells"] if cell["cell_type"] == "code"]
    return {number: cell["metadata"].get("papermill", {}).get("status", "") for number, cell in enumerate(cells, 1)}


def is_valid_notebook(path: Path) -> bool:
    """Whether the file is there, is JSON, and follows the notebook format."""
    try:
        nbformat.validate(nbformat.read(path, as_version=4))  # type: ignore[no-untyped-call]
    except (OSError, ValueError):
        return False
    return True


def ours(notebook: Path, outputs: Path) -> list[str]:
    """The command that runs a notebook as `p99lab run` does."""
    return [sys.executable, "-m", "p99lab.lab.proof.fault_runs", str(notebook), str(outputs)]


def papermill(notebook: Path, output: Path, *options: str) -> list[str]:
    """The command that runs a notebook with plain papermill."""
    return [sys.executable, "-m", "papermill", str(notebook), str(output), "--no-progress-bar", *options]


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def struck(process: subprocess.Popen[str], outputs: Path, ledger: Path) -> Struck:
    """Wait for the end of the one run under `outputs`; one that does not end is killed."""
    began_s = time.monotonic()
    try:
        process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return Struck(process.returncode, time.monotonic() - began_s, run_under(outputs), Ledger.read(ledger))


def run_under(outputs: Path) -> RunFolder | None:
    found = [path.parent for path in outputs.glob("*/*/run.json")]
    return RunFolder(found[0]) if found else None


def kernel_of(runner: subprocess.Popen[str]) -> psutil.Process | None:
    """The kernel that a runner has started; None where it has none."""
    try:
        children = psutil.Process(runner.pid).children()
        return next((child for child in children if "p99lab.lab.kernel" in child.cmdline()), None)
    except psutil.Error:
        return None


def can_mount() -> bool:
    """Whether a filesystem can be mounted for one process alone: as root, or in a user namespace."""
    return bool(_namespace())


def on_small_disk(command: Sequence[str], disk: Path, kept: Path, size_bytes: int) -> list[str]:
    """The command with a disk of that size at `disk`, whose content is in `kept` afterwards.

    Where nothing can be mounted no file may grow beyond that size instead, which a write finds out in the same way.
    """
    disk.mkdir()
    keep = f'"$@"; code=$?; cp -a "{disk}/." "{kept}"; exit $code'
    if namespace := _namespace():
        mount = f'mount -t tmpfs -o size={size_bytes} tmpfs "{disk}" || exit 99; {keep}'
        return [*namespace, "sh", "-c", mount, "sh", *command]
    return ["prlimit", f"--fsize={size_bytes}", "sh", "-c", keep, "sh", *command]


def _namespace() -> list[str]:
    for unshare in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        mount = [*unshare, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
        if shutil.which("unshare") and subprocess.run(mount, capture_output=True).returncode == 0:
            return unshare
    return []


class NoParameters(StrictModel):
    """Of a notebook that takes none."""


class _Silent:
    def cell_started(self, number: int, total: int, heading: str) -> None: ...

    def cell_ended(self, number: int, total: int, status: str, seconds: float) -> None: ...


def _run(notebook: Path, outputs: Path) -> int:
    from p99lab.lab import runner
    from p99lab.lab.job import Job
    from p99lab.lab.parameters import Contract

    job = Job(notebook, Contract(notebook.stem, NoParameters), "fault", NoParameters())
    try:
        return runner.run(job, _Silent(), outputs).ending.exit_code
    except P99labError as error:
        sys.stderr.write(f"p99lab: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_run(Path(sys.argv[1]), Path(sys.argv[2])))
