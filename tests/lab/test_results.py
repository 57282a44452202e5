from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from p99lab.lab import results
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE, RunFolder, SealedError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    folder = RunFolder.create(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(folder.path))
    return folder


def test_a_table_is_kept_exact_and_shown_short(folder: RunFolder) -> None:
    page = results.table("t", pd.DataFrame({"arm": ["<stock>"], "p99": [1.23456789], "n": [12345], "why": [None]}))
    kept = pq.read_table(folder.path / "metrics/t.parquet")
    assert kept.to_pylist() == [{"arm": "<stock>", "p99": 1.23456789, "n": 12345, "why": None}]
    html = page._repr_html_()
    assert "1.23<" in html
    assert "&lt;stock&gt;" in html
    assert "1.234" not in html
    assert "12\u202f345" in repr(page)  # a space at which no line is broken


def test_whole_numbers_and_lists_stay_what_they_are(folder: RunFolder) -> None:
    page = results.table("t", pd.DataFrame({"n": [2, None], "waits": [[43.511769, 44.4], []]}).astype({"n": "Int64"}))
    assert [line.split() for line in repr(page).splitlines()[1:]] == [["2", "43.5,", "44.4"], ["–", "–"]]
    assert pq.read_table(folder.path / "metrics/t.parquet").to_pylist()[1] == {"n": None, "waits": []}


def test_a_table_may_look_otherwise_on_its_page(folder: RunFolder) -> None:
    page = results.table("t", pd.DataFrame({"p99": [1.0], "low": [0.5]}), pd.DataFrame({"P99": ["1.00 [0.500, 2.00]"]}))
    assert pq.read_table(folder.path / "metrics/t.parquet").column_names == ["p99", "low"]
    assert "1.00 [0.500, 2.00]" in page._repr_html_()
    assert "low" not in repr(page)


def test_a_table_without_rows_says_why(folder: RunFolder) -> None:
    page = results.table("t", pd.DataFrame({"arm": []}), empty="no <arm> was run")
    assert page._repr_html_() == '<p class="empty">nothing here: no &lt;arm&gt; was run</p>'
    assert repr(page) == "nothing here: no <arm> was run"


def test_columns_of_short_texts_keep_their_lines_whole() -> None:
    html = results.Shown(
        pd.DataFrame({"arm": ["+shared-prefix groups"], "note": ["word " * 10], "why": ["word " * 20]})
    )
    assert re.findall(r'<td class="(\w+)">', html._repr_html_()) == ["short", "long", "text"]


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        ((1.0, 0.5, 2.0), "1.00 [0.500, 2.00]"),
        ((1.0, 0.5, None), "1.00 [≥ 0.500]"),
        ((1.0, None, 2.0), "1.00 [≤ 2.00]"),
        ((1.0, None, None), "1.00"),
        ((None, None, None), "–"),
    ],
)
def test_a_figure_stands_beside_its_interval(
    figure: tuple[float | None, float | None, float | None], text: str
) -> None:
    assert results.bounded(*figure) == text


def test_an_arrow_table_will_do(folder: RunFolder) -> None:
    results.table("t", pa.table({"x": [1, None]}))
    assert pq.read_table(folder.path / "metrics/t.parquet").to_pylist() == [{"x": 1}, {"x": None}]


def test_metrics_keep_their_shape_and_show_flat(folder: RunFolder) -> None:
    values = {"cpu": {"cores": 2}, "gpus": [{"name": "a"}], "flags": ["x", "y"], "torch": None}
    page = results.metrics("m", values)
    assert folder.read_json("metrics/m.json") == values
    assert [line.split() for line in repr(page).splitlines()[1:]] == [
        ["cpu.cores", "2"],
        ["gpus.0.name", "a"],
        ["flags", "x,", "y"],
        ["torch", "–"],
    ]


def test_the_figure_on_the_page_is_the_file(folder: RunFolder) -> None:
    image = results.figure("f", Figure(figsize=(2, 1)), alt="nothing much")
    content = (folder.path / "figures/f.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    data, metadata = image._repr_mimebundle_()
    assert image.data == content
    assert "image/png" in data
    assert metadata["image/png"]["alt"] == "nothing much"


def test_nothing_is_added_to_a_sealed_run(folder: RunFolder) -> None:
    folder.seal()
    with pytest.raises(SealedError):
        results.metrics("m", {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.000123456, "0.000123"),
        (0.5, "0.500"),
        (1.0, "1.00"),
        (98.76, "98.8"),
        (123456.7, "123\u202f457"),
        ([12.5, None], "12.5, –"),
        (-2.5, "-2.50"),
        (0.0, "0"),
        (7, "7"),
        (True, "yes"),
        (float("nan"), "–"),
        (float("inf"), "inf"),
        ([], "–"),
        ("x", "x"),
    ],
)
def test_numbers_are_short(value: object, text: str) -> None:
    assert results.shown(value) == text
