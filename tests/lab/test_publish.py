from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p99lab import project
from p99lab.cli import app
from p99lab.errors import BadParameterError
from p99lab.lab import publish as publishing
from p99lab.lab import runs
from p99lab.lab.figures import FIGURES, Figure
from p99lab.lab.ledger import as_records, ledger
from p99lab.lab.publish import NotPublishableError, Published, publish
from p99lab.lab.run_folder import RunFolder
from tests.lab.run_folders import FIRST, NOTEBOOK, SECOND, make_run, tamper

pytestmark = pytest.mark.light


def published(outputs: Path, run_id: str = FIRST, **options: object) -> Published:
    return publish(outputs, runs.find(outputs, run_id), **options)  # type: ignore[arg-type]


def test_a_copy_is_sealed_anew_and_holds_the_originals_files(tmp_path: Path) -> None:
    original = make_run(tmp_path, FIRST, tables={"summary": [{"a": 1}], "percentiles": [{"p99": 1.0}]})
    copy = published(tmp_path)
    assert copy.path == tmp_path / "published" / NOTEBOOK / FIRST
    assert RunFolder(copy.path).verify() == []
    for name in ("run.json", "hardware.json", "parameters.yaml", FIGURES, "metrics/summary.parquet"):
        assert (copy.path / name).read_bytes() == (original / name).read_bytes()
    assert (copy.path / "ORIGIN_SHA256SUMS").read_bytes() == (original / "SHA256SUMS").read_bytes()
    check = ["sha256sum", "--check", "--ignore-missing", "--strict", "ORIGIN_SHA256SUMS"]
    assert subprocess.run(check, cwd=copy.path, capture_output=True).returncode == 0
    assert copy.num_bytes == sum(path.stat().st_size for path in copy.path.rglob("*") if path.is_file())


def test_large_files_stay_behind_and_are_named(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST, is_sealed=False)
    folder = RunFolder(path)
    folder.write("metrics/requests.parquet", b"x" * (publishing.MAX_METRIC_BYTES + 1))
    folder.write("metrics/windows.parquet", b"PAR1" * 4)
    folder.write("notebook.ipynb", "{}")
    folder.seal()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publishing, "_text", lambda _: "")  # the tiny files are no Parquet
        copy = published(tmp_path)
    assert copy.left_out == ("metrics/requests.parquet",)
    kept = {file.name for file in copy.path.rglob("*") if file.is_file()}
    assert "windows.parquet" in kept
    assert kept.isdisjoint({"requests.parquet", "notebook.ipynb"})


def test_the_ledger_reads_a_copy_as_it_reads_the_run_and_counts_both_once(tmp_path: Path) -> None:
    original = make_run(tmp_path, FIRST)
    before = as_records(ledger(tmp_path))
    published(tmp_path)
    assert as_records(ledger(tmp_path)) == before
    subprocess.run(["rm", "-rf", original], check=True)
    after = as_records(ledger(tmp_path))
    assert [row["verdict"] for row in after] == [row["verdict"] for row in before]
    assert {row["run"] for row in after} == {FIRST, None}
    tamper(tmp_path / "published" / NOTEBOOK / FIRST / "run.json", b'{"status": "completed", "notebook": "x"}')
    assert not any(row["verdict"] for row in as_records(ledger(tmp_path)))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"status": "timed out"}, "is timed out: only a completed run"),
        ({"status": "running"}, "is cut off: only a completed run"),
        ({"tier": "smoke"}, "is a smoke run, .* --allow-smoke"),
        ({"is_sealed": False}, "was never sealed"),
        ({"reason": "token hf_" + "a1B2" * 9}, "holds a secret: run.json: a Hugging Face token"),
        ({"reason": "/home/somebody/notes"}, "run.json names /home/somebody"),
        ({"reason": str(project.root() / "lib" / "x.py")}, f"run.json names {re.escape(str(project.root()))}"),
        ({"parameters": f"model: {Path.home()}/models\n"}, f"parameters.yaml names {re.escape(str(Path.home()))}"),
        ({"report": "<p>/Users/somebody/x</p>"}, "report.html names /Users/somebody"),
        ({"tables": {"summary": [{"note": "see /home/somebody/x"}]}}, "summary.parquet names /home/somebody"),
    ],
)
def test_what_is_not_for_others_is_refused_in_one_line(tmp_path: Path, record: dict[str, object], says: str) -> None:
    make_run(tmp_path, FIRST, **record)  # type: ignore[arg-type]
    with pytest.raises(NotPublishableError, match=rf"^[^\n]*{says}[^\n]*$"):
        published(tmp_path)
    assert not list(tmp_path.glob("published/*/*"))


def test_the_name_of_the_host_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "gpu-node-17.example.org")
    make_run(tmp_path, FIRST, reason="as on gpu-node-171 and any-gpu-node-17")
    published(tmp_path)
    make_run(tmp_path, SECOND, reason="measured on gpu-node-17")
    with pytest.raises(NotPublishableError, match=r"run\.json names gpu-node-17"):
        published(tmp_path, SECOND)


@pytest.mark.parametrize("host", ["box", "localhost"])
def test_a_host_named_like_any_word_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setattr(platform, "node", lambda: host)
    make_run(tmp_path, FIRST, reason=f"a {host} it was")
    copy = published(tmp_path)
    assert RunFolder(copy.path).read_json("run.json")["reason"] == f"a {host} it was"


def test_urls_and_system_paths_are_nobodys_home(tmp_path: Path) -> None:
    page = "<a href='https://example.org/home/x'>/usr/lib/python3 and a/root/b</a>"
    make_run(tmp_path, FIRST, report=page)
    assert (published(tmp_path).path / "report.html").read_text() == page


@pytest.mark.parametrize("name", ["../../elsewhere", "/tmp/elsewhere", "..", ".", "a/b", "a\\b", "01\n.."])
def test_a_notebook_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    outputs = tmp_path / "outputs"
    folder = RunFolder(make_run(outputs, FIRST, is_sealed=False))
    folder.write_json("run.json", {**folder.read_json("run.json"), "notebook": name})
    folder.seal()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NotPublishableError, match=r"^[^\n]*names a notebook that is no plain name[^\n]*$"):
        published(outputs)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["publish", f"{tmp_path}/"])
    assert isinstance(said.exception, BadParameterError)
    assert str(said.exception) == f"{tmp_path} is no run: it has no run.json"


def test_a_changed_run_is_refused(tmp_path: Path) -> None:
    tamper(make_run(tmp_path, FIRST) / "report.html")
    with pytest.raises(NotPublishableError, match=r"changed after its end: report\.html: changed"):
        published(tmp_path)


def test_a_run_is_published_once(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    published(tmp_path)
    with pytest.raises(NotPublishableError, match="published already"):
        published(tmp_path)


def test_smoke_runs_only_when_asked_for(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, tier="smoke")
    assert published(tmp_path, allow_smoke=True).path.is_dir()


def test_the_budget_holds_for_everything_published(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND)
    size = published(tmp_path, FIRST).num_bytes
    with pytest.raises(NotPublishableError, match=r"^published/ would hold .* may hold .*$"):
        published(tmp_path, SECOND, budget_bytes=2 * size - 1)
    assert [path.name for path in (tmp_path / "published" / NOTEBOOK).iterdir()] == [FIRST]


def test_a_page_that_stays_large_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, report="x" * (publishing.MAX_REPORT_BYTES + 1))
    with pytest.raises(NotPublishableError, match=r"its page has 1\.5 MiB even with small pictures"):
        published(tmp_path)


def test_the_budget_is_the_one_that_the_repository_is_held_to() -> None:
    text = (Path(__file__).parents[1] / "test_repository.py").read_text()
    assert "MAX_PUBLISHED_BYTES = 10 * 2**20" in text
    assert publishing.BUDGET_BYTES == 10 * 2**20


def test_without_pillow_a_page_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    page = '<img src="data:image/png;base64,AAAA">'
    assert publishing.smaller(page) == page


def test_figures_of_a_smoke_run_do_not_reach_the_ledger(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, tier="smoke", figures=[Figure("p99_ratio", 1.5, "x", 1.3, 1.7, 400)])
    published(tmp_path, allow_smoke=True)
    assert not any(row["run"] for row in as_records(ledger(tmp_path)))


def test_void_arms_are_said_and_not_refused(tmp_path: Path) -> None:
    note = [{"arm": "stock", "load": "open", "note": "void: the client was late"}]
    make_run(tmp_path, FIRST, tables={"summary": note})
    done = CliRunner().invoke(app, ["publish", FIRST, "--outputs", str(tmp_path)])
    assert (done.exit_code, "note: void: stock, open: the client was late" in done.stdout) == (0, True)


def test_the_command_says_where_the_copy_is_and_writes_the_index_anew(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    done = CliRunner().invoke(app, ["publish", FIRST[:8], "--outputs", str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout.startswith(str(tmp_path / "published" / NOTEBOOK / FIRST))
    assert "published" in (tmp_path / "index.html").read_text()
    assert "note: stale: the run did not record its code" in done.stdout
    again = CliRunner().invoke(app, ["publish", FIRST, "--outputs", str(tmp_path)])
    assert isinstance(again.exception, NotPublishableError)
