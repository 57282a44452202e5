from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from p99lab.lab.execution import Ending
from p99lab.lab.progress import ConsoleProgress, print_outcome
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.runner import Outcome


def test_plain_lines_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    with ConsoleProgress(Console(file=text, width=80)) as progress:
        progress.cell_started(1, 2, "Run [fast]")
        progress.cell_ended(1, 2, "completed", 1.25)
    assert text.getvalue() == "[1/2] Run [fast]: completed in 1.2 s\n"


def test_a_live_line_on_a_terminal() -> None:
    text = io.StringIO()
    with ConsoleProgress(Console(file=text, width=80, force_terminal=True)) as progress:
        progress.cell_started(1, 2, "Run")
    assert "[1/2] Run" in text.getvalue()


def test_the_end_shows_the_summary_the_reason_and_the_report(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    (folder.path / "metrics").mkdir()
    pq.write_table(pa.table({"arm": ["stock"], "p99": [1.23456]}), folder.path / "metrics" / "summary.parquet")
    folder.write("report.html", "a page")
    text = io.StringIO()
    print_outcome(Outcome(folder, Ending("failed", 10, "cell 2: no [luck]")), Console(file=text, width=200))
    assert "1.23" in text.getvalue()
    assert "failed: cell 2: no [luck]" in text.getvalue()
    assert f"report: {folder.path}/report.html" in text.getvalue()


def test_a_narrow_console_has_the_notes_beneath_the_table_and_breaks_no_word(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    (folder.path / "metrics").mkdir()
    rows = [
        {"arm": arm, "load": "open 50 %", "n": 87, "offered/s": 8.85, "requests/s": 9.33, "E2E P50 (s)": 0.149}
        | {"E2E tail (s)": "P90 0.271 [0.243, 0.345]", "jitter (s)": 0.0823, "note": note}
        for arm, note in (("+shared-prefix groups", "a remark " * 9), ("stock", ""), ("+chunked", "a remark " * 9))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder.path / "metrics" / "summary.parquet")
    folder.write("report.html", "a page")
    text = io.StringIO()
    print_outcome(Outcome(folder, Ending("failed", 10)), Console(file=text, width=80, soft_wrap=True))
    table, _, beneath = text.getvalue().partition("\n1  a remark")
    assert all(len(line) <= 80 for line in table.splitlines())
    assert {"+shared-prefix", "groups", "offered", "requests", "[0.243,"} <= set(table.split())
    assert "remark" not in table
    assert beneath.startswith(" a remark" * 8)
    assert "\n2  " not in beneath
