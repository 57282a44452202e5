"""Every notebook's shape, and every notebook's smoke tier run as a user would."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pyarrow.parquet as pq
import pytest
import yaml

from p99lab import project
from p99lab.lab.parameters import CONTRACTS, load
from p99lab.lab.run_folder import RunFolder

NOTEBOOKS = sorted(project.notebooks_dir().glob("*.ipynb"))
MAX_FUNCTION_LINES = 10
SmokeRun = tuple[subprocess.CompletedProcess[str], RunFolder]


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def path(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture
def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameters_cells(notebook: Any) -> list[Any]:
    return [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]


def test_it_is_a_valid_python_notebook_of_10_to_25_cells(notebook: Any) -> None:
    nbformat.validate(notebook)
    kernelspec = notebook.metadata.kernelspec
    assert (kernelspec.name, kernelspec.language) == ("python3", "python")
    assert 10 <= len(notebook.cells) <= 25
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_it_carries_no_outputs(notebook: Any) -> None:
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


def test_its_parameters_are_its_models(path: Path, notebook: Any) -> None:
    (cell,) = parameters_cells(notebook)
    body = ast.parse(cell.source).body
    assert all(isinstance(line, ast.Assign) for line in body)
    values = {line.targets[0].id: ast.literal_eval(line.value) for line in body}  # type: ignore[attr-defined]
    contract = CONTRACTS[path.stem]
    assert list(values) == list(contract.parameters.model_fields)
    assert contract.parameters.parse(values) == load(contract, "laptop")  # the default tier, by hand too


def test_the_next_code_cell_validates_them(path: Path, notebook: Any) -> None:
    cells = code_cells(notebook)
    following = cells[cells.index(parameters_cells(notebook)[0]) + 1]
    assert f'check("{path.stem}", globals())' in following.source


def test_it_holds_no_logic(notebook: Any) -> None:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, definitions):
                assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES


def test_it_keeps_the_order_of_sections(notebook: Any) -> None:
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0].startswith("# ")
    assert headings[0].endswith("?")
    expected = ["machine can show", "method", "run", "figures and tables", "claims", "change the verdict", "limits"]
    found = [next((i for i, heading in enumerate(headings) if part in heading.lower()), -1) for part in expected]
    assert -1 not in found
    assert found == sorted(found)


def test_every_notebook_has_a_contract_and_every_contract_a_notebook() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(CONTRACTS)


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SmokeRun]:
    """The smoke tier of a notebook, run once for all tests and as a user runs it."""

    @functools.cache
    def run(notebook: str) -> SmokeRun:
        out = tmp_path_factory.mktemp("runs")
        command = [sys.executable, "-m", "p99lab.cli", "run", notebook, "--tier", "smoke", "--out", str(out)]
        environment = {**os.environ, "COLUMNS": "120"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        (folder,) = (out / notebook).iterdir()
        return done, RunFolder(folder)

    return run


@pytest.mark.parametrize("notebook", CONTRACTS)
def test_its_smoke_tier_leaves_a_whole_run(notebook: str, smoke_run: Callable[[str], SmokeRun]) -> None:
    done, folder = smoke_run(notebook)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert f"report: {folder.path}/report.html" in done.stdout
    assert folder.verify() == []
    assert folder.missing(CONTRACTS[notebook].deliverables) == []
    run = folder.read_json("run.json")
    assert (run["status"], run["exit_code"], run["tier"]) == ("completed", 0, "smoke")
    assert {cell["status"] for cell in run["cells"]} == {"completed"}
    parameters = yaml.safe_load((folder.path / "parameters.yaml").read_text())
    assert CONTRACTS[notebook].parameters.parse(parameters) == load(CONTRACTS[notebook], "smoke")


@pytest.mark.parametrize("notebook", CONTRACTS)
def test_its_report_is_a_page_that_stands_alone(notebook: str, smoke_run: Callable[[str], SmokeRun]) -> None:
    _, folder = smoke_run(notebook)
    page = (folder.path / "report.html").read_text()
    loaded = re.findall(r"""\bsrc(?:set)?\s*=\s*["']?([^"'\s>]{1,40})""", page) + re.findall(r"url\(([^)]{1,40})", page)
    assert [source for source in loaded if not source.startswith("data:")] == []
    assert {tag for tag in re.findall(r"<(\w+)[^>]*\bhref=", page) if tag != "a"} == set()
    assert re.findall(r"<(?:script|link|iframe|object|embed)\b|@import", page) == []
    assert str(folder.path) not in page
    num_figures = sum(name.startswith("figures/") for name in CONTRACTS[notebook].deliverables)
    assert page.count("<img") >= num_figures


def test_00_shows_its_summary(smoke_run: Callable[[str], SmokeRun]) -> None:
    done, _ = smoke_run("00_environment")
    assert "memory read" in done.stdout or "device read" in done.stdout


def test_00_measures_what_it_can_and_says_what_it_cannot(smoke_run: Callable[[str], SmokeRun]) -> None:
    _, folder = smoke_run("00_environment")
    for row in pq.read_table(folder.path / "metrics/ceilings.parquet").to_pylist():
        assert row["best"] is not None or "not testable here" in row["how"]
    for row in pq.read_table(folder.path / "metrics/capabilities.parquet").to_pylist():
        assert row["available"] or row["takes"]
    assert json.loads((folder.path / "metrics/fingerprint.json").read_bytes())["id"]
