from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from p99lab.probe.load import Run
from p99lab.probe.records import Outcome, Phase, RequestRecord
from p99lab.probe.stats import (
    Lateness,
    concurrency_at,
    gaps,
    measured,
    prompt_drift,
    summarise,
)
from p99lab.probe.workload import ClosedLoad, OpenLoad

pytestmark = pytest.mark.light

CLOSED = ClosedLoad(concurrency=1, num_requests=400)


def record(index: int, e2e_s: float = 1.0, **changes: Any) -> RequestRecord:
    send_s = float(index)
    made = RequestRecord(
        index=index,
        phase=Phase.MEASURED,
        document=0,
        client=0,
        intended_s=None,
        send_s=send_s,
        first_token_s=send_s + 0.4 * e2e_s,
        end_s=send_s + e2e_s,
        token_times_s=(send_s + 0.4 * e2e_s, send_s + 0.7 * e2e_s, send_s + e2e_s),
        outcome=Outcome.OK,
        error=None,
        max_tokens=3,
        num_prompt_tokens=1100,
        num_document_tokens=1000,
        num_cached_tokens=1000,
        num_output_tokens=3,
        prompt_digest="",
        queue_s=0.1,
        prefill_s=0.2,
        decode_s=0.3,
        stalled_s=0.0,
        scheduling_s=0.05,
        num_preemptions=0,
    )
    return replace(made, **changes)


def run_of(records: list[RequestRecord], counters: dict[str, int] | None = None) -> Run:
    return Run(tuple(records), {}, counters or {})


def random_run(n: int = 400, **changes: Any) -> Run:
    rng = np.random.default_rng(0)
    return run_of([record(i, float(e), **changes) for i, e in enumerate(rng.lognormal(0, 0.3, n))])


def test_metrics_by_their_definitions() -> None:
    summary = summarise(random_run(), CLOSED)
    e2e = np.sort([r.end_s - r.send_s for r in random_run().records])
    figure = summary.metrics["e2e"].percentiles["p99"]
    assert figure.value == pytest.approx(e2e[395])
    assert figure.n == 400
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low < figure.value < figure.high
    assert summary.metrics["tpot"].percentiles["p50"].value == pytest.approx(0.3 * e2e[199])
    assert summary.metrics["itl"].n == 800
    assert summary.metrics["queue_time"].percentiles["p50"].value == pytest.approx(0.1)
    assert summary.steady_window.verdict == "steady"
    assert summary.void == ()


def test_the_json_has_every_metric_at_its_top() -> None:
    shape = summarise(random_run(50), CLOSED).as_dict()
    for metric in ("ttft", "itl", "tpot", "e2e", "queue_time"):
        assert {"n", "effective_n", "p50", "p90", "p99", "p999", "max", "mean", "std", "unit"} <= set(shape[metric])
        assert set(shape[metric]["p50"]) == {"value", "ci95", "n", "effective_n", "reason"}
    assert shape["e2e"]["p99"]["value"] is None
    assert "n too small" in shape["e2e"]["p99"]["reason"]
    assert shape["e2e"]["p90"]["value"] is not None
    assert {"lateness", "hit_rates", "steady_window", "counts", "attribution", "void", "notes"} <= set(shape)
    assert list(shape)[:3] == ["void", "notes", "counts"]


def test_only_measured_requests_count() -> None:
    extra = [
        record(1000, 50.0, phase=Phase.WARMUP),
        record(1001, 50.0, phase=Phase.COOLDOWN),
        record(1002, 50.0, outcome=Outcome.CANCELLED),
    ]
    run = random_run(50)
    assert measured([*extra, *run.records]) == list(run.records)
    assert summarise(run_of([*extra, *run.records]), CLOSED).metrics["e2e"].n == 50


def test_a_target_without_an_account_of_its_own() -> None:
    summary = summarise(random_run(queue_s=None, num_cached_tokens=None), CLOSED)
    assert summary.metrics["queue_time"].reason == "the target does not report it"
    assert summary.attribution == {}
    assert summary.hit_rates.verdict == "unknown"
    assert any("cache state not checked" in note for note in summary.notes)
    assert summary.void == ()


@pytest.mark.parametrize(
    ("declared", "cached", "verdict"),
    [
        ("cold", 0, "as declared"),
        ("cold", 30, "as declared"),
        ("cold", 1000, "contaminated"),
        ("primed", 1000, "as declared"),
        ("primed", 960, "as declared"),
        ("primed", 500, "contaminated"),
        ("primed", 0, "contaminated"),
        ("mixed", 500, "as declared"),
    ],
)
def test_the_declared_cache_state_is_checked(declared: Any, cached: int, verdict: str) -> None:
    load = CLOSED.model_copy(update={"cache": declared})
    summary = summarise(random_run(num_cached_tokens=cached), load)
    assert summary.hit_rates.verdict == verdict
    assert bool(summary.void) == (verdict == "contaminated")


def test_a_question_that_the_cache_knew_contaminates_a_primed_run() -> None:
    asked_before = random_run(num_cached_tokens=1084)  # of 1000 + 100, in blocks of 16
    summary = summarise(asked_before, CLOSED)
    assert summary.hit_rates.known_questions == 1.0
    assert any("had been asked before" in reason for reason in summary.void)
    assert summarise(asked_before, CLOSED.model_copy(update={"cache": "mixed"})).void == ()


def test_a_target_that_names_hits_only_where_there_are_some_had_none_elsewhere() -> None:
    records = [record(i, num_cached_tokens=1000 if i % 2 else None) for i in range(50)]
    hits = summarise(run_of(records), CLOSED).hit_rates
    assert hits.document_share == pytest.approx(0.5)
    assert hits.verdict == "contaminated"


def test_counters_are_used_where_requests_tell_nothing() -> None:
    run = replace(
        random_run(num_cached_tokens=None), counters_after={"num_queried_tokens": 1000, "num_cached_tokens": 400}
    )
    summary = summarise(run, CLOSED.model_copy(update={"cache": "cold"}))
    assert summary.hit_rates.counter_share == 0.4
    assert summary.hit_rates.verdict == "contaminated"


@pytest.mark.parametrize(
    ("late_s", "ttft_s", "limit_s", "void"),
    [(0.004, 1.0, 0.005, False), (0.006, 1.0, 0.005, True), (0.002, 0.1, 0.001, True), (0.0005, 0.1, 0.001, False)],
)
def test_a_late_client_voids_an_open_run(late_s: float, ttft_s: float, limit_s: float, void: bool) -> None:
    load = OpenLoad(rate=1, num_requests=50)
    records = [record(i, intended_s=i - late_s, first_token_s=i - late_s + ttft_s, token_times_s=()) for i in range(50)]
    summary = summarise(run_of(records), load)
    assert summary.lateness.limit_s == pytest.approx(limit_s)
    assert summary.lateness.p99_at_least_s == pytest.approx(late_s)
    assert summary.lateness.exceeded == void
    assert any("late" in reason for reason in summary.void) == void


def test_a_closed_run_has_no_lateness() -> None:
    lateness = Lateness.of([record(0)])
    assert (lateness.distribution.n, lateness.p99_at_least_s, lateness.limit_s) == (0, None, None)
    assert not lateness.exceeded


def test_lateness_is_given_like_any_other_metric() -> None:
    records = [record(i, intended_s=i - 2**-10) for i in range(50)]
    shape = summarise(run_of(records), OpenLoad(rate=1, num_requests=50)).as_dict()
    assert set(shape["lateness"]) == {*shape["e2e"], "p99_at_least", "limit", "exceeded"}
    assert shape["lateness"]["p50"]["ci95"] == [2**-10, 2**-10]
    assert shape["lateness"]["p99"]["value"] is None
    assert shape["lateness"]["p99_at_least"] == 2**-10


def test_open_runs_are_also_timed_from_send() -> None:
    records = [record(i, intended_s=i - 2.0) for i in range(50)]
    metrics = summarise(run_of(records), OpenLoad(rate=1, num_requests=50)).metrics
    assert metrics["e2e"].mean_s == pytest.approx(3.0)
    assert metrics["e2e_from_send"].mean_s == pytest.approx(1.0)
    assert metrics["ttft"].mean_s == pytest.approx(2.4)
    assert metrics["ttft_from_send"].mean_s == pytest.approx(0.4)
    assert metrics["queue_time"].mean_s == pytest.approx(2.1)


def test_failures_are_in_the_tail_and_in_the_counts() -> None:
    records = list(random_run(400).records)
    for i in range(0, 400, 20):
        records[i] = replace(records[i], outcome=Outcome.ERROR, error="http 500", first_token_s=None, token_times_s=())
    summary = summarise(run_of(records), CLOSED)
    assert summary.metrics["e2e"].num_failed == 20
    assert summary.metrics["e2e"].percentiles["p99"].reason == "failed requests reach P99"
    assert summary.metrics["e2e"].percentiles["p50"].value is not None
    assert summary.counts["error: http 500"] == 20
    assert summary.counts["ok"] == 380


def test_a_run_without_answers_is_void() -> None:
    assert "no measured request was answered" in summarise(run_of([]), CLOSED).void
    lost = record(0, outcome=Outcome.ERROR, error="x", first_token_s=None, token_times_s=())
    assert "no measured request was answered: x 1" in summarise(run_of([lost]), CLOSED).void


@pytest.mark.parametrize(
    ("num_failed", "void", "noted"), [(3, False, False), (4, False, True), (200, False, True), (201, True, False)]
)
def test_failures_are_noted_first_and_void_a_run_when_most_requests_failed(
    num_failed: int, void: bool, noted: bool
) -> None:
    lost = {"outcome": Outcome.ERROR, "error": "connection refused", "first_token_s": None, "token_times_s": ()}
    records = list(random_run(400).records)
    records[-num_failed:] = [replace(one, **lost) for one in records[-num_failed:]]
    summary = summarise(run_of(records), CLOSED)
    said = f"of the measured requests failed: connection refused {num_failed}"
    assert any(said in reason for reason in summary.void) == void
    assert (said in summary.notes[0]) == noted


def test_timeouts_void_no_open_run_that_was_overloaded() -> None:
    late = {"outcome": Outcome.TIMEOUT, "error": "no end after 1 s", "first_token_s": None, "token_times_s": ()}
    run = run_of([record(i, intended_s=float(i), **(late if i % 3 else {})) for i in range(60)])
    assert any("67% of the measured requests failed" in reason for reason in summarise(run, CLOSED).void)
    overloaded = summarise(run, OpenLoad(rate=1, num_requests=60))
    assert overloaded.void == ()
    assert "67% of the measured requests failed: no end after 1 s 40" in overloaded.notes


def test_one_question_that_the_cache_knew_voids_no_short_run() -> None:
    for known, void in ((1, False), (2, False), (3, True)):
        records = [record(i, num_cached_tokens=1084 if i < known else 1000) for i in range(12)]
        reasons = summarise(run_of(records), CLOSED).void
        assert any("--repetition N asks others" in reason for reason in reasons) == void


def test_notes_on_short_and_bundled_answers() -> None:
    short = summarise(random_run(50, max_tokens=9), CLOSED).notes
    assert "50 of 50 answers are shorter than asked for" in short
    bundled = summarise(random_run(50, num_output_tokens=9, max_tokens=9), CLOSED).notes
    assert any("several tokens in a chunk" in note for note in bundled)


def test_gaps_are_in_order_of_time_over_all_requests() -> None:
    first = record(0, token_times_s=(0.0, 1.0, 4.0))
    second = record(1, token_times_s=(1.0, 3.0))
    assert gaps([first, second]).tolist() == [1.0, 2.0, 3.0]
    assert gaps([record(2, token_times_s=(1.0,))]).tolist() == []


def test_concurrency_counts_who_is_in_flight() -> None:
    records = [record(0, 2.5), record(1, 0.5), record(2, 1.0)]
    assert concurrency_at(np.array([0.0, 1.0, 2.0]), records).tolist() == [1, 2, 2]


def test_what_was_in_flight_and_what_was_cancelled_is_counted() -> None:
    left = [record(9 + i, 1.0, outcome=Outcome.CANCELLED, phase=Phase.COOLDOWN) for i in range(3)]
    summary = summarise(run_of([*(record(i, 1.5) for i in range(8)), *left]), CLOSED)
    assert summary.counts == {"sent": 11, "measured": 8, "cancelled": 3, "used": 8, "ok": 8}
    assert summary.in_flight.at_end == 3
    assert summary.in_flight.most == 2
    assert summary.in_flight.mean == pytest.approx(12 / 8.5)  # 8 requests of 1.5 s in 8.5 s; the others come after


def test_a_tokenizer_that_counts_otherwise_is_told() -> None:
    same, other = (random_run(50, num_prompt_tokens_sent=sent) for sent in (1100, 1000))
    assert prompt_drift(same.records) == 1.0
    assert summarise(same, CLOSED).prompt_drift == 1.0
    assert not any("tokenizers differ" in note for note in summarise(same, CLOSED).notes)
    assert any("1.100 prompt tokens for each" in note for note in summarise(other, CLOSED).notes)
    assert summarise(random_run(50), CLOSED).prompt_drift is None


def test_attribution_names_the_slowest() -> None:
    run = random_run(400)
    slowest = max(run.records, key=lambda r: r.end_s - r.send_s)
    shares = summarise(run, CLOSED).attribution
    assert shares["slowest"]["index"] == slowest.index
    assert shares["p99"]["e2e_s"] < shares["slowest"]["e2e_s"]
    assert sum(shares["mean"]["shares_s"].values()) == pytest.approx(shares["mean"]["e2e_s"])


@pytest.mark.parametrize(("n", "num_late", "void"), [(40, 1, False), (40, 3, True), (400, 3, False), (400, 5, True)])
def test_few_late_requests_void_a_run_only_where_they_show_a_late_p99(n: int, num_late: int, void: bool) -> None:
    late = [0.003 if i < num_late else 0.0 for i in range(n)]
    records = [record(i, intended_s=i - s, first_token_s=i - s + 0.1, token_times_s=()) for i, s in enumerate(late)]
    assert summarise(run_of(records), OpenLoad(rate=1, num_requests=n)).lateness.exceeded == void
