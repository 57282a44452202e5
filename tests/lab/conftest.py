"""Tiny notebooks, run for real in a kernel of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

# This file is also loaded for tests of the base install, which has no notebook packages: those imports are lazy.


class Quiet:
    """Observes cells and keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def cell_started(self, number: int, total: int, heading: str) -> None:
        self.told.append(("started", number, total, heading))

    def cell_ended(self, number: int, total: int, status: str, seconds: float) -> None:
        self.told.append(("ended", number, total, status))


@pytest.fixture(scope="session")
def make_job() -> Callable[..., object]:
    """A job of one notebook: a heading, a parameters cell `word = "a"`, and the given code cells."""

    def make(folder: Path, *sources: str, deliverables: tuple[str, ...] = (), word: str = "a") -> object:
        import nbformat
        from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

        from p99lab.lab.job import Job
        from p99lab.lab.parameters import Contract
        from p99lab.strict import StrictModel

        class Tiny(StrictModel):
            word: str

        parameters = new_code_cell('word = "a"', metadata={"tags": ["parameters"]})
        cells = [new_markdown_cell("# A tiny question"), parameters, *map(new_code_cell, sources)]
        kernelspec = {"name": "no-such-kernel", "display_name": "Elsewhere", "language": "python"}
        path = folder / "tiny.ipynb"
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)
        return Job(path, Contract("tiny", Tiny, deliverables), "smoke", Tiny(word=word))

    return make


@pytest.fixture(scope="session")
def quiet() -> type[Quiet]:
    return Quiet
