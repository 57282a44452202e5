"""`p99lab run --resume`: a run that did not end well, taken up where it was left, in a new folder.

Only what is unfinished runs again. That is sound as long as code, parameters and hardware are the same: where they are
not, nothing is resumed, and the difference is said.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from p99lab.errors import BadParameterError
from p99lab.lab import alive, parameters, sources, units
from p99lab.lab.job import Job, check_model, notebook_of
from p99lab.lab.parameters import CONTRACTS, Contract
from p99lab.lab.provenance import short_revision
from p99lab.lab.run_folder import RunFolder
from p99lab.observe import hardware
from p99lab.strict import StrictModel

_NAMED = 3  # modules that are named one by one


@dataclass(frozen=True)
class Asked:
    """What was given beside `--resume`. It may only repeat what the earlier run was made with."""

    notebook: str | None = None
    tier: str | None = None
    overrides: Sequence[str] = ()


def prepare(
    earlier: RunFolder,
    asked: Asked | None = None,
    known: Mapping[str, Contract] = CONTRACTS,
    notebook: Path | None = None,
) -> Job:
    """The job that takes up an earlier run.

    Args:
        notebook: the file, where it is not the project's own.

    Raises:
        BadParameterError: there is nothing to resume, the run still goes on, or something differs: what.
        ModelError: the model is not on this machine.
    """
    asked = asked or Asked()
    record = _record(earlier)
    status = _status(earlier, record)
    contract = _contract(record, asked, known)
    values = _parameters(earlier, contract)
    _refuse_other(earlier, asked, contract, values)
    path = notebook or notebook_of(contract)
    if differences := list(_differences(earlier, record, path, values)):
        raise BadParameterError(f"run {earlier.run_id} cannot be resumed: {'; '.join(differences)}")
    whole, damaged = units.finished(earlier)
    resumes = units.Earlier(earlier.run_id, status, tuple(whole), tuple(damaged))
    return Job(path, contract, str(record["tier"]), check_model(values), record.get("tier_digest"), resumes)


def description(job: Job) -> str:
    """What a job that resumes takes over, in a line."""
    assert job.resumes is not None
    damaged = f"; damaged, to be measured again: {', '.join(job.resumes.damaged)}" if job.resumes.damaged else ""
    return f"resuming {job.resumes.run_id} ({job.resumes.status}): {len(job.resumes.units)} units restored{damaged}"


def command(folder: RunFolder, outputs: Path) -> str:
    """The command that takes up the run in `folder`; its id will do where `outputs` is searched anyway."""
    is_listed = folder.path.resolve().parent.parent == outputs.resolve()
    return f"p99lab run --resume {folder.run_id if is_listed else shlex.quote(str(folder.path.resolve()))}"


def _record(earlier: RunFolder) -> dict[str, Any]:
    try:
        record = earlier.read_json(units.RUN_RECORD)
    except (OSError, orjson.JSONDecodeError):
        record = None
    if not isinstance(record, dict) or not {"notebook", "tier", "status"} <= record.keys():
        raise BadParameterError(f"{earlier.path} is no run: it has no {units.RUN_RECORD} that says what ran")
    return record


def _status(earlier: RunFolder, record: Mapping[str, Any]) -> str:
    """How the run ended; `cut off` where its runner never came to say it."""
    if alive.is_running(record):
        raise BadParameterError(f"run {earlier.run_id} still goes on (process {record['runner']['pid']})")
    if record["status"] == "completed" and earlier.is_sealed:
        raise BadParameterError(f"run {earlier.run_id} completed: there is nothing to resume")
    return "cut off" if record["status"] == "running" else str(record["status"])


def _contract(record: Mapping[str, Any], asked: Asked, known: Mapping[str, Contract]) -> Contract:
    contract = parameters.find(str(record["notebook"]), known)
    if asked.notebook is not None and (other := parameters.find(asked.notebook, known)) != contract:
        raise BadParameterError(f"the run to resume is one of {contract.notebook}, not of {other.notebook}")
    if asked.tier is not None and asked.tier != record["tier"]:
        raise BadParameterError(f"the run to resume has tier {record['tier']}, not {asked.tier}")
    return contract


def _parameters(earlier: RunFolder, contract: Contract) -> StrictModel:
    try:
        values = yaml.safe_load((earlier.path / "parameters.yaml").read_text()) or {}
        return parameters.parse(contract.parameters, values)
    except (OSError, yaml.YAMLError, TypeError, BadParameterError) as error:
        said = " ".join(str(error).split())
        raise BadParameterError(f"run {earlier.run_id} cannot be resumed: its parameters: {said}") from None


def _refuse_other(earlier: RunFolder, asked: Asked, contract: Contract, values: StrictModel) -> None:
    """A `-p` may repeat a parameter and not change it."""
    before, model = parameters.plain(values), contract.parameters
    after = parameters.plain(parameters.parse(model, {**before, **parameters.given(model, asked.overrides)}))
    if changed := [name for name in before if before[name] != after[name]]:
        shown = ", ".join(f"{name}={before[name]}" for name in changed)
        raise BadParameterError(f"run {earlier.run_id} was made with {shown}: a resumed run keeps its parameters")


def _differences(earlier: RunFolder, record: Mapping[str, Any], notebook: Path, values: StrictModel) -> Iterator[str]:
    """What differs between the earlier run and one that would start now, a clause each."""
    if record.get("code") is None:
        yield "it did not record its code"
    elif record["code"] != sources.digest((now := sources.digests(notebook)).items()):
        since = f" since revision {revision}" if (revision := short_revision(record)) else ""
        yield f"code differs{since}: {_named(_changed(_sources(earlier), now))}"
    if record.get("parameters_digest") != parameters.digest(values):
        yield "parameters.yaml is not what it ran with"
    here = hardware.label(hardware.fingerprint())
    if record.get("hardware") != here:
        yield f"hardware differs: {record.get('hardware')}, here {here}"


def _sources(earlier: RunFolder) -> dict[str, str]:
    try:
        content = earlier.read_json("sources.json")
    except (OSError, orjson.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
