from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from p99lab.probe.records import Outcome, RequestRecord
from p99lab.probe.throughput import answered_rate, lag, offered_rate
from tests.probe.test_stats import record

pytestmark = pytest.mark.light


def records_of(
    starts: np.ndarray, service: Callable[[int], float], outcome: Outcome = Outcome.OK
) -> list[RequestRecord]:
    return [
        record(i, intended_s=float(s), send_s=float(s), end_s=float(s) + service(i), outcome=outcome)
        for i, s in enumerate(starts)
    ]


def test_a_target_that_keeps_up() -> None:
    starts = np.cumsum(np.random.default_rng(0).exponential(0.25, 1000))
    records = records_of(starts, lambda i: 1.0)
    begin, end = 20.0, 220.0
    answered, behind = answered_rate(records, begin, end), lag(records, begin, end)
    assert offered_rate(records, begin, end) == pytest.approx(4.0, rel=0.1)
    assert None not in (answered.low, answered.high, behind.low, behind.high)
    assert answered.low < 4.0 < answered.high
    assert behind.low < 0.0 < behind.high


def test_a_target_that_falls_behind() -> None:
    starts = np.arange(1000) / 5.0
    behind = lag(records_of(starts, lambda i: i / 4.0 - i / 5.0 + 1.0), 20.0, 180.0)  # 4 a second of 5
    assert behind.value == pytest.approx(1.0, rel=0.05)
    assert behind.low is not None
    assert behind.low > 0.5


def test_refused_requests_are_not_answered() -> None:
    refused = records_of(np.arange(400) / 4.0, lambda i: 0.1, Outcome.ERROR)
    assert answered_rate(refused, 10.0, 90.0).value == 0.0
    assert lag(refused, 10.0, 90.0).value == pytest.approx(4.0)


def test_lockstep_is_counted_without_its_first_answers() -> None:
    waves = [record(i, send_s=float(i // 4), end_s=float(i // 4 + 1)) for i in range(200)]
    assert answered_rate(waves, 5.0, 45.0).value == pytest.approx(4.0)


def test_no_time_is_no_rate() -> None:
    figure = answered_rate([record(0)], 1.0, 1.0)
    assert (figure.value, figure.reason) == (None, "no time to count in")
    assert offered_rate([record(0)], 1.0, 1.0) is None
