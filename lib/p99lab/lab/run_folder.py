"""The folder of one run: written once, then sealed by checksums."""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import orjson

from p99lab import project
from p99lab.errors import P99labError

ENVIRONMENT_VARIABLE = "P99LAB_RUN_DIR"
CHECKSUMS = "SHA256SUMS"


class SealedError(P99labError):
    """Something tried to change a run after its end."""


class UnwritableError(P99labError):
    """The disk refuses a file of a run: full, read-only, gone."""


class RunFolder:
    """`outputs/<notebook>/<run_id>/`: run.json, parameters, provenance, notebook, report, metrics/ and figures/.

    Every file is written beside its place and renamed into it, so that a full disk or a kill leaves the last good
    version. `seal` ends the writing; `verify` says what was changed since.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path) -> RunFolder:
        """A new folder under `parent`, named so that names sort by time and never collide."""
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            now = datetime.datetime.now(datetime.UTC)
            run_id = f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03d}-{secrets.token_hex(2)}"
            try:
                (parent / run_id).mkdir()
            except FileExistsError:
                continue
            return cls(parent / run_id)

    @classmethod
    def current(cls) -> RunFolder:
        """The run this kernel belongs to; by hand in JupyterLab, one new folder for the life of the kernel."""
        if ENVIRONMENT_VARIABLE not in os.environ:
            folder = cls.create(project.outputs_dir() / "interactive")
            os.environ[ENVIRONMENT_VARIABLE] = str(folder.path)
        return cls(Path(os.environ[ENVIRONMENT_VARIABLE]))

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def is_sealed(self) -> bool:
        return (self.path / CHECKSUMS).exists()

    def write(self, name: str, content: bytes | str) -> Path:
        """Write a file whole or not at all.

        Raises:
            SealedError: the run has ended.
            UnwritableError: the disk refuses; what was there before stays.
        """
        if self.is_sealed:
            raise SealedError(f"run {self.run_id} has ended: {name} cannot be written any more")
        target = self.path / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(target, content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise UnwritableError(f"run {self.run_id}: cannot write {name}: {error.strerror}") from error
        return target

    def write_json(self, name: str, value: Any) -> Path:
        return self.write(name, as_json(value))

    def read_json(self, name: str) -> Any:
        return orjson.loads((self.path / name).read_bytes())

    def missing(self, deliverables: Iterable[str]) -> list[str]:
        """Which of these files are absent or empty."""
        return [name for name in deliverables if not _has_content(self.path / name)]

    def seal(self) -> None:
        """Write the checksums of everything and make the files read-only."""
        files = self._files()
        self.write(CHECKSUMS, "".join(f"{_sha256(self.path / name)}  {name}\n" for name in files))
        for name in (*files, CHECKSUMS):
            (self.path / name).chmod(0o444)

    def verify(self, only: Collection[str] | None = None) -> list[str]:
        """What differs from the sealed run, one line each; empty when nothing does.

        Args:
            only: the files to look at, and folders with a last slash; the bytes of others are not read.

        Raises:
            P99labError: the run was never sealed.
        """
        if not self.is_sealed:
            raise P99labError(f"run {self.run_id} has no {CHECKSUMS}: it has not ended")
        lines = (self.path / CHECKSUMS).read_text(errors="replace").splitlines()
        named = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        stated = {name: digest for name, digest in named.items() if only is None or _is_among(name, only)}
        found = {name for name in self._files() if only is None or _is_among(name, only)}
        changed = [name for name in sorted(stated.keys() & found) if _sha256(self.path / name) != stated[name]]
        return [
            *(f"{name}: changed" for name in changed),
            *(f"{name}: missing" for name in sorted(stated.keys() - found)),
            *(f"{name}: added" for name in sorted(found - stated.keys())),
        ]

    def _files(self) -> list[str]:
        paths = (path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file())
        return sorted(name for name in paths if name != CHECKSUMS)


def as_json(value: Any) -> bytes:
    """JSON as a run folder holds it: indented, with a last newline."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def is_plain_name(name: str) -> bool:
    """Whether a name read from a file is one of a file or folder, and not a path that leads elsewhere."""
    return name not in ("", ".") and not any(part in name for part in ("/", "\\", "..", "\0"))


def _is_among(name: str, chosen: Collection[str]) -> bool:
    return any(name == one or (one.endswith("/") and name.startswith(one)) for one in chosen)


def _write_atomically(target: Path, content: bytes) -> None:
    draft = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(2)}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
