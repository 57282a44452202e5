"""Work units: what counts as finished, what is of use to a resumed run, what is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from p99lab.errors import BadParameterError
from p99lab.lab import units
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE, RunFolder, SealedError, UnwritableError
from p99lab.lab.units import Manifest, Unit, Units

pytestmark = pytest.mark.light

RECORD = {"code": "c0de", "parameters_digest": "9a4a", "hardware": "a machine"}


def folder(parent: Path, **changes: Any) -> RunFolder:
    made = RunFolder.create(parent)
    made.write_json("run.json", RECORD | changes)
    return made


def units_of(made: RunFolder) -> Units:
    return Units(made, units.basis(made.read_json("run.json")))


def names(made: RunFolder) -> tuple[list[str], list[str]]:
    whole, damaged = units.finished(made)
    return [unit.manifest.name for unit in whole], damaged


def test_a_finished_unit_is_found_with_what_it_took(tmp_path: Path) -> None:
    made = folder(tmp_path)
    assert units_of(made).get("closed.+chunked.1") is None
    units_of(made).finish("closed.+chunked.1", {"a.bin": b"\x00\xff", "b.json": b"{}"}, seconds=2.5)
    unit = units_of(made).get("closed.+chunked.1")
    assert unit is not None
    assert (unit.read("a.bin"), unit.read("b.json"), unit.seconds) == (b"\x00\xff", b"{}", 2.5)
    assert unit.manifest.run_id == made.run_id


def test_a_unit_whose_writing_was_cut_is_not_finished(tmp_path: Path) -> None:
    made = folder(tmp_path)
    write = RunFolder.write

    def full(self: RunFolder, name: str, content: bytes | str) -> Path:
        if name.endswith("manifest.json"):
            raise UnwritableError("no space")
        return write(self, name, content)

    with mock.patch.object(RunFolder, "write", full), pytest.raises(UnwritableError):
        units_of(made).finish("one", {"a": b"1"}, seconds=1.0)
    assert (made.path / "units/one/a").is_file()
    assert units_of(made).get("one") is None
    assert names(made) == ([], [])


@pytest.mark.parametrize("what", RECORD)
def test_a_unit_of_other_code_parameters_or_hardware_is_not_ours(tmp_path: Path, what: str) -> None:
    then, now = folder(tmp_path), folder(tmp_path, **{what: "another"})
    units_of(then).finish("one", {"a": b"1"}, seconds=1.0)
    shutil.copytree(then.path / "units", now.path / "units")
    assert units_of(now).get("one") is None


def test_a_unit_under_another_name_is_not_that_unit(tmp_path: Path) -> None:
    made = folder(tmp_path)
    units_of(made).finish("one", {"a": b"1"}, seconds=1.0)
    shutil.copytree(made.path / "units/one", made.path / "units/two")
    assert units_of(made).get("two") is None
    assert names(made) == (["one"], ["two"])


@pytest.mark.parametrize("damage", ["changed", "gone", "manifest"])
def test_a_damaged_unit_is_not_used_and_is_named(tmp_path: Path, damage: str) -> None:
    made = folder(tmp_path)
    for name in ("one", "two"):
        units_of(made).finish(name, {"a": b"1"}, seconds=1.0)
    path = made.path / "units/one"
    if damage == "gone":
        (path / "a").unlink()
    else:
        (path / ("a" if damage == "changed" else "manifest.json")).write_bytes(b"2")
    assert units_of(made).get("one") is None
    assert names(made) == (["two"], ["one"])


def test_a_unit_rewritten_after_the_seal_is_damaged_even_with_a_manifest_to_match(tmp_path: Path) -> None:
    made = folder(tmp_path)
    units_of(made).finish("one", {"a": b"1"}, seconds=1.0)
    made.seal()
    forged = folder(tmp_path)
    units_of(forged).finish("one", {"a": b"2"}, seconds=1.0)
    for file in ("a", "manifest.json"):
        (made.path / "units/one" / file).chmod(0o644)
        (made.path / "units/one" / file).write_bytes((forged.path / "units/one" / file).read_bytes())
    assert names(made) == ([], ["one"])


def test_restored_units_keep_the_run_that_measured_them(tmp_path: Path) -> None:
    first, second, third = folder(tmp_path), folder(tmp_path), folder(tmp_path)
    units_of(first).finish("one", {"a": b"1"}, seconds=1.0)
    first.seal()
    units.restore(second, units.finished(first)[0])
    units_of(second).finish("two", {"a": b"2"}, seconds=1.0)
    units.restore(third, units.finished(second)[0])
    whole, _ = units.finished(third)
    assert [(unit.manifest.name, unit.manifest.run_id) for unit in whole] == [
        ("one", first.run_id),
        ("two", second.run_id),
    ]


def test_nothing_is_kept_where_code_is_unknown(tmp_path: Path) -> None:
    made = folder(tmp_path, code=None)
    units_of(made).finish("one", {"a": b"1"}, seconds=1.0)
    assert units_of(made).get("one") is None
    assert not (made.path / "units").exists()


def test_by_hand_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(RunFolder.create(tmp_path).path))
    Units.current().finish("one", {"a": b"1"}, seconds=1.0)
    assert Units.current().get("one") is None


def test_in_a_run_they_are_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(made.path))
    Units.current().finish("one", {"a": b"1"}, seconds=1.0)
    assert units_of(made).get("one") is not None


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a unit"):
        units_of(folder(tmp_path)).finish(name, {"a": b"1"}, seconds=1.0)


ELSEWHERE = ["../../evil", "/tmp/evil", "a/b", "a\\b", "..", ".", ""]


@pytest.mark.parametrize("file", ELSEWHERE)
def test_a_file_that_is_a_path_is_refused(tmp_path: Path, file: str) -> None:
    with pytest.raises(ValueError, match="cannot be a unit"):
        units_of(folder(tmp_path)).finish("one", {file: b"1"}, seconds=1.0)


@pytest.mark.parametrize("file", ELSEWHERE)
def test_a_manifest_of_another_run_that_names_a_path_is_refused_before_anything_is_read(
    tmp_path: Path, file: str
) -> None:
    made = folder(tmp_path)
    units_of(made).finish("one", {"a": b"1"}, seconds=1.0)
    manifest = made.read_json("units/one/manifest.json")
    made.write_json("units/one/manifest.json", {**manifest, "files": {file: manifest["files"]["a"]}})
    with pytest.raises(BadParameterError, match=r"^[^\n]*manifest\.json names what is no plain file name[^\n]*$"):
        units.finished(made)


def test_no_unit_can_be_made_to_restore_to_a_path(tmp_path: Path) -> None:
    facts = {"key": "k", "run_id": "r", "finished": "", "seconds": 1.0}
    for name, file in (("../one", "a"), ("one", "../../a")):
        with pytest.raises(BadParameterError, match="no plain file name"):
            Unit(tmp_path, Manifest(name=name, files={file: ""}, **facts))


def test_a_sealed_run_finishes_no_unit(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.seal()
    with pytest.raises(SealedError):
        units_of(made).finish("one", {"a": b"1"}, seconds=1.0)
