"""What a notebook's figures depend on: its code and the modules it reaches, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p99lab import project
from p99lab.lab import sources

pytestmark = pytest.mark.light


def notebook(folder: Path, *code: str, parameters: str = "seed = 0", prose: str = "Why.") -> Path:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": [prose]},
        {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": [parameters]},
        *({"cell_type": "code", "metadata": {}, "source": [line], "outputs": []} for line in code),
    ]
    path = folder / "09_why.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_modules_are_followed_through_imports(tmp_path: Path) -> None:
    found = sources.digests(notebook(tmp_path, "from p99lab.lab.claims import verdict"))
    assert {"09_why.ipynb", "p99lab.lab.claims", "p99lab.lab.figures", "p99lab.errors"} <= found.keys()
    assert "p99lab.engine.engine" not in found
    assert not any(name.startswith("p99lab.commands") for name in found)


def test_imports_inside_functions_count() -> None:
    found = sources.digests(project.notebooks_dir() / "01_headline_p99.ipynb")
    assert {"p99lab.engine.scheduler", "p99lab.probe.load", "p99lab.caches.pages"} <= found.keys()


def test_prose_and_parameters_do_not_change_the_digest(tmp_path: Path) -> None:
    before = sources.digests(notebook(tmp_path, "x = 1"))
    assert sources.digests(notebook(tmp_path, "x = 1", parameters="seed = 1", prose="Because.")) == before
    assert sources.digests(notebook(tmp_path, "x = 2")) != before


def test_one_digest_of_many_does_not_depend_on_their_order() -> None:
    assert sources.digest([("a", "1"), ("b", "2")]) == sources.digest([("b", "2"), ("a", "1")])
    assert sources.digest([("a", "1"), ("b", "2")]) != sources.digest([("a", "2"), ("b", "1")])
