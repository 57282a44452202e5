"""Sweeps over four servers of a second each: saturation is 4 requests per second, whatever the arrivals."""

from __future__ import annotations

from typing import Any

import pytest

from p99lab.errors import BadParameterError
from p99lab.probe import tables
from p99lab.probe.command import ProbeResult
from p99lab.probe.output import sweep_csv
from p99lab.probe.records import Phase
from p99lab.probe.slo import Goodput, Slo
from p99lab.probe.sweep import Sweep, SweepResult, parse_rates
from tests.probe.conftest import FakeTarget
from tests.probe.virtual_sweep import A_SECOND, OPTIONS, swept

pytestmark = pytest.mark.light


@pytest.fixture(scope="module")
def result() -> SweepResult:
    return swept("25%,50%,75%,125%", Slo(limit_s=2.5), requests=2000)


def test_the_closed_load_measures_the_capacity(result: SweepResult) -> None:
    answered = result.capacity.answered
    assert answered.value == pytest.approx(4.0)
    assert answered.low is not None
    assert answered.high is not None
    assert answered.low <= 4.0 <= answered.high
    assert [point.rate for point in result.points] == [1.0, 2.0, 3.0, 5.0]


def test_saturation_is_between_the_rates_around_it(result: SweepResult) -> None:
    assert (result.sustained, result.saturated) == (3.0, 5.0)
    assert [bool(point.saturated) for point in result.points] == [False, False, False, True]
    assert "of 5" in str(result.points[-1].saturated)
    overloaded = result.points[-1].answered
    assert overloaded.low is not None
    assert overloaded.high is not None
    assert overloaded.low <= 4.0 <= overloaded.high
    for point in result.points[:3]:
        assert point.answered.value == pytest.approx(point.throughput.offered, rel=0.02)


def test_goodput_is_the_highest_rate_that_is_shown_to_keep_the_slo() -> None:
    kept = swept("1,2,5", Slo(limit_s=4.0), requests=2000)
    assert [point.verdict for point in kept.points] == ["meets", "meets", "saturated"]
    assert kept.goodput == Goodput(2.0, 2.0, 5.0)
    assert "goodput: 2/s meets the SLO, and no lower rate misses it" in tables.sweep_remarks(kept)
    broken = swept("1,2,3", Slo(limit_s=1.5), requests=2000)
    assert [point.verdict for point in broken.points] == ["meets", "misses", "misses"]
    assert broken.goodput == Goodput(1.0, 1.0, 2.0)


def test_an_interval_that_straddles_the_slo_says_so() -> None:
    unclear = swept("1,2", Slo(limit_s=2.5), requests=300)
    assert [point.verdict for point in unclear.points] == ["cannot tell", "cannot tell"]
    assert unclear.goodput == Goodput(None, 2.0)
    assert any("cannot be told" in line for line in tables.sweep_remarks(unclear))


def test_the_slo_may_be_about_another_metric_and_quantile() -> None:
    met = swept("1", Slo(limit_s=0.9, metric="ttft", quantile="p50"), requests=300)
    assert met.points[0].figure == met.points[0].result.summary.metrics["ttft"].percentiles["p50"]
    assert met.points[0].verdict == "meets"


def test_a_void_rate_never_counts_towards_goodput() -> None:
    void = swept("1,2", Slo(limit_s=9.0), target=FakeTarget(plan=lambda query: A_SECOND, slots=4, cached=0.1))
    assert [point.verdict for point in void.points] == ["void", "void"]
    assert void.goodput == Goodput(None, None)
    assert (void.sustained, void.saturated) == (None, None)
    assert sum(line.startswith("VOID: ") for line in tables.sweep_remarks(void)) == 3  # capacity's too


def test_each_load_has_questions_of_its_own_about_the_same_documents() -> None:
    kept: dict[str, ProbeResult] = {}
    swept("1,2", on_point=kept.__setitem__, requests=100)
    assert list(kept) == ["capacity", "rate-1", "rate-2"]
    digests = [{record.prompt_digest for record in result.run.records} for result in kept.values()]
    assert not digests[0] & digests[1]
    assert not digests[1] & digests[2]
    assert len({result.workload_digest for result in kept.values()}) == 1
    again: dict[str, ProbeResult] = {}
    swept("1,2", on_point=again.__setitem__, requests=100)
    assert [r.prompt_digest for r in again["rate-2"].run.records] == [
        r.prompt_digest for r in kept["rate-2"].run.records
    ]


@pytest.mark.parametrize(("cache", "cached", "num_alone"), [("primed", 1.0, 0), ("cold", 0.0, 1)])
def test_the_target_drains_before_each_rate(cache: str, cached: float, num_alone: int) -> None:
    target = FakeTarget(plan=lambda query: A_SECOND, slots=4, cached=cached)
    kept: dict[str, ProbeResult] = {}
    swept("8", on_point=kept.__setitem__, target=target, cache=cache, requests=60)
    sent = sum(len(result.run.records) for result in kept.values())
    assert target.num_sent == sent + num_alone
    assert len(target.primed) == (6 if cache == "primed" else 0)  # three documents, twice


def test_what_will_happen_is_told_beforehand() -> None:
    said: list[str] = []
    swept("2,8", tell=said.append, requests=200, duration_s=50.0)
    assert said[0] == "capacity: 8 clients, at most 50 + 120 s"
    assert said[1] == "sweep: 2 rates, about 78 s, at most 5 min (a request may take 120 s)"  # 50 s at 2/s, 220 / 8 s
    assert said[2] == "too short for p99 (368 requests) at 2, 8 requests/s"


def test_a_sweep_without_an_slo_has_no_goodput() -> None:
    plain = swept("1,2", requests=100)
    assert plain.goodput is None
    assert [point.verdict for point in plain.points] == [None, None]
    assert plain.as_dict()["goodput_per_s"] is None


def test_the_outputs_agree(result: SweepResult) -> None:
    shape = result.as_dict()
    assert next(iter(shape)) == "goodput_per_s"
    assert shape["saturation_per_s"] == {"sustained": 3.0, "saturated": 5.0}
    assert [point["rate"] for point in shape["points"]] == [1.0, 2.0, 3.0, 5.0]
    header, *lines = sweep_csv(result).splitlines()
    assert len(lines) == 4
    assert all(len(header.split(",")) == len(line.split(",")) for line in lines)
    assert len(tables.sweep_header(result)) == len(tables.sweep_rows(result)[0])


def test_a_target_that_answers_nothing_has_no_shares() -> None:
    deaf = FakeTarget(plan=lambda query: (1000.0, 0.0))
    with pytest.raises(BadParameterError, match="no capacity to take shares of"):
        swept("50%", target=deaf, timeout_s=1.0, requests=20)


def test_a_load_of_long_requests_is_not_taken_for_saturation() -> None:
    """The pipe fills for as long as a request takes: until then fewer end than arrive."""
    long = swept("2", target=FakeTarget(plan=lambda query: (9.7, 0.1)), duration_s=60.0, concurrency=2)
    assert long.points[0].saturated is None
    assert any(record.phase is Phase.COOLDOWN for record in long.points[0].result.run.records)


@pytest.mark.parametrize(
    ("text", "rates"),
    [("0.5,1,2", ((0.5, 1.0, 2.0), False)), ("25%, 90%", ((0.25, 0.9), True)), ("3", ((3.0,), False))],
)
def test_rates_and_shares(text: str, rates: Any) -> None:
    assert parse_rates(text) == rates


def test_auto_ends_beyond_the_capacity() -> None:
    shares, of_capacity = parse_rates("auto")
    assert of_capacity
    assert max(shares) > 1.0 > min(shares)


@pytest.mark.parametrize("text", ["", "1,", "1,50%", "fast", "1;2"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(BadParameterError, match="--sweep"):
        parse_rates(text)


def test_rates_must_be_above_zero() -> None:
    with pytest.raises(BadParameterError, match="above 0"):
        Sweep.parse({"probe": OPTIONS, "rates": (0.0, 1.0)})
    assert Sweep.parse({"probe": OPTIONS, "rates": (2.0, 1.0, 2.0)}).rates == (1.0, 2.0)
