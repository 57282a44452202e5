from __future__ import annotations

import errno
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from p99lab.errors import P99labError
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE, RunFolder, SealedError, UnwritableError

pytestmark = pytest.mark.light


def sealed(parent: Path) -> RunFolder:
    folder = RunFolder.create(parent)
    folder.write("metrics/a.json", "{}")
    folder.write("run.json", b"[1]")
    folder.seal()
    return folder


def test_names_sort_by_time_and_never_collide(tmp_path: Path) -> None:
    ids = [RunFolder.create(tmp_path).run_id for _ in range(200)]
    assert len(set(ids)) == 200
    moments = [run_id.rsplit("-", 1)[0] for run_id in ids]
    assert moments == sorted(moments)


def test_a_name_that_is_taken_is_not_reused(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path)
    with (
        mock.patch("p99lab.lab.run_folder.datetime") as clock,
        mock.patch("secrets.token_hex", side_effect=[first.run_id[-4:], "ffff"]),
    ):
        clock.datetime.now.return_value.__format__ = lambda *_: first.run_id[:15]
        clock.datetime.now.return_value.microsecond = int(first.run_id[16:19]) * 1000
        assert RunFolder.create(tmp_path).run_id == f"{first.run_id[:-4]}ffff"


def test_json_goes_and_comes_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_json("metrics/x.json", {"b": [1, 2.5, None], "a": "ü"})
    assert folder.read_json("metrics/x.json") == {"b": [1, 2.5, None], "a": "ü"}


def test_missing_is_what_is_absent_or_empty(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write("metrics/full.json", "1")
    folder.write("metrics/empty.json", "")
    names = ["metrics/full.json", "metrics/empty.json", "figures/none.png"]
    assert folder.missing(names) == ["metrics/empty.json", "figures/none.png"]


def test_a_full_disk_leaves_the_last_good_version(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write("notebook.ipynb", "good")
    with (
        mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(UnwritableError, match=r"cannot write notebook\.ipynb: No space left on device"),
    ):
        folder.write("notebook.ipynb", "half")
    assert (folder.path / "notebook.ipynb").read_text() == "good"
    assert [path.name for path in folder.path.iterdir()] == ["notebook.ipynb"]


def test_a_sealed_run_takes_no_more(tmp_path: Path) -> None:
    folder = sealed(tmp_path)
    for name in ("run.json", "metrics/new.json"):
        with pytest.raises(SealedError, match=folder.run_id):
            folder.write(name, "x")
    assert folder.verify() == []


def test_the_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    folder = sealed(tmp_path)
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder.path, capture_output=True)
    assert done.returncode == 0


def test_tampering_shows(tmp_path: Path) -> None:
    folder = sealed(tmp_path)
    (folder.path / "run.json").unlink()
    (folder.path / "metrics/a.json").chmod(0o644)
    (folder.path / "metrics/a.json").write_text("{ }")
    (folder.path / "metrics/b.json").write_text("{}")
    assert folder.verify() == ["metrics/a.json: changed", "run.json: missing", "metrics/b.json: added"]
    assert folder.verify(["metrics/"]) == ["metrics/a.json: changed", "metrics/b.json: added"]
    assert folder.verify(["run.json", "metrics"]) == ["run.json: missing"]


def test_a_run_that_has_not_ended_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(P99labError, match="has not ended"):
        RunFolder.create(tmp_path).verify()


def test_current_is_the_kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "run"))
    assert RunFolder.current().path == tmp_path / "run"


def test_by_hand_there_is_one_folder_per_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")  # so that what is set below is undone
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    monkeypatch.setattr("p99lab.project.outputs_dir", lambda: tmp_path)
    first = RunFolder.current()
    assert first.path.parent == tmp_path / "interactive"
    assert RunFolder.current().path == first.path
