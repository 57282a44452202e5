"""A notebook of three units that is killed twice, and taken up until it is done."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from p99lab.lab import resume, runner, units
from p99lab.lab.job import Job
from p99lab.lab.runner import Outcome

UNITS = """
import os, pathlib
from p99lab.lab import results
from p99lab.lab.units import Units

units = Units.current()
found = {}
for number, name in enumerate(("one", "two", "three"), start=1):
    if (unit := units.get(name)) is None:
        died_before = pathlib.Path(word, name)
        if not died_before.exists() and pathlib.Path(word).exists():
            died_before.touch()
            os.kill(os.getpid(), DEADLY[name]) if name in DEADLY else None
        units.finish(name, {"value": str(number ** 0.5).encode()}, seconds=0.5)
        unit = units.get(name)
    print(name, "by", unit.manifest.run_id)
    found[name] = float(unit.read("value"))
results.metrics("values", found)
"""
DELIVERABLE = "metrics/values.json"
MakeJob = Callable[..., Job]


def run(tmp_path: Path, job: Job, quiet: Any) -> Outcome:
    return runner.run(job, quiet(), tmp_path / "outputs")


def again(job: Job, outcome: Outcome) -> Job:
    return resume.prepare(outcome.folder, None, {"tiny": job.contract}, job.notebook)


def printed(outcome: Outcome) -> list[str]:
    cells = nbformat.read(outcome.folder.path / "notebook.ipynb", as_version=4).cells
    text = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))
    return re.findall(r"^\w+ by \S+$", text, re.MULTILINE)


@pytest.fixture
def job(tmp_path: Path, make_job: MakeJob) -> Job:
    (tmp_path / "deaths").mkdir()
    deadly = "DEADLY = {'two': 9, 'three': 9}"
    return make_job(tmp_path, deadly, UNITS, deliverables=(DELIVERABLE,), word=str(tmp_path / "deaths"))


def test_killed_twice_and_resumed_twice_is_as_never_stopped(tmp_path: Path, job: Job, quiet: Any) -> None:
    first = run(tmp_path, job, quiet)
    assert (first.ending.status, first.can_be_resumed) == ("kernel died", True)
    second = run(tmp_path, again(job, first), quiet)
    assert second.ending.status == "kernel died"
    third = run(tmp_path, again(job, second), quiet)
    assert (third.ending.status, third.ending.exit_code, third.can_be_resumed) == ("completed", 0, False)

    ids = [outcome.folder.run_id for outcome in (first, second, third)]
    assert printed(third) == [f"one by {ids[0]}", f"two by {ids[1]}", f"three by {ids[2]}"]
    told = third.folder.read_json("run.json")
    assert told["resumed_from"] == {
        "run_id": ids[1],
        "status": "kernel died",
        "restored": ["one", "two"],
        "damaged": [],
        "measured": ["three"],
    }
    assert second.folder.read_json("run.json")["resumed_from"]["restored"] == ["one"]
    for outcome in (first, second, third):
        assert outcome.folder.verify() == []

    unbroken = run(tmp_path, job, quiet)  # every unit has died before by now
    assert unbroken.ending.status == "completed"
    assert unbroken.folder.read_json("run.json")["resumed_from"] is None
    assert unbroken.folder.read_json(DELIVERABLE) == third.folder.read_json(DELIVERABLE)


def test_a_run_records_what_its_units_depend_on(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, "from p99lab.lab.units import Units"), quiet)
    told = outcome.folder.read_json("run.json")
    assert {"tiny.ipynb", "p99lab.lab.units"} <= outcome.folder.read_json("sources.json").keys()
    assert units.basis(told) is not None
    assert told["tier_digest"] is None
    assert told["rules"] == {}
    assert told["runner"].keys() == {"pid", "started"}


def test_a_notebook_that_is_not_plain_python_runs_but_keeps_no_units(
    tmp_path: Path, make_job: MakeJob, quiet: Any
) -> None:
    keep = "from p99lab.lab.units import Units\nUnits.current().finish('one', {'a': b'1'}, seconds=1.0)"
    outcome = run(tmp_path, make_job(tmp_path, "%pwd", keep), quiet)
    assert outcome.ending.status == "completed"
    assert outcome.folder.read_json("run.json")["code"] is None
    assert not (outcome.folder.path / "units").exists()
