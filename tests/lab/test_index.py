from __future__ import annotations

import errno
import re
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest

from p99lab.lab import index
from p99lab.lab.run_folder import UnwritableError
from tests.lab.run_folders import FIRST, NOTEBOOK, SECOND, make_run, tamper

pytestmark = pytest.mark.light


class Page(HTMLParser):
    """Collects links, and checks that tags nest."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(outputs: Path) -> str:
    return index.write(outputs).read_text()


def test_without_runs_it_says_how_to_make_one(tmp_path: Path) -> None:
    html = page_of(tmp_path / "outputs")
    assert "p99lab run 01" in html
    assert Page(html).open == []


def test_newest_first_within_each_notebook_with_links_that_lead_there(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND)
    make_run(tmp_path, "20261128-120000-000-cccc", "00_environment")
    html = page_of(tmp_path)
    assert html.index("00_environment") < html.index(SECOND) < html.index(FIRST)
    found = Page(html)
    assert found.open == []
    reports = [link for link in found.links if not link.startswith("#")]
    assert reports == [
        "00_environment/20261128-120000-000-cccc/report.html",
        f"{NOTEBOOK}/{SECOND}/report.html",
        f"{NOTEBOOK}/{FIRST}/report.html",
    ]
    assert all((tmp_path / link).is_file() for link in reports)


def test_it_is_self_contained_and_fits_a_phone(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    html = page_of(tmp_path)
    assert not re.search(r"https?://|<script|<link|@import|url\(", html)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html


def test_text_is_escaped_and_odd_names_are_quoted(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, status="failed", reason="<script>alert(1)</script>", hardware="<b>", tier='"x"')
    make_run(tmp_path, "a run#1", "<i>notes")
    html = page_of(tmp_path)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "<b>&lt;" not in html.replace("<b>2 in all</b>", "")
    assert "<i>" not in html
    assert "%3Ci%3Enotes/a%20run%231/report.html" in html
    assert Page(html).open == []


def test_key_figures_and_how_many_claims_stand_where(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    html = page_of(tmp_path)
    for part in ("<dt>p99_ratio</dt><dd>1.50 x <span>[1.30, 1.70]</span>", "1 not testable here", "direction only"):
        assert part in html, part


@pytest.mark.parametrize("record", [{"tier": "smoke"}, {"status": "failed"}])
def test_runs_that_the_ledger_does_not_count_get_no_verdicts(tmp_path: Path, record: dict[str, str]) -> None:
    make_run(tmp_path, FIRST, **record)
    assert '<ul class="chips">' not in page_of(tmp_path)


@pytest.mark.parametrize("name", ["metrics/figures.parquet", "run.json", "hardware.json", "parameters.yaml"])
def test_verdicts_of_a_changed_run_are_withdrawn(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path, FIRST) / name
    tamper(path, path.read_bytes() + (b"x" if path.suffix == ".parquet" else b" "))
    html = page_of(tmp_path)
    assert f"verdicts withdrawn: {name}: changed" in html
    assert "direction only" not in html


def test_a_smoke_run_is_marked_and_shows_no_figure(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, tier="smoke")
    html = page_of(tmp_path)
    assert "p99_ratio" not in html
    assert "its figures are no results" in html


def test_a_notebook_without_figures_shows_its_summary(tmp_path: Path) -> None:
    summary = [{"what": "memory read", "here": "11 GB/s"}]
    make_run(tmp_path, FIRST, "00_environment", figures=[], tables={"summary": summary})
    assert "<dt>memory read</dt><dd>11 GB/s" in page_of(tmp_path)


def test_the_ledgers_card_counts_rows_by_their_state(tmp_path: Path) -> None:
    summary = [{"chapter": "1", "no verdict": 1, "not tested": 9}, {"chapter": "2.1", "no verdict": 0, "not tested": 8}]
    make_run(tmp_path, FIRST, "99_ledger", figures=[], tables={"summary": summary})
    html = page_of(tmp_path)
    assert "<dt>no verdict</dt><dd>1 rows" in html
    assert "<dt>not tested</dt><dd>17 rows" in html
    assert "2.1" not in html


def test_broken_and_foreign_folders_cost_nothing_but_themselves(tmp_path: Path) -> None:
    tamper(make_run(tmp_path, FIRST) / "run.json", b"{")
    tamper(make_run(tmp_path, SECOND) / "metrics" / "figures.parquet")
    (tmp_path / "notes" / "today").mkdir(parents=True)
    html = page_of(tmp_path)
    assert all(part in html for part in ("unreadable", "no record", SECOND))


def test_older_runs_are_folded_away(tmp_path: Path) -> None:
    ids = [f"20261129-1200{second:02d}-000-aaaa" for second in range(index.NEWEST + 2)]
    for run_id in ids:
        make_run(tmp_path, run_id, figures=[])
    html = page_of(tmp_path)
    assert "<summary>2 older</summary>" in html
    assert html.index(ids[2]) < html.index("<details>") < html.index(ids[1])
    assert Page(html).open == []


def test_a_run_that_is_only_published_is_there(tmp_path: Path) -> None:
    make_run(tmp_path / "published", FIRST)
    make_run(tmp_path / "published", SECOND)
    make_run(tmp_path, SECOND)
    html = page_of(tmp_path)
    assert [link for link in Page(html).links if not link.startswith("#")] == [
        f"{NOTEBOOK}/{SECOND}/report.html",
        f"published/{NOTEBOOK}/{FIRST}/report.html",
    ]


def test_a_full_disk_leaves_the_last_page(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    before = page_of(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(Path, "write_text", side_effect=full), pytest.raises(UnwritableError, match="No space left"):
        index.write(tmp_path)
    assert (tmp_path / "index.html").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [NOTEBOOK, "index.html"]
