"""Benchmarks: the shape of their rows, not their speed."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from p99lab.errors import BadParameterError
from p99lab.lab.bench import plan, report
from p99lab.lab.bench.rows import BenchRow

KEYS = [
    *("name", "value", "unit", "floor", "ratio_to_floor", "peer", "peer_value", "ratio_to_peer"),
    *("n", "bar", "note", "detail"),
]


def test_json_has_the_published_shape() -> None:
    rows = plan.run(plan.PlanBench(num_requests=4, num_documents=2, prompt_len=300, question_len=20, repeats=2))
    record = report.as_record(rows)
    assert list(record) == ["hardware", "git", "rows"]
    assert isinstance(record["hardware"], str)
    assert "revision" in record["git"]
    for row in record["rows"]:
        assert list(row) == [*KEYS, "verdict"]
        assert row["value"] > 0
    whole = record["rows"][0]
    assert whole["ratio_to_floor"] == pytest.approx(whole["value"] / whole["floor"])


def test_a_table_leaves_unknown_figures_empty() -> None:
    table = report.table(
        [BenchRow("decode", 0.05, "s", 0.04, 1.25, "transformers", 0.1, 2.0), BenchRow("part", 1, "ms")]
    )
    assert table.row_count == 2
    assert [list(column.cells)[1] for column in table.columns] == ["part", "1 ms", "", "", "", "", ""]
    barred = report.table([BenchRow("a", 9.0, "ms", bar=8.9), BenchRow("b", 1.0, "ms")])
    assert [next(iter(column.cells)) for column in barred.columns][-2:] == ["8.9", "missed"]


def test_a_bar_is_held_or_missed_and_files_say_so(tmp_path: Path) -> None:
    rows = [BenchRow("a", 8.8, "ms", bar=8.9), BenchRow("b", 9.0, "ms", bar=8.9, note="why"), BenchRow("c", 1.0, "ms")]
    report.write(tmp_path, "h200", rows)
    report.write(tmp_path, "h200", rows)  # replaces them
    record = json.loads((tmp_path / "bench_h200.json").read_bytes())
    assert [row["verdict"] for row in record["rows"]] == ["held", "missed", None]
    assert pq.read_table(tmp_path / "bench_h200.parquet").to_pylist() == record["rows"]
    lines = (tmp_path / "bench_h200.md").read_text().splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {12}
    assert "| ≤ 8.9 | missed |" in lines[3]


def test_details_are_in_files_and_not_in_tables_and_a_missing_value_says_why(tmp_path: Path) -> None:
    rows = [BenchRow("a, first of many", 8.8, "ms", detail=True), BenchRow("a", math.nan, "ms", note="no compiler")]
    report.write(tmp_path, "h200", rows)
    assert [row["value"] for row in json.loads((tmp_path / "bench_h200.json").read_bytes())["rows"]] == [8.8, None]
    assert pq.read_table(tmp_path / "bench_h200.parquet")["value"].to_pylist() == [8.8, None]
    (line,) = (tmp_path / "bench_h200.md").read_text().splitlines()[2:]
    assert line.startswith("| a | – |")
    assert "no compiler" in line
    assert report.table(rows).row_count == 1
    assert report.notes([*rows, BenchRow("a, second of many", 1.0, "ms", note="no", detail=True)]) == ["a: no compiler"]


def test_what_has_no_value_has_no_verdict() -> None:
    assert BenchRow("a", math.nan, "ms", bar=8.9, note="no answers").verdict is None


def test_an_unknown_benchmark_is_named_with_its_nearest() -> None:
    with pytest.raises(BadParameterError, match=r"no benchmark 'plna'; did you mean 'plan'\? \(known: .*, h200\)"):
        report.run("plna")


@pytest.mark.model
def test_the_engine_and_transformers_answer_the_same_sizes(smollm2_dir) -> None:
    from p99lab.lab.bench import cpu

    bench = cpu.CpuBench(context_len=96, num_decode_steps=2, num_questions=2, question_len=8, answer_len=3, repeats=1)
    rows = cpu.run(bench)
    assert [row.peer for row in rows] == ["transformers"] * 3
    for row in rows:
        assert all(math.isfinite(value) and value > 0 for value in asdict(row).values() if isinstance(value, float))
    prefill, decode, shared = rows
    for row in (prefill, decode):
        assert row.ratio_to_peer == pytest.approx(row.peer_value / row.value)
    assert shared.ratio_to_peer == pytest.approx(shared.value / shared.peer_value)
    assert shared.ratio_to_floor == pytest.approx(shared.floor / shared.value)
