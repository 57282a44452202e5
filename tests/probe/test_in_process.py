"""The probe against a real engine, a tiny random model: in this process, and in one of its own behind HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.probe.command import probe
from p99lab.probe.options import ProbeOptions
from p99lab.probe.records import Outcome, Phase
from p99lab.probe.stats import attribution, e2e, measured
from tests.engine.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", path)
    return path


def options(directory: Path, **changes: object) -> ProbeOptions:
    few = {
        "target": "in-process",
        "model": str(directory),
        "document_tokens": (100, 200),
        "question_tokens": (8, 12),
        "answer_tokens": (4, 6),
    }
    return ProbeOptions.parse({**few, "random_tokens": 120, "requests": 40, **changes})


@pytest.mark.parametrize(
    "changes", [{"cache": "primed"}, {"cache": "cold"}, {"load": "open", "rate": 100.0, "arrivals": "gamma"}]
)
def test_an_engine_in_process_is_measured_whole(directory: Path, changes: dict[str, object]) -> None:
    result = probe(options(directory, **changes))
    counted = measured(result.run.records)
    assert result.transport == "in-process"
    assert len(counted) == 40
    assert all(record.outcome is Outcome.OK for record in counted)
    assert all(record.num_output_tokens == record.max_tokens == len(record.token_times_s) for record in counted)
    assert result.summary.hit_rates.verdict == "as declared"
    assert {record.first_byte_s for record in counted} == {None}
    assert result.summary.metrics["queue_time"].n == result.summary.metrics["e2e"].n
    for record in counted:
        shares = attribution(record)
        assert shares is not None
        assert sum(shares.values()) == pytest.approx(e2e(record))
        assert min(shares.values()) >= -1e-6


def test_behind_http_it_still_says_where_the_time_went(directory: Path) -> None:
    result = probe(options(directory, target="serve"))
    counted = measured(result.run.records)
    assert result.transport == "http"
    assert {(r.outcome, r.num_output_tokens - r.max_tokens) for r in counted} == {(Outcome.OK, 0)}
    assert {r.num_prompt_tokens - (r.num_prompt_tokens_sent or 0) for r in counted} == {0}
    assert result.summary.hit_rates.verdict == "as declared"
    for record in counted:
        shares = attribution(record)
        assert shares is not None
        assert sum(shares.values()) == pytest.approx(e2e(record))
        assert min(shares.values()) >= -1e-6  # the server's account fits into what its client saw


def test_the_engines_counters_agree_with_the_records(directory: Path) -> None:
    run = probe(options(directory, concurrency=1)).run
    whole = [record for record in run.records if record.phase is not Phase.COOLDOWN]
    queried = run.counters_after["num_queried_tokens"] - run.counters_before["num_queried_tokens"]
    cached = run.counters_after["num_cached_tokens"] - run.counters_before["num_cached_tokens"]
    assert queried == sum(record.num_prompt_tokens for record in whole)
    assert cached == sum(record.num_cached_tokens or 0 for record in whole)
