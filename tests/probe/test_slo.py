from __future__ import annotations

import pytest

from p99lab.errors import BadParameterError
from p99lab.probe.intervals import Figure
from p99lab.probe.slo import Goodput, Slo, against, goodput

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure(1.0, 0.9, 1.9, 400, 400), "meets"),
        (Figure(1.0, 0.9, 2.0, 400, 400), "meets"),
        (Figure(1.0, 0.9, 2.1, 400, 400), "cannot tell"),
        (Figure(2.5, 1.9, 3.0, 400, 400), "cannot tell"),
        (Figure(1.0, 0.9, None, 400, 100), "cannot tell"),
        (Figure(2.5, 2.1, 3.0, 400, 400), "misses"),
        (Figure(2.5, 2.1, None, 400, 100), "misses"),
        (Figure(None, None, None, 100, 100), "cannot tell"),
        (Figure(None, None, None, 400, 400, "failed requests reach P99"), "misses"),
    ],
)
def test_only_a_whole_interval_decides(figure: Figure, verdict: str) -> None:
    assert against(figure, 0.99, 2.0) == verdict


def test_goodput_ends_at_the_first_rate_that_breaks_the_slo() -> None:
    assert goodput([(4.0, "meets"), (1.0, "meets"), (8.0, "misses"), (16.0, "meets")]) == Goodput(4.0, 4.0, 8.0)
    assert goodput([(1.0, "meets"), (2.0, "saturated"), (3.0, "meets")]) == Goodput(1.0, 1.0, 2.0)
    assert goodput([(1.0, "misses")]) == Goodput(None, None, 1.0)
    assert goodput([]) == Goodput(None, None)


def test_a_rate_of_which_too_little_is_known_says_nothing_of_others() -> None:
    assert goodput([(1.0, "meets"), (2.0, "cannot tell"), (3.0, "meets"), (4.0, "misses")]) == Goodput(3.0, 3.0, 4.0)
    assert goodput([(1.0, "meets"), (2.0, "cannot tell"), (3.0, "misses")]) == Goodput(1.0, 2.0, 3.0)
    assert goodput([(1.0, "cannot tell")]) == Goodput(None, 1.0)


def test_a_void_rate_never_counts() -> None:
    assert goodput([(1.0, "meets"), (2.0, "void")]) == Goodput(1.0, 1.0)
    assert goodput([(1.0, "void"), (2.0, "meets")]) == Goodput(2.0, 2.0)


def test_an_slo_that_is_none() -> None:
    with pytest.raises(BadParameterError, match="metric"):
        Slo.parse({"limit_s": 1.0, "metric": "tpot"})
    assert str(Slo(limit_s=0.25, metric="ttft", quantile="p999")) == "P99.9 of ttft ≤ 250 ms"
