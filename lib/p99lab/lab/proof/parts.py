"""`make proof`: what is too long for `make test`, run part by part; its record is published.

A part is a module of this package with `checks(work)`, which yields a `Check` at a time and may use the folder `work`.
It may have `EXPLAINS`, Markdown that is published above its checks.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Self

import orjson

from p99lab import project
from p99lab.errors import BadParameterError, did_you_mean
from p99lab.lab import provenance
from p99lab.lab.proof.check import Check
from p99lab.lab.run_folder import UnwritableError
from p99lab.observe import hardware

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "coverage": "intervals hold the true percentile as often as they say",
        "peers": "guidellm and aiperf on the same server and load",
        "clients": "the official client, lm-eval and guidellm against the server",
        "faults": "kernels killed, runners killed, disks filled, fifty times each",
        "listing": "a thousand runs listed",
    }
)


@dataclass(frozen=True)
class PartRecord:
    """What one part has shown, on which machine, by which code."""

    part: str
    says: str
    began: str
    seconds: float
    hardware: str
    revision: str | None
    dirty: bool
    version: str
    checks: tuple[Check, ...]
    explains: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> Self:
        content = orjson.loads(path.read_bytes())
        return cls(**{**content, "checks": tuple(Check(**check) for check in content["checks"])})


def chosen(names: Sequence[str]) -> list[str]:
    """The parts of these names, or all.

    Raises:
        BadParameterError: there is no such part.
    """
    for name in names:
        if name not in PARTS:
            raise BadParameterError(f"no part '{name}'{did_you_mean(name, PARTS) or '; there are ' + ', '.join(PARTS)}")
    return list(names or PARTS)


def checks(part: str, work: Path) -> Iterator[Check]:
    """The checks of a part as they are made."""
    yield from _module(part).checks(work)


def record(part: str, began: datetime.datetime, made: Sequence[Check]) -> PartRecord:
    git = provenance.git_state(project.root())
    seconds = (datetime.datetime.now(datetime.UTC) - began).total_seconds()
    return PartRecord(
        part=part,
        says=PARTS[part],
        began=began.isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        hardware=hardware.label(hardware.fingerprint()),
        revision=git.revision,
        dirty=git.is_dirty,
        version=importlib.metadata.version("p99lab"),
        checks=tuple(made),
        explains=getattr(_module(part), "EXPLAINS", ""),
    )


def _module(part: str) -> ModuleType:
    return importlib.import_module(f"p99lab.lab.proof.{part}")


def publish(made: PartRecord, folder: Path) -> None:
    """Keep a part's record, and the page of all parts beside it; each whole or as it was.

    Raises:
        UnwritableError: the disk refuses.
    """
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    _replace(folder / f"{made.part}.json", orjson.dumps(made.as_dict(), option=options))
    known = [PartRecord.read(path) for name in PARTS if (path := folder / f"{name}.json").is_file()]
    _replace(folder / "README.md", page(known).encode())


def _replace(target: Path, content: bytes) -> None:
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise UnwritableError(f"cannot write {target}: {error.strerror}") from error


def page(records: Sequence[PartRecord]) -> str:
    """All parts as Markdown: what was to be, what was found."""
    lines = ["# Proof", "", "Made by `make proof`.", ""]
    for part in records:
        revision = (part.revision or "unknown")[:12] + (" with changes" if part.dirty else "")
        lines += [f"## {part.part}: {part.says}", ""]
        lines += [f"{part.began}, {part.seconds:.0f} s, {part.hardware}, code {revision}", ""]
        lines += [part.explains, ""] if part.explains else []
        lines += ["| check | expected | found | | note |", "|---|---|---|---|---|"]
        lines += [_row(check) for check in part.checks]
        lines.append("")
    return "\n".join(lines)


def _row(check: Check) -> str:
    cells = (check.name, check.expected, check.found, "holds" if check.passed else "**fails**", check.note)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
