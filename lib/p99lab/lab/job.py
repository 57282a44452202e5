"""A run that is about to be: found and validated before anything heavy is imported, started or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p99lab import project
from p99lab.engine import model_store
from p99lab.errors import BadParameterError
from p99lab.lab import headline_checks
from p99lab.lab.parameters import Contract, Headline01, Ledger99, find, load, tier_digest
from p99lab.lab.units import Earlier
from p99lab.observe import hardware
from p99lab.strict import StrictModel


@dataclass(frozen=True)
class Job:
    """One notebook to run with parameters that were validated already.

    `tier_digest`: of the tier's file, where the parameters come from one. `resumes`: the run whose finished units this
    one takes over.
    """

    notebook: Path
    contract: Contract
    tier: str
    parameters: StrictModel
    tier_digest: str | None = None
    resumes: Earlier | None = None


def prepare(name: str, tier: str, overrides: Sequence[str] = ()) -> Job:
    """Find a notebook by number or slug, validate its parameters, and look whether its model is there.

    Raises:
        BadParameterError: unknown notebook, tier or parameter, or a value that does not fit.
        ModelError: the model is not on this machine, or its files do not fit together.
    """
    contract = find(name)
    parameters = load(contract, tier, overrides)
    digest = tier_digest(contract.notebook, tier)
    return Job(notebook_of(contract), contract, tier, check_model(parameters), digest)


def notebook_of(contract: Contract) -> Path:
    """The contract's notebook.

    Raises:
        BadParameterError: it is not there.
    """
    notebook = project.notebooks_dir() / f"{contract.notebook}.ipynb"
    if not notebook.is_file():
        raise BadParameterError(f"notebook {contract.notebook} is declared, but {notebook.name} is not there")
    return notebook


def check_model(parameters: StrictModel) -> StrictModel:
    """The parameters, if the model that they name can be used here.

    Raises:
        ModelError: it is not on this machine, or its files do not fit together.
    """
    if isinstance(model := getattr(parameters, "model", None), str):
        model_store.check(model)
    return parameters


def check_here(job: Job) -> None:
    """Return if this machine has what the job takes besides its model.

    Raises:
        BadParameterError: it has not: what.
    """
    parameters = job.parameters
    if job.tier in job.contract.gpu_tiers and not hardware.has_gpu():
        raise BadParameterError(
            f"tier {job.tier} of {job.contract.notebook} needs an NVIDIA GPU, and there is none here"
        )
    if isinstance(parameters, Headline01):
        headline_checks.check(parameters)
    if isinstance(parameters, Ledger99) and parameters.outputs and not Path(parameters.outputs).is_dir():
        raise BadParameterError(f"outputs: {parameters.outputs} is no directory of runs")
