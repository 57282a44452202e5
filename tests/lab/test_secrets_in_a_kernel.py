"""A notebook that is given a secret, uses it, and lets it out in every way it can."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook
from pydantic import SecretStr
from rich.console import Console

from p99lab.errors import BadParameterError
from p99lab.lab import parameters, runner
from p99lab.lab.job import Job
from p99lab.lab.parameters import Contract
from p99lab.lab.progress import print_outcome
from p99lab.lab.run_folder import RunFolder
from p99lab.strict import StrictModel

VALUE = 'correct horse & "battery"'
VARIABLE = "P99LAB_SECRET_API_KEY"
LOUD = """
from pydantic import SecretStr
from p99lab.lab.parameters import Contract, check
from p99lab.strict import StrictModel
class Loud(StrictModel):
    api_key: SecretStr
    seed: int
parameters = check("09_loud", globals(), {"09_loud": Contract("09_loud", Loud)})
key = parameters.api_key.get_secret_value()
print(parameters, api_key, len(key))
"""
LET_OUT = """
import base64
import pandas as pd
from p99lab.lab import results
print(key)
print([key], base64.b64encode(("user:" + key).encode()).decode())
display({"text/html": f"<b>{key}</b>", "text/plain": key}, raw=True)
results.table("summary", pd.DataFrame({"what": ["key"], "here": [key]}))
"""
FAIL = "raise ValueError(key)"


class Loud(StrictModel):
    api_key: SecretStr
    seed: int = 0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, quiet: Any) -> runner.Outcome:
    folder = tmp_path_factory.mktemp("loud")
    path = folder / "09_loud.ipynb"
    given = new_code_cell('api_key = "(secret)"\nseed = 0', metadata={"tags": ["parameters"]})
    nbformat.write(new_notebook(cells=[given, *map(new_code_cell, (LOUD, LET_OUT, FAIL))]), path)
    contract = Contract("09_loud", Loud)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, VALUE)
        job = Job(path, contract, "smoke", parameters.parse(Loud, {"seed": 1}))
        return runner.run(job, quiet(), folder / "outputs")


def text(folder: RunFolder, name: str) -> str:
    return (folder.path / name).read_text()


def test_the_notebook_got_the_value_and_shows_none(outcome: runner.Outcome) -> None:
    cells = nbformat.read(outcome.folder.path / "notebook.ipynb", as_version=4).cells
    assert [cell.metadata.papermill.status for cell in cells] == ["completed"] * 4 + ["failed"]
    assert 'api_key = "(secret)"' in cells[1].source  # the injected cell
    assert f"api_key=SecretStr('**********') seed=1 (secret) {len(VALUE)}" in cells[2].outputs[0].text
    assert "(secret)\n['(secret)'] " in cells[3].outputs[0].text


@pytest.mark.parametrize("name", ["notebook.ipynb", "report.html", "run.json", "parameters.yaml"])
def test_no_text_of_the_run_holds_it(outcome: runner.Outcome, name: str) -> None:
    for word in ("correct horse", "battery"):
        assert word not in text(outcome.folder, name)


def test_records_show_that_there_was_one(outcome: runner.Outcome) -> None:
    assert yaml.safe_load(text(outcome.folder, "parameters.yaml")) == {"api_key": "(secret)", "seed": 1}
    assert outcome.ending.reason.endswith("ValueError: (secret)")
    assert outcome.folder.read_json("run.json")["reason"] == outcome.ending.reason


def test_a_table_that_a_cell_wrote_itself_marks_the_run(outcome: runner.Outcome) -> None:
    assert outcome.contains_secret == ("metrics/summary.parquet",)
    assert outcome.folder.read_json("run.json")["contains_secret"] == ["metrics/summary.parquet"]
    assert outcome.folder.verify() == []


def test_the_console_does_not_show_it(outcome: runner.Outcome) -> None:
    shown = io.StringIO()
    print_outcome(outcome, Console(file=shown, width=200))
    assert "battery" not in shown.getvalue()
    assert "contains a secret, not to be published: metrics/summary.parquet" in shown.getvalue()


def test_a_secret_that_is_too_short_starts_nothing(
    tmp_path: Path, make_job: Callable[..., Job], quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(BadParameterError, match="shorter than 8"):
        runner.run(make_job(tmp_path), quiet(), tmp_path / "outputs")
    assert not (tmp_path / "outputs").exists()
