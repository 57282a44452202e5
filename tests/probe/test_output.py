from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from p99lab.errors import BadParameterError
from p99lab.probe.command import ProbeResult
from p99lab.probe.histograms import read_log
from p99lab.probe.load import Run
from p99lab.probe.options import ProbeOptions
from p99lab.probe.output import Folder, write
from p99lab.probe.records import read_parquet
from p99lab.probe.stats import summarise
from tests.probe.test_stats import random_run

pytestmark = pytest.mark.light

FILES = {"requests.parquet", "summary.json", "summary.csv", "latency.hlog"}


def result_of(run: Run | None = None) -> ProbeResult:
    options = ProbeOptions(target="in-process", requests=400)
    run = run or random_run()
    return ProbeResult(options, "tiny", "in-process", "", run, summarise(run, options.load_spec))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_result_is_kept_whole(tmp_path: Path) -> None:
    result = result_of()
    write(result, Folder(tmp_path / "made" / "here"))
    folder = tmp_path / "made" / "here"
    assert names(folder) >= FILES
    assert tuple(read_parquet(folder / "requests.parquet")) == result.run.records
    assert json.loads((folder / "summary.json").read_bytes())["e2e"] == result.summary.metrics["e2e"].as_dict()
    assert read_log(folder / "latency.hlog")["ttft"].get_total_count() == 400
    assert (folder / "summary.csv").read_text().count("\n") > 30


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadParameterError, match=r"is not empty: .*--overwrite"):
        Folder(tmp_path)
    assert names(tmp_path) == {"notes.txt"}


def test_overwriting_removes_an_earlier_result_and_nothing_else(tmp_path: Path) -> None:
    for name in ("sweep.json", "curve.png", "requests.parquet", "notes.txt"):
        (tmp_path / name).write_text("old")
    (tmp_path / "rate-2").mkdir()
    (tmp_path / "rate-2" / "summary.json").write_text("old")
    (tmp_path / "rate-3").mkdir()
    (tmp_path / "rate-3" / "notes.txt").write_text("mine")
    folder = Folder(tmp_path, overwrite=True)
    assert (tmp_path / "sweep.json").exists()  # nothing is lost before there is something new
    write(result_of(), folder)
    assert names(tmp_path) - {"timeline.png", "ecdf.png"} == FILES | {"notes.txt", "rate-3"}
    assert names(tmp_path / "rate-3") == {"notes.txt"}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("summary.json", "first")

    def fail() -> None:
        with folder.file("summary.json") as draft:
            draft.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(tmp_path) == {"summary.json"}
    assert (tmp_path / "summary.json").read_text() == "first"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadParameterError, match=r"cannot write to .*file"):
        Folder(tmp_path / "file" / "below")


def test_without_the_packages_that_draw_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (line,) = write(result_of(), Folder(tmp_path))
    assert line == "no plots: matplotlib is missing, install the extra 'lab' (in a checkout: pip install '.[lab]')"
    assert names(tmp_path) == FILES
