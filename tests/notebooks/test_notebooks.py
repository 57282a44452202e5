"""Every notebook's shape, and every notebook's smoke tier run as a user would."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
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
    expected = ["machine can show", "Method", "Run", "Figures and tables", "Claims", "change the verdict", "Limits"]
    found = [next((i for i, heading in enumerate(headings) if part in heading), -1) for part in expected]
    assert -1 not in found
    assert found == sorted(found)


@pytest.fixture(scope="module")
def environment_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    out = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "p99lab.cli", "run", "00", "--tier", "smoke", "-p", "repeats=2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (out / "00_environment").iterdir()
    return done, RunFolder(folder)


def test_00_says_where_its_report_is(environment_run: Any) -> None:
    done, folder = environment_run
    assert f"report: {folder.path}/report.html" in done.stdout
    assert "memory read" in done.stdout  # the summary
    assert done.stderr == ""


def test_00_leaves_a_whole_run(environment_run: Any) -> None:
    _, folder = environment_run
    assert folder.verify() == []
    assert folder.missing(CONTRACTS["00_environment"].deliverables) == []
    run = folder.read_json("run.json")
    assert (run["status"], run["exit_code"], run["tier"]) == ("completed", 0, "smoke")
    assert {cell["status"] for cell in run["cells"]} == {"completed"}
    assert yaml.safe_load((folder.path / "parameters.yaml").read_text())["repeats"] == 2


def test_00_measures_what_it_can_and_says_what_it_cannot(environment_run: Any) -> None:
    _, folder = environment_run
    for row in pq.read_table(folder.path / "metrics/ceilings.parquet").to_pylist():
        assert row["best"] is not None or "not testable here" in row["how"]
    for row in pq.read_table(folder.path / "metrics/capabilities.parquet").to_pylist():
        assert row["available"] or row["takes"]
    assert json.loads((folder.path / "metrics/fingerprint.json").read_bytes())["id"]


def test_00_is_a_page_that_stands_alone(environment_run: Any) -> None:
    _, folder = environment_run
    page = (folder.path / "report.html").read_text()
    assert "<script" not in page
    assert "<link" not in page
    assert 'src="http' not in page
    assert str(folder.path) not in page
