"""What can be resumed and what cannot, each reason in one line; no kernel is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from p99lab.errors import BadParameterError
from p99lab.lab import alive, parameters, resume, sources, units
from p99lab.lab.job import Job
from p99lab.lab.parameters import Contract
from p99lab.lab.resume import Asked
from p99lab.lab.run_folder import RunFolder
from p99lab.observe import hardware
from p99lab.strict import StrictModel

pytestmark = pytest.mark.light


class Tiny(StrictModel):
    word: str
    seed: int = 0


KNOWN = {"09_tiny": Contract("09_tiny", Tiny), "10_other": Contract("10_other", Tiny)}
HERE = hardware.label(hardware.fingerprint())


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    return write_notebook(tmp_path, "from p99lab.lab import claims")


def write_notebook(folder: Path, code: str) -> Path:
    cells = [{"cell_type": "code", "metadata": {}, "source": [code], "outputs": []}]
    path = folder / "09_tiny.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return path


def earlier_run(notebook: Path, *, seal: bool = True, **changes: Any) -> RunFolder:
    """A run that was pre-empted after one unit, as the runner leaves it."""
    folder = RunFolder.create(notebook.parent / "outputs" / "09_tiny")
    values, digests = Tiny(word="a"), sources.digests(notebook)
    record = {
        "notebook": "09_tiny",
        "tier": "smoke",
        "status": "pre-empted",
        "code": sources.digest(digests.items()),
        "parameters_digest": parameters.digest(values),
        "tier_digest": "d",
        "hardware": HERE,
        "runner": alive.this_process(),
    }
    folder.write_json("run.json", record | changes)
    folder.write_json("sources.json", digests)
    folder.write("parameters.yaml", yaml.safe_dump(parameters.plain(values)))
    units.Units(folder, units.basis(folder.read_json("run.json"))).finish("one", {"a": b"1"}, seconds=1.0)
    if seal:
        folder.seal()
    return folder


def prepare(folder: RunFolder, notebook: Path, asked: Asked | None = None) -> Job:
    return resume.prepare(folder, asked, KNOWN, notebook)


def refusal(folder: RunFolder, notebook: Path, asked: Asked | None = None) -> str:
    with pytest.raises(BadParameterError) as caught:
        prepare(folder, notebook, asked)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_notebook_tier_and_parameters_come_from_the_run(notebook: Path) -> None:
    folder = earlier_run(notebook)
    job = prepare(folder, notebook)
    assert (job.contract.notebook, job.tier, job.parameters, job.tier_digest) == (
        "09_tiny",
        "smoke",
        Tiny(word="a"),
        "d",
    )
    assert job.resumes is not None
    assert (job.resumes.run_id, job.resumes.status) == (folder.run_id, "pre-empted")
    assert [unit.manifest.name for unit in job.resumes.units] == ["one"]
    assert resume.description(job) == f"resuming {folder.run_id} (pre-empted): 1 units restored"


def test_what_is_repeated_beside_it_may_not_differ(notebook: Path) -> None:
    folder = earlier_run(notebook)
    assert prepare(folder, notebook, Asked("09", "smoke", ["word=a", "seed=0"])).parameters == Tiny(word="a")
    assert "of 09_tiny, not of 10_other" in refusal(folder, notebook, Asked(notebook="other"))
    assert "has tier smoke, not laptop" in refusal(folder, notebook, Asked(tier="laptop"))
    assert "made with seed=0: a resumed run keeps" in refusal(folder, notebook, Asked(overrides=["seed=1"]))
    assert "did you mean 'seed'" in refusal(folder, notebook, Asked(overrides=["sede=1"]))


def test_a_completed_run_has_nothing_to_resume(notebook: Path) -> None:
    assert "nothing to resume" in refusal(earlier_run(notebook, status="completed"), notebook)


def test_a_run_that_was_killed_before_its_seal_can_be_resumed(notebook: Path) -> None:
    assert prepare(earlier_run(notebook, status="completed", seal=False), notebook).resumes is not None


def test_a_run_whose_runner_lives_is_left_alone(notebook: Path) -> None:
    folder = earlier_run(notebook, status="running", seal=False)
    assert f"still goes on (process {psutil.Process().pid})" in refusal(folder, notebook)


def test_a_run_whose_runner_was_killed_is_resumed(notebook: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    living = psutil.Process(child.pid)
    runner = {**alive.this_process(), "pid": child.pid}  # a number that went to another process since
    reused = earlier_run(
        notebook, status="running", runner={**runner, "started": "2001-01-01T00:00:00.000+00:00"}, seal=False
    )
    assert living.is_running()
    job = prepare(reused, notebook)
    child.kill()
    child.wait()
    assert job.resumes is not None
    assert job.resumes.status == "cut off"
    assert prepare(earlier_run(notebook, status="running", runner=runner, seal=False), notebook).resumes is not None


def test_changed_code_is_named(notebook: Path) -> None:
    bare, folder = earlier_run(notebook), earlier_run(notebook, revision="0123456789abcdef")
    write_notebook(notebook.parent, "from p99lab.lab import claims, plots")
    assert "code differs: 09_tiny.ipynb, p99lab.lab.plots" in refusal(bare, notebook)
    assert "code differs since revision 0123456789ab: 09_tiny.ipynb, p99lab.lab.plots" in refusal(folder, notebook)


def test_another_machine_is_named(notebook: Path) -> None:
    assert f"hardware differs: a mainframe, here {HERE}" in refusal(
        earlier_run(notebook, hardware="a mainframe"), notebook
    )


def test_parameters_that_were_changed_or_fit_no_more(notebook: Path) -> None:
    assert "parameters.yaml is not what it ran with" in refusal(earlier_run(notebook, parameters_digest="x"), notebook)
    folder = earlier_run(notebook, seal=False)
    folder.write("parameters.yaml", "word: a\nseeds: 3\n")
    assert "unknown parameter 'seeds'; did you mean 'seed'?" in refusal(folder, notebook)
    (folder.path / "parameters.yaml").unlink()
    assert "its parameters" in refusal(folder, notebook)


def test_a_run_that_recorded_no_code(notebook: Path) -> None:
    assert "did not record its code" in refusal(earlier_run(notebook, code=None), notebook)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_folder_that_is_no_run(notebook: Path, content: str | None) -> None:
    folder = RunFolder.create(notebook.parent)
    if content is not None:
        folder.write("run.json", content)
    assert "is no run" in refusal(folder, notebook)


def test_a_damaged_unit_is_said(notebook: Path) -> None:
    folder = earlier_run(notebook)
    (folder.path / "units/one/a").chmod(0o644)
    (folder.path / "units/one/a").write_bytes(b"2")
    job = prepare(folder, notebook)
    assert job.resumes is not None
    assert job.resumes.units == ()
    assert resume.description(job).endswith("0 units restored; damaged, to be measured again: one")


def test_the_command_names_a_listed_run_by_id_and_others_by_path(tmp_path: Path) -> None:
    listed = RunFolder.create(tmp_path / "outputs" / "09_tiny")
    assert resume.command(listed, tmp_path / "outputs") == f"p99lab run --resume {listed.run_id}"
    assert resume.command(listed, tmp_path / "else where") == f"p99lab run --resume {listed.path}"
    spaced = RunFolder.create(tmp_path / "else where" / "09_tiny")
    assert resume.command(spaced, tmp_path / "outputs") == f"p99lab run --resume '{spaced.path}'"


def p99lab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "p99lab.cli", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_on_the_command_line(tmp_path: Path) -> None:
    neither = p99lab("--out", tmp_path)
    assert (neither.returncode, neither.stderr.count("\n")) == (2, 1)
    assert "--resume" in neither.stderr
    nothing = p99lab("--resume", "2026", "--out", tmp_path)
    assert (nothing.returncode, nothing.stderr.count("\n"), nothing.stdout) == (2, 1, "")
    assert "no run '2026'" in nothing.stderr
