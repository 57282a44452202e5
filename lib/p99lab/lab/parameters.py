"""What each notebook takes and what it owes: one parameter model and one list of deliverables per notebook.

The runner validates a run's parameters here before a kernel starts; the notebook validates them again, with `check`,
in the cell after the injected one, so that values changed by hand in JupyterLab are held to the same model.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import Field

from p99lab import project
from p99lab.errors import BadParameterError, did_you_mean
from p99lab.strict import StrictModel

_LITERALS = (bool, int, float, str, list, tuple, dict, type(None))


class Environment00(StrictModel):
    """Sizes of the measurements in `00_environment`."""

    buffer_mib: int = Field(ge=1)  # memory moved at a time; far beyond the last-level cache
    matmul_size: int = Field(ge=16)  # rows and columns of the square matrices
    disk_mib: int = Field(ge=1)
    launches: int = Field(ge=1)  # tiny GPU kernels per timing
    repeats: int = Field(ge=1)


@dataclass(frozen=True)
class Contract:
    """One notebook's side of a run: its parameter model, and the files it owes relative to the run folder."""

    notebook: str
    parameters: type[StrictModel]
    deliverables: tuple[str, ...] = ()


CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {
        contract.notebook: contract
        for contract in (
            Contract(
                "00_environment",
                Environment00,
                (
                    "metrics/fingerprint.json",
                    "metrics/ceilings.parquet",
                    "metrics/capabilities.parquet",
                    "metrics/summary.parquet",
                    "figures/roofline.png",
                ),
            ),
        )
    }
)


def find(name: str, known: Mapping[str, Contract] = CONTRACTS) -> Contract:
    """The contract meant by a notebook's number, its slug, or the beginning of either.

    Raises:
        BadParameterError: no notebook, or more than one, goes by that name.
    """
    if name in known:
        return known[name]
    matches = [key for key in known if key.startswith(name) or _slug(key).startswith(name)] if name else []
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        raise BadParameterError(f"'{name}' may be any of {', '.join(matches)}")
    raise BadParameterError(f"no notebook '{name}'{_nearest_or_all(name, [*known, *map(_slug, known)], known)}")


def load(contract: Contract, tier: str, overrides: Sequence[str] = (), folder: Path | None = None) -> StrictModel:
    """The parameters of one run: a tier's file, with `name=value` overrides on top.

    All values are read as text and converted by the field they are meant for, so that `12e4567` stays a string where
    a string is wanted and a number is never guessed. A tier file gives every parameter.

    Raises:
        BadParameterError: the tier or a parameter does not exist, or a value does not fit.
    """
    tier_file = _tier_file(folder if folder is not None else project.params_dir() / contract.notebook, tier)
    values = _read_yaml(tier_file.read_text(), f"{contract.notebook}/{tier_file.name}")
    if not isinstance(values, dict):
        raise BadParameterError(f"{contract.notebook}/{tier_file.name} is not a list of 'name: value' lines")
    fields = contract.parameters.model_fields
    resolved = {name: _nothing_or(value, fields.get(name)) for name, value in values.items()}
    resolved.update(_override(text, contract.parameters) for text in overrides)
    return contract.parameters.parse(resolved)


def check(notebook: str, namespace: Mapping[str, Any], known: Mapping[str, Contract] = CONTRACTS) -> StrictModel:
    """Validate the literals of a notebook's parameters cell: call it with `globals()` right after that cell.

    A literal that is no parameter is refused. Once the notebook has gone further (this cell runs again), later cells'
    variables are their own business, and only a near miss of a parameter's name is refused.

    Raises:
        BadParameterError: a parameter is unknown, missing or does not fit.
    """
    model = find(notebook, known).parameters
    literals = {name: value for name, value in namespace.items() if _is_literal(name, value)}
    if any(isinstance(value, model) for value in namespace.values()):
        fields = model.model_fields
        literals = {name: value for name, value in literals.items() if name in fields or did_you_mean(name, fields)}
    return model.parse(literals)


def _slug(notebook: str) -> str:
    """`02_1_kv_growth` → `kv_growth`."""
    return notebook.lstrip("0123456789_")


def _nearest_or_all(wrong: str, near: Iterable[str], everything: Iterable[str]) -> str:
    return did_you_mean(wrong, near) or f"; there are {', '.join(everything)}"


def _tier_file(folder: Path, tier: str) -> Path:
    file = folder / f"{tier}.yaml"
    if not file.is_file():
        tiers = sorted(path.stem for path in folder.glob("*.yaml"))
        raise BadParameterError(f"no tier '{tier}' for {folder.name}{_nearest_or_all(tier, tiers, tiers)}")
    return file


def _read_yaml(text: str, where: str) -> Any:
    """YAML whose scalars all stay text."""
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise BadParameterError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def _override(text: str, model: type[StrictModel]) -> tuple[str, Any]:
    name, equals, raw = text.partition("=")
    if not equals:
        raise BadParameterError(f"'{text}' is not name=value")
    field = model.model_fields.get(name)
    takes_text = field is not None and str in (field.annotation, *typing.get_args(field.annotation))
    return name, _nothing_or(raw if takes_text else _read_yaml(raw, name), field)


def _nothing_or(value: Any, field: Any) -> Any:
    """None for a written null where the field takes None; anything else as it is."""
    optional = field is not None and type(None) in typing.get_args(field.annotation)
    return None if optional and value in ("", "~", "null", "none", "None") else value


def _is_literal(name: str, value: Any) -> bool:
    return isinstance(value, _LITERALS) and not name.startswith("_") and name not in ("In", "Out")
