"""Work units: the parts of a run (arms × blocks, cells of a sweep) that a resumed run need not repeat.

A finished unit is `units/<name>/` in its run's folder: its files and, written last, a manifest with their checksums.
Every write is whole or not at all, so a unit without a manifest was not finished. Works on the base install.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from p99lab.errors import BadParameterError
from p99lab.lab import sources
from p99lab.lab.run_folder import RunFolder, is_plain_name
from p99lab.strict import StrictModel

FOLDER = "units"
MANIFEST = "manifest.json"
RUN_RECORD = "run.json"
_NAME = re.compile(r"[A-Za-z0-9+][A-Za-z0-9.+_=-]*")


class Manifest(StrictModel):
    """What a finished unit says of itself. `run_id`: the run that measured it. `seconds`: what that took."""

    name: str
    key: str
    run_id: str
    finished: str
    seconds: float
    files: dict[str, str]  # SHA-256 by name


@dataclass(frozen=True)
class Unit:
    """A finished unit where it lies.

    Raises:
        BadParameterError: its manifest names a path, where only a file of the unit may stand.
    """

    folder: Path
    manifest: Manifest

    def __post_init__(self) -> None:
        if paths := [name for name in (self.manifest.name, *self.manifest.files) if not is_plain_name(name)]:
            raise BadParameterError(f"{self.folder / MANIFEST} names what is no plain file name: {paths[0]!r}")

    @property
    def seconds(self) -> float:
        return self.manifest.seconds

    def read(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    @property
    def is_damaged(self) -> bool:
        """Whether a file is gone or not what was written."""
        for name, digest in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file() or _sha256(path.read_bytes()) != digest:
                return True
        return False


@dataclass(frozen=True)
class Earlier:
    """What a resumed run has to go on from: how it ended, the units to restore, the names of those that are damaged."""

    run_id: str
    status: str
    units: tuple[Unit, ...]
    damaged: tuple[str, ...] = ()


class Units:
    """The units of one run. `basis`: what their keys stand on besides their names; without one nothing is kept."""

    def __init__(self, folder: RunFolder, basis: str | None) -> None:
        self._folder = folder
        self._basis = basis

    @classmethod
    def current(cls) -> Units:
        """Those of the run that this kernel belongs to.

        By hand in JupyterLab none are kept: a cell that is run again there is meant to measure again.
        """
        folder = RunFolder.current()
        return cls(folder, basis(folder.read_json(RUN_RECORD)) if (folder.path / RUN_RECORD).is_file() else None)

    def get(self, name: str) -> Unit | None:
        """The unit where it is finished, whole, and of this very code, parameters and hardware; else None.

        Raises:
            BadParameterError: its manifest names a path.
        """
        unit = _read(self._folder.path / FOLDER / name)
        if unit is None or unit.manifest.key != self._key(name) or unit.is_damaged:
            return None
        return unit

    def finish(self, name: str, files: Mapping[str, bytes], seconds: float) -> None:
        """Keep a unit's files; once this returns, no resumed run repeats it.

        Raises:
            SealedError: the run has ended.
            UnwritableError: the disk refuses; the unit is not finished then.
        """
        if not _NAME.fullmatch(name) or MANIFEST in files or not all(map(is_plain_name, (name, *files))):
            raise ValueError(f"'{name}' with {', '.join(files)} cannot be a unit")
        if (key := self._key(name)) is None:
            return
        for file, content in files.items():
            self._folder.write(f"{FOLDER}/{name}/{file}", content)
        manifest = Manifest(
            name=name,
            key=key,
            run_id=self._folder.run_id,
            finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            seconds=seconds,
            files={file: _sha256(content) for file, content in files.items()},
        )
        self._folder.write_json(f"{FOLDER}/{name}/{MANIFEST}", manifest.model_dump())

    def _key(self, name: str) -> str | None:
        return None if self._basis is None else sources.digest([("basis", self._basis), ("unit", name)])


def basis(record: Mapping[str, Any]) -> str | None:
    """One digest of what a run's units depend on, from its run.json; None where its code is not known."""
    parts = [(name, record.get(name)) for name in ("code", "parameters_digest", "hardware")]
    return None if any(value is None for _, value in parts) else sources.digest((k, str(v)) for k, v in parts)


def finished(folder: RunFolder) -> tuple[list[Unit], list[str]]:
    """The finished units of a run, and the names of those that were damaged since: they are of no use.

    Raises:
        BadParameterError: a unit's manifest names a path.
    """
    changes = folder.verify() if folder.is_sealed else []
    units = Units(folder, basis(folder.read_json(RUN_RECORD)))
    whole, damaged = [], []
    for name in sorted(manifest.parent.name for manifest in (folder.path / FOLDER).glob(f"*/{MANIFEST}")):
        unit = units.get(name)
        if unit is None or any(line.startswith(f"{FOLDER}/{name}/") for line in changes):
            damaged.append(name)
        else:
            whole.append(unit)
    return whole, damaged


def restore(folder: RunFolder, units: Iterable[Unit]) -> None:
    """Copy finished units of an earlier run into this one, their manifests last and as they are."""
    for unit in units:
        for file in (*unit.manifest.files, MANIFEST):
            folder.write(f"{FOLDER}/{unit.manifest.name}/{file}", unit.read(file))


def _read(folder: Path) -> Unit | None:
    """None without a manifest, or with one that says nothing usable."""
    try:
        content = orjson.loads((folder / MANIFEST).read_bytes())
        manifest = Manifest.parse(content)
    except (OSError, ValueError, TypeError, BadParameterError):
        return None
    return Unit(folder, manifest) if manifest.name == folder.name else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
