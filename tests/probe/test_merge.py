from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p99lab.errors import BadParameterError
from p99lab.probe import tables
from p99lab.probe.command import ProbeResult
from p99lab.probe.histograms import read_log
from p99lab.probe.intervals import percentile
from p99lab.probe.load import Run
from p99lab.probe.merge import merge
from p99lab.probe.merge import write as write_merged
from p99lab.probe.options import ProbeOptions
from p99lab.probe.output import Folder, write_data
from p99lab.probe.records import Outcome
from p99lab.probe.stats import e2e, summarise
from tests.probe.test_stats import record

pytestmark = pytest.mark.light


def kept(path: Path, number: int, n: int = 250, num_failed: int = 0, **asked: Any) -> Run:
    """A run in a folder: independent latencies from a seed."""
    latencies = np.random.default_rng(number).lognormal(0, 0.3, n)
    failed = {"outcome": Outcome.ERROR, "error": "http 500", "first_token_s": None, "token_times_s": ()}
    records = [record(i, float(t), **(failed if i < num_failed else {})) for i, t in enumerate(latencies)]
    options = ProbeOptions.parse({"target": "in-process", "requests": n, "repetition": number, **asked})
    run = Run(tuple(records), {}, {}, began_unix_s=1_700_000_000.0 + 100 * number)
    digest = f"documents of {options.seed}"
    write_data(ProbeResult(options, "tiny", "in-process", digest, run, summarise(run, options.load_spec)), Folder(path))
    return run


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        kept(folder, seed)
    return folders


def test_two_runs_have_the_p99_that_neither_has_alone(two: list[Path]) -> None:
    alone = json.loads((two[0] / "summary.json").read_bytes())
    assert alone["e2e"]["p99"]["value"] is None
    result = merge(two)
    runs = [kept(two[0].parent / f"again {seed}", seed) for seed in (0, 1)]
    values = np.array([e2e(one) for run in runs for one in run.records])
    figure = result.metrics["e2e"].percentiles["p99"]
    exact = percentile(values, 0.99)
    assert (figure.value, figure.low, figure.high, figure.n) == (exact.value, exact.low, exact.high, 500)
    assert result.exact
    assert result.histograms["e2e"].get_total_count() == 500
    assert result.histograms["e2e"].get_value_at_percentile(99) / 1e6 == pytest.approx(exact.value, rel=0.002)


def test_without_the_requests_the_histograms_give_the_same_to_three_digits(two: list[Path]) -> None:
    exact = merge(two).metrics["e2e"].percentiles
    (two[1] / "requests.parquet").unlink()
    result = merge(two)
    assert not result.exact
    assert any("requests.parquet is missing" in note for note in result.notes)
    for name in ("p50", "p90", "p99"):
        figure, wanted = result.metrics["e2e"].percentiles[name], exact[name]
        assert [figure.value, figure.low, figure.high] == pytest.approx(
            [wanted.value, wanted.low, wanted.high], rel=0.002
        )
    assert result.metrics["e2e"].std.value is None


def test_failed_requests_stay_in_the_tail_of_a_histogram(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        kept(folder, seed, num_failed=5)
        (folder / "requests.parquet").unlink()
    latency = merge(folders).metrics["e2e"]
    assert (latency.n, latency.num_failed) == (500, 10)
    assert latency.percentiles["p99"].reason == "failed requests reach P99"
    assert latency.percentiles["p90"].value is not None


@pytest.mark.parametrize(
    ("asked", "named"),
    [({"seed": 7}, "workload, seed"), ({"concurrency": 9}, "concurrency"), ({"load": "open", "rate": 1.0}, "load")],
)
def test_runs_of_other_conditions_are_refused(two: list[Path], asked: dict[str, Any], named: str) -> None:
    other = two[0].parent / "other"
    kept(other, 2, **asked)
    with pytest.raises(BadParameterError, match=rf"differs from .*one in {named}.*--force"):
        merge([*two, other])
    assert any("differs" in note for note in merge([*two, other], force=True).notes)


def test_a_void_run_is_refused(two: list[Path]) -> None:
    folders = [two[0].parent / name for name in ("cold", "void")]
    for number, folder in enumerate(folders):
        kept(folder, number, cache="cold")  # the records found everything in the cache
    with pytest.raises(BadParameterError, match="cold is void: declared cold"):
        merge(folders)
    forced = merge(folders, force=True)
    assert [reason.split(": ")[0] for reason in forced.void] == [str(folder) for folder in folders]
    assert not any("declared cold" in line for line in tables.merged_remarks(forced))  # it stands above the table


def test_what_is_said_of_a_merge(two: list[Path]) -> None:
    result = merge(two)
    said = tables.merged_remarks(result)
    assert said[0].startswith("target: tiny, in-process, clients in")
    assert said[1].startswith("requests: 500 sent, 500 measured")
    assert said[2] == "merged: 2 runs, intervals by their requests"
    assert result.is_closed


def test_what_cannot_be_merged(two: list[Path], tmp_path: Path) -> None:
    with pytest.raises(BadParameterError, match="two folders or more"):
        merge(two[:1])
    with pytest.raises(BadParameterError, match="named twice"):
        merge([two[0], two[0] / ".." / "one"], force=True)
    with pytest.raises(BadParameterError, match="holds no result of a probe"):
        merge([two[0], tmp_path])


def test_the_merged_folder(two: list[Path], tmp_path: Path) -> None:
    write_merged(merge(two), Folder(tmp_path / "both"))
    shape = json.loads((tmp_path / "both" / "merged.json").read_bytes())
    assert shape["e2e"]["n"] == 500
    assert shape["merged"] == [str(folder) for folder in two]
    assert read_log(tmp_path / "both" / "latency.hlog")["e2e"].get_total_count() == 500
    assert (tmp_path / "both" / "merged.csv").read_text().startswith("metric,figure,value_s")
