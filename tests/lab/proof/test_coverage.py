"""The probe's intervals against known servers, through its driver on a virtual clock: a small set of `make proof`'s."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p99lab.lab.proof import coverage
from p99lab.lab.proof.cases import CASES, ONE_STALL
from p99lab.lab.proof.coverage import Coverage
from p99lab.lab.proof.real_runs import holds
from p99lab.probe.intervals import Figure
from p99lab.probe.workload import parse_load

pytestmark = pytest.mark.light

RUNS = 25


def figure(low: float | None, high: float | None) -> Figure:
    return Figure(1.0, low, high, 400, 400)


@pytest.mark.parametrize("name", ["light", "heavy tail", "slow first chunk", "lockstep, closed"])
def test_intervals_hold_the_truth_of_known_servers(name: str) -> None:
    for found in coverage.measured(name, range(RUNS)).values():
        assert found.share >= 0.8  # of 95 %; below in one of 1000 sets
        assert found.open_above <= 0.3 * RUNS


def test_of_one_stall_only_a_lower_bound_is_stated() -> None:
    found = coverage.measured(ONE_STALL, range(10))["e2e", "p99"]
    assert found.open_above == 10
    assert found.too_high == 0


def test_a_stall_is_in_the_tail_of_an_open_load_and_hidden_by_a_closed_one() -> None:
    case = CASES[ONE_STALL]
    closed = parse_load({"kind": "closed", "concurrency": 4, "duration_s": 20.0, "cache": "mixed"})
    tails = {}
    for kind, load in (("open", case.load), ("closed", closed)):
        e2e = coverage.simulated(replace(case, load=load), 1).metrics["e2e"]
        assert e2e.max_s == pytest.approx(2.0, abs=0.2)
        tails[kind] = e2e.percentiles["p99"].value
    assert tails["open"] > 1.5
    assert tails["closed"] < 0.2


def test_runs_of_a_seed_are_alike() -> None:
    one, other = (coverage.simulated(CASES["light"], 3).metrics["e2e"] for _ in range(2))
    assert one == other
    assert not np.isclose(coverage.simulated(CASES["light"], 4).metrics["e2e"].mean_s, one.mean_s)


def test_coverage_counts_misses_by_their_side() -> None:
    found = Coverage.of([figure(0.9, 1.1), figure(1.05, 1.2), figure(0.8, 0.9), figure(0.5, None)], truth_s=1.0)
    assert (found.too_low, found.too_high, found.open_above, found.share) == (1, 1, 1, 0.5)


def test_a_real_interval_may_lie_above_the_truth_by_the_allowance() -> None:
    assert holds(figure(1.004, 1.1), 1.0)
    assert not holds(figure(1.006, 1.1), 1.0)
    assert not holds(figure(0.9, 0.99), 1.0)
    assert holds(figure(None, None), 1.0)
