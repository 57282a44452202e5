"""Policies order requests; no two keys are equal."""

from __future__ import annotations

import numpy as np
import pytest

from p99lab.engine.policy import POLICIES, deadline, fcfs, priority
from p99lab.engine.request import Request, SamplingParams

pytestmark = pytest.mark.light


def request(number: int, arrival_s: float, urgency: int = 0, deadline_s: float | None = None) -> Request:
    return Request.create(
        number, np.ones(1, np.int32), SamplingParams(), arrival_s, 4, priority=urgency, deadline_s=deadline_s
    )


REQUESTS = [request(0, 5.0, 1, None), request(1, 5.0, 0, 30.0), request(2, 4.0, 1, 20.0), request(3, 9.0, 0, None)]


@pytest.mark.parametrize(
    ("policy", "order"), [(fcfs, [2, 0, 1, 3]), (priority, [1, 3, 2, 0]), (deadline, [2, 1, 0, 3])]
)
def test_order(policy: object, order: list[int]) -> None:
    assert [r.number for r in sorted(REQUESTS, key=lambda r: policy(r, 10.0))] == order


@pytest.mark.parametrize("policy", POLICIES.values())
def test_keys_are_unique(policy: object) -> None:
    assert len({policy(r, 0.0) for r in REQUESTS}) == len(REQUESTS)
