"""A run that is about to be: found and validated before anything heavy is imported, started or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p99lab import project
from p99lab.engine import model_store
from p99lab.errors import BadParameterError
from p99lab.lab.parameters import Contract, find, load
from p99lab.strict import StrictModel


@dataclass(frozen=True)
class Job:
    """One notebook to run with parameters that were validated already."""

    notebook: Path
    contract: Contract
    tier: str
    parameters: StrictModel


def prepare(name: str, tier: str, overrides: Sequence[str] = ()) -> Job:
    """Find a notebook by number or slug, validate its parameters, and look whether its model is there.

    Raises:
        BadParameterError: unknown notebook, tier or parameter, or a value that does not fit.
        ModelError: the model is not on this machine, or its files do not fit together.
    """
    contract = find(name)
    notebook = project.notebooks_dir() / f"{contract.notebook}.ipynb"
    if not notebook.is_file():
        raise BadParameterError(f"notebook {contract.notebook} is declared, but {notebook.name} is not there")
    parameters = load(contract, tier, overrides)
    if isinstance(model := getattr(parameters, "model", None), str):
        model_store.check(model)
    return Job(notebook, contract, tier, parameters)
