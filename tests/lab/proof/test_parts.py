"""The frame of `make proof`: parts, their record, the page."""

from __future__ import annotations

import datetime
import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from p99lab.errors import BadParameterError
from p99lab.lab.proof import parts
from p99lab.lab.proof.check import Check
from p99lab.lab.run_folder import UnwritableError

pytestmark = pytest.mark.light


@pytest.fixture
def one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def checks(work: Path) -> Iterator[Check]:
        yield Check("a | b", "1", "1", True, "by\nhand")
        yield Check("c", "1", "2", False)

    module = SimpleNamespace(checks=checks, EXPLAINS="Why two differ.")
    monkeypatch.setitem(parts.importlib.sys.modules, "p99lab.lab.proof.peers", module)


def test_an_unknown_part_is_named_with_what_it_may_have_meant() -> None:
    assert parts.chosen([]) == list(parts.PARTS)
    with pytest.raises(BadParameterError, match="no part 'pears'; did you mean 'peers'"):
        parts.chosen(["pears"])


@pytest.mark.usefixtures("one_part")
def test_a_record_is_published_with_its_page_and_read_back(tmp_path: Path) -> None:
    made = list(parts.checks("peers", tmp_path))
    record = parts.record("peers", datetime.datetime.now(datetime.UTC), made)
    assert not record.passed
    parts.publish(record, tmp_path / "proof")
    assert parts.PartRecord.read(tmp_path / "proof" / "peers.json") == record
    page = (tmp_path / "proof" / "README.md").read_text()
    assert "Why two differ." in page
    assert "| a \\| b | 1 | 1 | holds | by hand |" in page
    assert "| c | 1 | 2 | **fails** |  |" in page


def test_a_part_without_checks_has_not_passed() -> None:
    empty = parts.record("listing", datetime.datetime.now(datetime.UTC), [])
    assert not empty.passed


@pytest.mark.usefixtures("one_part")
def test_a_record_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list(parts.checks("peers", tmp_path))
    record = parts.record("peers", datetime.datetime.now(datetime.UTC), made)
    parts.publish(record, tmp_path / "proof")
    before = {path.name: path.read_bytes() for path in (tmp_path / "proof").iterdir()}

    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(UnwritableError, match=r"cannot write .*peers.json: No space left on device"):
        parts.publish(replace(record, seconds=1.0), tmp_path / "proof")
    assert {path.name: path.read_bytes() for path in (tmp_path / "proof").iterdir()} == before
