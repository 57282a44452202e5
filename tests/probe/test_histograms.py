from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogReader

from p99lab.errors import BadParameterError
from p99lab.probe.histograms import empty, histogram, merged, read_log, to_log, values_of

pytestmark = pytest.mark.light

RANDOM = np.random.default_rng(0)
ONE, TWO = RANDOM.lognormal(-3, 1, 3000), RANDOM.lognormal(-1, 1, 2000)


def test_merging_is_as_good_as_one_histogram_of_all_values() -> None:
    both = merged([histogram(ONE), histogram(TWO)])
    every = np.sort(np.concatenate([ONE, TWO]))
    assert both.get_total_count() == 5000
    assert both.get_value_at_percentile(99) / 1e6 == pytest.approx(every[4949], rel=0.002)
    assert values_of(both) == pytest.approx(every, rel=0.002)
    assert values_of(both).tolist() == values_of(histogram(every)).tolist()


def test_failed_requests_are_in_no_bucket() -> None:
    assert values_of(histogram(np.array([0.5, np.inf]))) == pytest.approx([0.5], rel=0.001)
    assert values_of(empty()).tolist() == []


def test_a_log_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "h.hlog"
    path.write_text(to_log({"ttft": histogram(ONE), "e2e": histogram(TWO)}, 1_700_000_000.0, 30.0))
    read = read_log(path)
    assert {name: hdr.get_total_count() for name, hdr in read.items()} == {"ttft": 3000, "e2e": 2000}
    assert values_of(read["ttft"]).tolist() == values_of(histogram(ONE)).tolist()


def test_hdrhistograms_own_reader_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "h.hlog"
    path.write_text(to_log({"ttft": histogram(ONE), "e2e": histogram(TWO)}, 1_700_000_000.0, 30.0))
    reader = HistogramLogReader(str(path), HdrHistogram(1, 3_600_000_000, 3))
    first, second, none = (reader.get_next_interval_histogram() for _ in range(3))
    reader.close()
    assert none is None
    assert reader.get_start_time_sec() == 1_700_000_000.0
    assert [(hdr.get_tag(), hdr.get_total_count()) for hdr in (first, second)] == [("ttft", 3000), ("e2e", 2000)]
    assert first.get_end_time_stamp() - first.get_start_time_stamp() == 30_000
    assert second.get_value_at_percentile(50) / 1e6 == pytest.approx(np.median(TWO), rel=0.002)


@pytest.mark.parametrize("content", [None, "Tag=ttft,1.0,1.0,1.0,no histogram\n"])
def test_what_is_no_log_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "h.hlog"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadParameterError, match=r"h\.hlog"):
        read_log(path)
