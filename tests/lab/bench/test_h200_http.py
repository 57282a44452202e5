"""`bench h200` over HTTP: which answers make a case's figure, and what is said where they make none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from p99lab.lab.bench.h200_http import Sample, sample
from p99lab.probe.records import Outcome, Phase, RequestRecord
from tests.lab.bench.test_h200 import TINY


def _answers(name: str, *times_s: tuple[float, ...]) -> list[RequestRecord]:
    """Whole answers, sent at 0, whose documents were in the cache where the case wants them there."""
    return [
        RequestRecord(
            index=index,
            phase=Phase.MEASURED,
            document=0,
            client=0,
            intended_s=None,
            send_s=0.0,
            first_token_s=times[0],
            end_s=times[-1],
            token_times_s=times,
            outcome=Outcome.OK,
            error=None,
            max_tokens=len(times),
            num_prompt_tokens=308,
            num_document_tokens=300,
            num_cached_tokens=0 if name in ("cold", "itl-short") else 300,
            num_output_tokens=len(times),
            prompt_digest="",
        )
        for index, times in enumerate(times_s)
    ]


STEADY = _answers("itl-64", (1.0, 1.1, 1.2), (1.0, 1.3, 1.6), (1.0, 1.2, 1.5))


def test_whole_answers_make_a_figure() -> None:
    found = sample(TINY, "itl-64", STEADY)
    assert found == Sample(pytest.approx(0.25), 6)
    assert sample(TINY, "ttft-1", _answers("ttft-1", (0.3, 0.4), (0.5, 0.6))) == Sample(pytest.approx(0.4), 2)


def test_tokens_that_came_together_are_told() -> None:
    """A chunk counts as one arrival; a median bears a few that hold more than one token."""
    bundled = [replace(STEADY[0], token_times_s=(1.0, 1.1)), *STEADY[1:]]
    found = sample(TINY, "itl-64", bundled)
    assert found == Sample(pytest.approx(0.3), 5, note="1 of 9 tokens had no time of their own")
    first = [replace(record, token_times_s=(0.3,)) for record in _answers("ttft-1", (0.3, 0.4))]
    assert sample(TINY.model_copy(update={"num_questions": 1}), "ttft-1", first).note is None


def test_of_cold_prompts_the_slowest_counts() -> None:
    found = sample(TINY.model_copy(update={"num_cold": 3}), "cold", _answers("cold", (9.9, 10), (10.3, 11), (9.8, 10)))
    assert found == Sample(10.3, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"outcome": Outcome.ERROR, "error": "http 500", "token_times_s": (1.0,)},
            "2 of 3 requests were answered (http 500)",
        ),
        ({"outcome": Outcome.CUT, "error": None}, "2 of 3 requests were answered (cut)"),
        ({"outcome": Outcome.TIMEOUT, "error": None}, "2 of 3 requests were answered (timeout)"),
        ({"num_output_tokens": 2}, "1 of 3 answers are not as long as asked for (2 tokens of 3)"),
        ({"num_output_tokens": 9, "max_tokens": 9}, "6 of 15 tokens had no time of their own"),
        ({"num_cached_tokens": 296}, "1 of 3 documents were not in the cache"),
        ({"num_cached_tokens": None}, "1 of 3 documents were not in the cache"),
    ],
)
def test_one_that_is_not_as_asked_for_leaves_a_reason(changes: dict[str, object], reason: str) -> None:
    found = sample(TINY, "itl-64", [STEADY[0], replace(STEADY[1], **changes), STEADY[2]])
    assert math.isnan(found.time_s)
    assert (found.n, found.failed) == (0, reason)


def test_answers_that_are_not_there_leave_a_reason() -> None:
    """Of 64 one alone is no sample."""
    assert sample(TINY, "itl-64", STEADY[:1]).failed == "1 of 3 requests were answered"
    assert sample(TINY, "itl-64", []).failed == "0 of 3 requests were answered"


def test_a_prompt_that_was_known_is_not_cold() -> None:
    cold = _answers("cold", (9.9, 10.0), (9.8, 9.9))
    assert sample(TINY, "cold", cold).failed is None
    known = [replace(cold[0], num_cached_tokens=64), cold[1]]
    assert sample(TINY, "cold", known).failed == "1 of 2 prompts were in the cache"
    silent = [replace(record, num_cached_tokens=None) for record in cold]
    assert sample(TINY, "cold", silent).failed is None
