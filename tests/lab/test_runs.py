from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from p99lab import project
from p99lab.cli import app
from p99lab.errors import BadParameterError
from p99lab.lab import alive, index, inspection, resume, runs, units
from p99lab.lab.figures import Figure
from p99lab.lab.ledger import completed
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.staleness import Present
from tests.lab.run_folders import FIRST, NOTEBOOK, SECOND, make_run, tamper

pytestmark = pytest.mark.light


def p99lab(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def statuses(outputs: Path) -> dict[str, str]:
    return {run.id: run.status for run in runs.catalogue(outputs)}


def shown(run: runs.Run) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(inspection.page(inspection.inspect(run)))
    return console.export_text()


def test_nothing_there_is_an_empty_list(tmp_path: Path) -> None:
    assert runs.catalogue(tmp_path / "outputs") == []


def test_newest_first_and_chosen_by_notebook_status_and_number(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND, status="timed out")
    make_run(tmp_path, "20261128-120000-000-cccc", "00_environment")
    found = runs.catalogue(tmp_path)
    assert [run.id for run in found] == [SECOND, FIRST, "20261128-120000-000-cccc"]
    assert [run.id for run in runs.choose(found, notebook="headline")] == [SECOND, FIRST]
    assert [run.id for run in runs.choose(found, notebook="00")] == ["20261128-120000-000-cccc"]
    assert [run.id for run in runs.choose(found, status="timed out")] == [SECOND]
    assert [run.id for run in runs.choose(found, last=1)] == [SECOND]
    assert runs.choose(found, notebook="99") == []  # known, and never run
    with pytest.raises(BadParameterError, match=r"^no notebook '77'; known are 00_environment, 01_headline_p99, "):
        runs.choose(found, notebook="77")


@pytest.mark.parametrize("record", ["{", "[1]", "null", "", '{"status": 3}'])
def test_a_broken_record_costs_itself_alone(tmp_path: Path, record: str) -> None:
    make_run(tmp_path, FIRST)
    tamper(make_run(tmp_path, SECOND) / "run.json", record.encode())
    assert statuses(tmp_path) == {SECOND: "unreadable", FIRST: "completed"}
    assert runs.catalogue(tmp_path)[0].started == "2026-11-30T12:00:00+00:00"  # by its name


def test_foreign_folders_and_files_are_shown_or_left_aside(tmp_path: Path) -> None:
    (tmp_path / "notes" / "today").mkdir(parents=True)
    (tmp_path / "interactive" / FIRST).mkdir(parents=True)
    (tmp_path / NOTEBOOK / ".hidden").mkdir(parents=True)
    (tmp_path / "index.html").write_text("")
    (tmp_path / "published" / "proof").mkdir(parents=True)
    assert statuses(tmp_path) == {"today": "no record", FIRST: "by hand"}


def test_a_run_without_an_end_is_running_while_its_runner_lives(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, is_sealed=False, status="running", runner=alive.this_process())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    runner = {**alive.this_process(), "pid": gone.pid}
    make_run(tmp_path, SECOND, is_sealed=False, status="running", runner=runner)
    assert statuses(tmp_path) == {SECOND: "cut off", FIRST: "running"}


def test_a_published_copy_is_no_second_run(tmp_path: Path) -> None:
    original = make_run(tmp_path, FIRST)
    copy = make_run(tmp_path / "published", FIRST)
    alone = make_run(tmp_path / "published", SECOND)
    found = {run.id: run for run in runs.catalogue(tmp_path)}
    assert (found[FIRST].path, found[FIRST].published) == (original, copy)
    assert (found[SECOND].path, found[SECOND].published) == (alone, alone)


def test_found_by_a_beginning_that_is_unique_or_by_folder(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND)
    assert runs.find(tmp_path, "20261129").id == FIRST
    assert runs.find(tmp_path / "elsewhere", str(path)).id == FIRST
    for name, says in [
        ("2026", "'2026' begins 2 run ids"),
        ("20261129-120000-000-aaab", f"did you mean '{FIRST}'"),
        ("x", "no run 'x' among the 2"),
        ("", "no run ''"),
        (str(tmp_path / "gone"), "no directory"),
    ]:
        with pytest.raises(BadParameterError, match=says):
            runs.find(tmp_path, name)


def test_one_line_per_run(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND, is_sealed=False, seconds=None, dirty=True)
    heading, second, first = runs.table(runs.catalogue(tmp_path)).splitlines()
    assert heading.split()[:4] == ["run", "notebook", "tier", "status"]
    assert first.split() == [
        *(FIRST, NOTEBOOK, "laptop", "completed", "2026-11-29", "12:00", "5:20", "yes", "0123456789ab"),
        *("EPYC,", "2", "CPUs,", "no", "GPU"),
    ]
    assert "no      0123456789ab+" in second
    assert first.index("EPYC") == second.index("EPYC") == heading.index("hardware")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (3.21, "3.2 s"), (59.97, "1:00"), (320.2, "5:20"), (3725.0, "1:02:05")]
)
def test_time_taken(seconds: float | None, text: str) -> None:
    assert runs.took(seconds) == text


def test_sql_joins_runs_whose_columns_differ(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, tables={"percentiles": [{"arm": "stock", "p99": 1.0}]})
    make_run(tmp_path, SECOND, tables={"percentiles": [{"arm": "stock", "p50": 0.5}]}, figures=[])
    columns, rows = runs.query(tmp_path, "SELECT run, p50, p99 FROM percentiles ORDER BY run")
    assert (columns, rows) == (["run", "p50", "p99"], [(FIRST, None, 1.0), (SECOND, 0.5, None)])
    _, rows = runs.query(
        tmp_path, "SELECT run, tier, value FROM runs JOIN figures USING (run) WHERE metric = 'p99_ratio'"
    )
    assert rows == [(FIRST, "laptop", 1.5)]
    columns, rows = runs.query(tmp_path, "FROM requests")
    assert (columns[0], rows) == ("run", [])
    assert {"arm", "load", "index", "first_token_s", "prompt_digest"} <= set(columns)


def test_sql_knows_columns_that_no_run_has(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, "00_environment", figures=[])
    query = "SELECT run, arm, load, p99 FROM percentiles WHERE metric = 'e2e'"
    assert query in (project.root() / "README.md").read_text()
    assert runs.query(tmp_path, query) == (["run", "arm", "load", "p99"], [])
    done = p99lab("runs", "sql", query, "--outputs", str(tmp_path))
    assert (done.exit_code, done.stdout.split()) == (0, ["run", "arm", "load", "p99"])
    make_run(tmp_path, SECOND, tables={"percentiles": [{"arm": "stock", "p99": None, "more": 1}]})
    assert runs.query(tmp_path, "SELECT run, arm, p99, metric, more FROM percentiles") == (
        ["run", "arm", "p99", "metric", "more"],
        [(SECOND, "stock", None, None, 1)],
    )


def test_sql_over_no_runs_at_all(tmp_path: Path) -> None:
    assert runs.query(tmp_path, "SELECT count(*) AS n FROM runs") == (["n"], [(0,)])


def test_sql_reads_the_runs_and_no_other_file_and_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path, FIRST)
    own, other = path / "metrics" / "figures.parquet", tmp_path / "other.csv"
    other.write_text("a\n1\n")
    before = own.read_bytes()
    monkeypatch.chdir(tmp_path.parent)
    assert runs.query(Path(tmp_path.name), "SELECT DISTINCT run FROM figures")[1] == [(FIRST,)]
    for query in (
        f"COPY (SELECT 1) TO '{tmp_path / 'new.csv'}'",
        f"COPY (SELECT 1) TO '{own}' (USE_TMP_FILE false)",
        f"SELECT 1; COPY (SELECT 1) TO '{own}' (USE_TMP_FILE false)",
        "DROP VIEW figures",
        f"ATTACH '{tmp_path / 'new.db'}'",
        f"FROM '{other}'",
        "SET enable_external_access = true",
    ):
        with pytest.raises(BadParameterError, match=r"^[^\n]+$"):
            runs.query(tmp_path, query)
    assert own.read_bytes() == before
    assert not list(tmp_path.glob("new.*"))


def test_sql_leaves_no_file_and_errors_are_one_line(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST)
    before = sorted(tmp_path.rglob("*"))
    runs.query(tmp_path, "FROM figures")
    assert sorted(tmp_path.rglob("*")) == before
    for query in ("SELEC 1", "FROM nothing"):
        with pytest.raises(BadParameterError, match=r"^[^\n]+$"):
            runs.query(tmp_path, query)
    with pytest.raises(BadParameterError, match=r"^[^\n]*nothing_such[^\n]*; figures has run, metric, [^\n]+$"):
        runs.query(tmp_path, "SELECT nothing_such FROM figures")
    tamper(path / "metrics" / "figures.parquet")
    with pytest.raises(BadParameterError, match=r"^[^\n]*figures\.parquet[^\n]*$"):
        runs.query(tmp_path, "FROM figures")


def test_show_tells_the_whole_run(tmp_path: Path) -> None:
    resumed = {"run_id": "earlier", "status": "pre-empted", "restored": ["a", "b"], "damaged": [], "measured": ["c"]}
    note = [{"arm": "stock", "load": "open", "note": "void: the client was late; 2 failed"}]
    path = make_run(tmp_path, FIRST, tables={"summary": note}, resumed_from=resumed)
    text = shown(runs.find(tmp_path, FIRST))
    for part in (
        "completed (exit code 0)",
        "earlier (pre-empted): 2 units taken over, 1 measured here",
        "every file is as it was written",
        str(path / "report.html"),
        "5:16",
        "1.70 – 2.00",
        "c1.p99_ratio",
        "void: stock, open: the client was late",
    ):
        assert part in text, part
    assert "2 failed" not in text


def test_show_cuts_nothing_at_80_columns(tmp_path: Path) -> None:
    heading = "What the open load says of the arms, and which part of it the batches explain, in words that take room"
    cell = {"number": 12, "id": "open-load-by-arm-and-block", "heading": heading, "status": "completed", "seconds": 1.0}
    make_run(tmp_path, FIRST, cells=[cell])
    console = Console(width=80)
    with console.capture() as captured:
        console.print(inspection.page(inspection.inspect(runs.find(tmp_path, FIRST))))
    text = captured.get()
    assert "…" not in text
    assert re.search(r"12 +open-load-by-arm-and-block +completed +1\.0 s +What", text)
    assert text.split("room")[0].count("\n") > 0
    assert "p99_e2e_stock" in text


def test_show_says_what_is_done_of_a_run_that_has_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    basis = {"code": "c", "parameters_digest": "p"}
    ended = {FIRST: {"status": "pre-empted"}, SECOND: {"status": "running", "runner": alive.this_process()}}
    for run_id, record in ended.items():
        path = make_run(tmp_path, run_id, is_sealed=False, **basis, **record)
        folder = RunFolder(path)
        own = units.Units(folder, units.basis(folder.read_json("run.json")))
        for name in ("stock-0", "stock-1"):
            own.finish(name, {"a": b"1"}, 1.0)
        tamper(path / "units" / "stock-1" / "a")
    monkeypatch.setattr(resume, "prepare", lambda folder: None)
    for run_id in ended:
        text = shown(runs.find(tmp_path, run_id))
        assert "1 units done: stock-0" in text
        assert "damaged, to be measured again: stock-1" in text
        assert ("resume with: p99lab run --resume" in text) == (run_id == FIRST)
    monkeypatch.undo()
    assert "cannot be resumed: " in shown(runs.find(tmp_path, FIRST))


def test_show_withdraws_verdicts_of_changed_runs(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST)
    tamper(path / "hardware.json", b"{}")
    text = shown(runs.find(tmp_path, FIRST))
    assert "CHANGED since the run ended: hardware.json: changed" in text
    assert "withdrawn" in text
    assert "direction only" not in text


def test_show_withdraws_for_any_file_and_says_what_the_ledger_does(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST)
    tamper(path / "report.html")
    text = shown(runs.find(tmp_path, FIRST))
    assert "withdrawn: files were changed" in text
    assert "the ledger still counts this run" in text
    tamper(path / "hardware.json", b"{}")
    assert "the ledger still counts this run" not in shown(runs.find(tmp_path, FIRST))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("report.html", None),
        ("run.json", "run.json: changed"),
        ("hardware.json", "hardware.json: changed"),
        ("parameters.yaml", "parameters.yaml: changed"),
        ("metrics/figures.parquet", "metrics/figures.parquet: changed"),
        ("metrics/windows.parquet", "metrics/windows.parquet: added"),
        ("sources.json", "sources.json: added"),
        ("run.json.orig", None),
        ("SHA256SUMS", "hardware.json: added, metrics/figures.parquet: added, parameters.yaml: added, run.json: added"),
    ],
)
def test_which_files_withdraw_a_verdict(tmp_path: Path, name: str, says: str | None) -> None:
    path = make_run(tmp_path, FIRST) / name
    if path.exists():
        tamper(path, b"\xff")
    else:
        path.write_bytes(b"")
    run = runs.find(tmp_path, FIRST)
    found = inspection.inspect(run)
    assert (inspection.withdrawn(run), found.withdrawn, found.as_record()["withdrawn"]) == (says, says, says)
    if path.name != "run.json":  # which says whether it completed
        assert [one.withdrawn for one in completed(tmp_path, Present())] == [says]
        assert (f"verdicts withdrawn: {says}" if says else "direction only") in index.render(tmp_path, [run])


def test_a_run_that_was_never_sealed_or_cannot_be_read_has_no_verdict(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST, is_sealed=False)
    run = runs.find(tmp_path, FIRST)
    assert inspection.withdrawn(run) == "it was never sealed"
    (path / "SHA256SUMS").mkdir()
    assert str(inspection.withdrawn(run)).startswith("it cannot be read: ")


def test_show_names_what_it_cannot_read(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST, is_sealed=False, resumed_from="earlier", cells="none")
    tamper(path / "metrics" / "figures.parquet")
    found = inspection.inspect(runs.find(tmp_path, FIRST))
    assert [problem.partition(" ")[0] for problem in found.problems] == ["metrics/figures.parquet"]
    assert found.changes is None
    assert "resumed from  earlier" in shown(found.run)
    json.dumps(found.as_record())


def test_show_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes" / "today").mkdir(parents=True)
    assert "no record" in shown(runs.find(tmp_path, "today"))


def test_figures_are_judged_by_the_rules_of_today(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, figures=[Figure("p99_ratio", 1.5, "x", 1.3, 1.7, 400)])
    found = inspection.inspect(runs.find(tmp_path, FIRST))
    assert {judged.claim: judged.verdict for judged in found.verdicts} == {"c1.p99_ratio": "direction only"}


def test_the_commands(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND, status="failed", exit_code=10)
    where = ("--outputs", str(tmp_path))
    assert "+ after the code" not in p99lab("runs", *where).stdout
    make_run(tmp_path, "20261128-120000-000-cccc", dirty=True)
    assert "+ after the code: with changes" in p99lab("runs", *where).stdout
    assert p99lab("runs", *where).stdout == p99lab("runs", "list", *where).stdout
    (listed,) = json.loads(p99lab("runs", "--status", "failed", "--json", *where).stdout)
    assert (listed["run"], listed["exit_code"], listed["sealed"]) == (SECOND, 10, True)
    assert json.loads(p99lab("runs", "show", FIRST[:10], "--json", *where).stdout)["changes"] == []
    rows = json.loads(p99lab("runs", "sql", "SELECT max(value) AS most FROM figures", "--json", *where).stdout)
    assert rows == [{"most": 1.8}]
    assert str(p99lab("runs", "--outputs", str(tmp_path / "gone")).exception).endswith("is no directory of runs")


def test_an_unknown_run_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "p99lab.cli", "runs", "show", f"{FIRST}x", "--outputs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"p99lab: no run '{FIRST}x' among the 0 in {tmp_path}\n"
