"""Notebook 99's tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.lab import ledger_tables as tables
from p99lab.lab.decisions import Decision
from p99lab.lab.effects import Effect
from p99lab.lab.ledger import Row
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE

EVIDENCE = "outputs/01_headline_p99/run-1/metrics/figures.parquet#p99 · why · code abc"
TESTED = Row(
    "c1.a", "1", "a < b", 4.8, "s", "it says both", "direction only", 1.5, (1.0, 2.0), 400, "laptop", "run-1", EVIDENCE,
    "above 1; model small (stated large)", ("code: engine.engine", "hardware: measured on another machine"),
)  # fmt: skip
UNTESTED = Row("c2.b/512", "2.1", "memory grows", 184.0, "MB", "its formula says less")
ALSO = Row("c2.b/2048", "2.1", "memory grows", 1120.0, "MB", "its formula says less")


@pytest.fixture(autouse=True)
def _in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "outputs" / "99_ledger" / "run-9"))


def test_the_kept_ledger_has_a_row_each() -> None:
    frame = tables.ledger([TESTED, UNTESTED])
    assert list(frame["state"]) == ["direction only", "not tested"]
    assert (frame["ci_low"][0], frame["ci_high"][0], frame["n"][0]) == (1.0, 2.0, 400)
    assert frame["stale"][0] == "code: engine.engine; hardware: measured on another machine"


def test_counts_by_chapter_in_the_order_of_states() -> None:
    counts = tables.counts([UNTESTED, ALSO, TESTED])
    assert list(counts.columns) == ["direction only", "not tested"]
    assert counts.to_dict("index") == {
        "1": {"direction only": 1, "not tested": 0},
        "2.1": {"direction only": 0, "not tested": 2},
    }


def test_inconsistencies_are_named_once_a_claim() -> None:
    frame = tables.inconsistencies([TESTED, UNTESTED, ALSO])
    assert frame.to_numpy().tolist() == [
        ["c1.a", "a < b", "it says both"],
        ["c2.b", "memory grows", "its formula says less"],
    ]


def test_reservations_name_conditions_and_changes() -> None:
    frame = tables.reservations([TESTED, UNTESTED])
    assert list(frame["reservation"]) == [
        "model small (stated large)",
        "stale: code: engine.engine",
        "hardware: measured on another machine",
    ]
    assert set(frame["claims"]) == {"c1.a"}


def test_the_page_links_relatively_and_escapes(tmp_path: Path) -> None:
    page = tables.spoken_to([TESTED, UNTESTED], tmp_path / "outputs")._repr_html_()
    assert 'href="../../01_headline_p99/run-1/report.html"' in page
    assert "a &lt; b" in page
    assert "direction only<br><small>stale</small>" in page
    assert "c2.b" not in page
    assert list(tables.not_tested([TESTED, UNTESTED])["claim"]) == ["c2.b/512"]


def test_the_decision_page(tmp_path: Path) -> None:
    effect = Effect("groups", "chunked", "closed, 4 clients", "E2E P99", 1.3, 1.1, 1.6, 400, {"documents": 2})
    report = tmp_path / "outputs" / "01_headline_p99" / "run-1" / "report.html"
    found = [Decision("groups", effect, "laptop", "run-1", report, ("hardware: elsewhere",)), Decision("tiers")]
    page = tables.decided(found)._repr_html_()
    assert "<td>groups</td><td>helps</td>" in page
    assert "<td>tiers</td><td>not measured</td>" in page
    assert 'href="../../01_headline_p99/run-1/report.html"' in page
    kept = tables.decision_table(found)
    assert list(kept["verdict"]) == ["helps", "not measured"]
    assert kept["run"][0] == "run-1"
    assert kept["run"].isna()[1]


def test_measures_without_a_run_are_on_the_page(tmp_path: Path) -> None:
    found = tables.decisions(tmp_path)
    assert "prefix cache" in {decision.measure for decision in found}
    assert {decision.verdict for decision in found} == {"not measured"}
