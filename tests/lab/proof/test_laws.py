"""The known latencies: what the laws draw is distributed as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p99lab.lab.proof.cases import CASES
from p99lab.lab.proof.laws import (
    Either,
    Erlang,
    Later,
    Lockstep,
    Lognormal,
    Pareto,
    Stalling,
    StandsStillOnce,
    quantile,
)

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("distribution", "median"),
    [
        (Erlang(1.0, 1), math.log(2)),
        (Lognormal(0.3, 0.7), 0.3),
        (Pareto(0.05, 2.0), 0.05 * math.sqrt(2)),
        (Later(1.0, Lognormal(0.3, 0.7)), 1.3),
    ],
)
def test_medians_are_those_of_the_textbook(distribution: Erlang, median: float) -> None:
    assert quantile(distribution.cdf, 0.5) == pytest.approx(median, rel=1e-6)


@pytest.mark.parametrize("q", [0.5, 0.99])
@pytest.mark.parametrize(
    "distribution",
    [Erlang(0.1, 9), Lognormal(0.1, 0.6), Pareto(0.05, 2.0), Either(Lognormal(0.05, 0.2), Lognormal(0.5, 0.2), 0.1)],
)
def test_draws_fall_below_a_quantile_as_often_as_it_says(distribution: Erlang, q: float) -> None:
    rng, at = np.random.default_rng(1), quantile(distribution.cdf, q)
    share = np.mean([distribution.draw(rng) <= at for _ in range(20_000)])
    assert share == pytest.approx(q, abs=4 * math.sqrt(q * (1 - q) / 20_000))


def latencies(law: Stalling | StandsStillOnce | Lockstep, arrivals: np.ndarray) -> np.ndarray:
    return np.array([law.token_times_s(float(at), 1)[0] - at for at in arrivals])


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_a_server_with_stalls_is_seen_as_its_truth_says(q: float) -> None:
    law = Stalling(Lognormal(0.1, 0.3), np.random.default_rng(2), 2.0, 8.0)
    arrivals = np.cumsum(np.random.default_rng(3).exponential(0.5, 40_000))
    at = quantile(law.truth()["e2e"], q)
    assert np.mean(latencies(law, arrivals) <= at) == pytest.approx(q, abs=0.02 * min(1.0, 4 * (1 - q)))


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_a_server_with_one_stall_is_seen_as_its_truth_says(q: float) -> None:
    law = StandsStillOnce(Lognormal(0.1, 0.3), np.random.default_rng(4), 2.0, 10.0, (2.0, 20.0))
    arrivals = np.random.default_rng(5).uniform(2.0, 20.0, 20_000)
    at = quantile(law.truth()["e2e"], q)
    assert np.mean(latencies(law, arrivals) <= at) == pytest.approx(q, abs=4 * math.sqrt(q * (1 - q) / 20_000))


def test_whoever_meets_a_stall_rests_for_all_that_is_left_of_it() -> None:
    law = StandsStillOnce(Erlang(1.0, 400), np.random.default_rng(6), 2.0, 10.0, (0.0, 20.0))
    before, across, within, after = latencies(law, np.array([5.0, 9.5, 11.0, 13.0]))
    assert (before, across, within, after) == pytest.approx((1.0, 3.0, 2.0, 1.0), abs=0.2)


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_poisson_arrivals_see_a_lockstep_server_as_its_truth_says(q: float) -> None:
    law = Lockstep(Erlang(0.1, 8), np.random.default_rng(7), "open")
    arrivals = np.cumsum(np.random.default_rng(8).exponential(0.1, 20_000))
    at = quantile(law.truth()["e2e"], q)
    assert np.mean(latencies(law, arrivals) <= at) == pytest.approx(q, abs=6 * math.sqrt(q * (1 - q) / 20_000))


def test_a_batch_ends_for_all_that_came_during_the_one_before() -> None:
    law = Lockstep(Erlang(0.1, 8), np.random.default_rng(9), "closed")
    first = law.token_times_s(0.0, 1)
    assert law.token_times_s(1e-9, 1) == first
    later = law.token_times_s(first[0] + 1e-9, 1)  # they come back as it ends, by a clock of its own last digits
    assert later[0] == law.ends_s[2]
    assert law.token_times_s(first[0] + 1e-3, 1)[0] == law.ends_s[3]


def test_laws_of_one_seed_answer_alike() -> None:
    for case in CASES.values():
        one, other = case.law(5), case.law(5)
        assert one.token_times_s(0.5, 3) == other.token_times_s(0.5, 3)
