"""What has changed since a run: its code, its parameters, its machine, the rules it is judged by.

A stale run is still what was measured; it may no longer be what would be measured. Works on the base install.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
import yaml

from p99lab import project
from p99lab.errors import BadParameterError
from p99lab.lab import sources
from p99lab.lab.claims import Claim, rule_digest
from p99lab.lab.parameters import find, load, plain, tier_digest
from p99lab.observe import hardware

NAMED = 3  # modules or parameters that are named one by one
BY_HAND = "by hand: "
REMARKS = ("hardware: ", BY_HAND)  # how clauses begin that are no reason to run again


class Present:
    """The checkout and the machine as they are now, each part read once."""

    def __init__(self) -> None:
        self.hardware = hardware.label(hardware.fingerprint())
        self.code = lru_cache(_code)
        self.parameters = lru_cache(_parameters)


def changes(folder: Path, record: Mapping[str, Any], present: Present) -> list[str]:
    """What differs between a run (its folder and run.json) and the present, a clause each; empty: nothing does."""
    return [*_code_changes(folder, record, present), *_other_changes(folder, record, present)]


def is_stale(clauses: Iterable[str]) -> bool:
    """Whether the run would be another one if it were made again, as it was made, on its own machine."""
    return any(not clause.startswith(REMARKS) for clause in clauses)


def is_by_hand(folder: Path, record: Mapping[str, Any], present: Present) -> bool:
    """Whether parameters were given that are not its tier's: such a run answers a question of its own."""
    return any(clause.startswith(BY_HAND) for clause in _other_changes(folder, record, present))


def rule_changed(claim: Claim, record: Mapping[str, Any]) -> str | None:
    """The clause for a claim whose statement or rule is not the one that the run knew."""
    known = record.get("rules")
    if not isinstance(known, dict):
        return "the run did not record its rules"
    if claim.id not in known:
        return "the claim is newer than the run"
    return None if known[claim.id] == rule_digest(claim) else "the rule has changed"


def _code_changes(folder: Path, record: Mapping[str, Any], present: Present) -> Iterator[str]:
    then, now = _read(folder / "sources.json"), present.code(str(record.get("notebook")))
    if then is None or now is None:
        yield "the run did not record its code" if then is None else "its notebook is gone"
    elif differing := _differing(then, now):
        yield f"code: {_named(name.removeprefix('p99lab.') for name in differing)}"


def _other_changes(folder: Path, record: Mapping[str, Any], present: Present) -> Iterator[str]:
    now = present.parameters(str(record.get("notebook")), str(record.get("tier")))
    then = _read(folder / "parameters.yaml")
    if then is not None and now is not None and (differing := _differing(then, now)):
        by_hand = record.get("tier_digest") == tier_digest(str(record.get("notebook")), str(record.get("tier")))
        yield f"{BY_HAND if by_hand else 'parameters: '}{_named(differing)}"
    if record.get("hardware") != present.hardware:
        yield "hardware: measured on another machine"


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))


def _named(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _code(notebook: str) -> dict[str, str] | None:
    path = project.notebooks_dir() / f"{notebook}.ipynb"
    return sources.digests(path) if path.is_file() else None


def _parameters(notebook: str, tier: str) -> dict[str, Any] | None:
    """What the tier's file gives now; None where it gives nothing valid any more."""
    try:
        return plain(load(find(notebook), tier))
    except BadParameterError:
        return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = yaml.safe_load(path.read_bytes()) if path.suffix == ".yaml" else orjson.loads(path.read_bytes())
    except (OSError, yaml.YAMLError, orjson.JSONDecodeError):
        return None
    return content if isinstance(content, dict) else None
