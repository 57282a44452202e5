"""The interval of a ratio of two figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.probe.intervals import Figure
from p99lab.probe.ratios import bounds, ratio

pytestmark = pytest.mark.light

positive = st.floats(1e-3, 1e3)
width = st.floats(1.0, 3.0)


def figure(value: float | None, low: float | None = None, high: float | None = None) -> Figure:
    return Figure(value, low, high, 400, 400)


def test_the_interval_is_that_of_zou_and_donner() -> None:
    low, high = bounds(figure(1.0, 0.9, 1.2), figure(2.0, 1.8, 2.5))
    assert low == pytest.approx(0.5 * math.exp(-math.sqrt(math.log(1 / 0.9) ** 2 + math.log(2.5 / 2.0) ** 2)))
    assert high == pytest.approx(0.5 * math.exp(math.sqrt(math.log(1.2 / 1.0) ** 2 + math.log(2.0 / 1.8) ** 2)))


def test_it_lies_within_the_worst_pairing() -> None:
    low, high = bounds(figure(3.0, 2.5, 4.0), figure(1.0, 0.8, 1.5))
    assert low is not None
    assert high is not None
    assert 2.5 / 1.5 < low < 3.0 < high < 4.0 / 0.8


@given(positive, positive, width, width)
def test_swapping_the_two_inverts_the_interval(a: float, b: float, up: float, down: float) -> None:
    one, other = figure(a, a / down, a * up), figure(b, b / up, b * down)
    low, high = bounds(other, one)
    inverse_low, inverse_high = bounds(one, other)
    assert low is not None
    assert high is not None
    assert inverse_low == pytest.approx(1 / high)
    assert inverse_high == pytest.approx(1 / low)
    assert low <= b / a * (1 + 1e-9)
    assert high >= b / a * (1 - 1e-9)


@given(positive, width, positive)
def test_the_unit_does_not_matter(value: float, spread: float, scale: float) -> None:
    def pair(by: float) -> tuple[Figure, Figure]:
        return figure(by * value, by * value / spread, by * value * spread), figure(2 * by * value, by, 9000 * by)

    assert bounds(*pair(scale)) == pytest.approx(bounds(*pair(1.0)))


def test_a_missing_bound_leaves_its_side_open() -> None:
    low, high = bounds(figure(2.0, 1.8, None), figure(1.0, 0.9, 1.2))
    assert low is not None
    assert high is None
    low, high = bounds(figure(2.0, 1.8, 2.2), figure(1.0, None, 1.2))
    assert low is not None
    assert high is None


@pytest.mark.parametrize("value", [None, 0.0, -1.0])
def test_without_a_positive_value_there_is_no_ratio(value: float | None) -> None:
    assert ratio(figure(value), figure(1.0, 0.9, 1.1)) is None
    assert bounds(figure(1.0, 0.9, 1.1), figure(value)) == (None, None)
