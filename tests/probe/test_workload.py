from __future__ import annotations

from itertools import islice, takewhile
from typing import Any

import numpy as np
import pytest

from p99lab.errors import BadParameterError
from p99lab.probe.workload import OpenLoad, Workload, arrivals, cold_queries, make_documents, parse_load, queries

pytestmark = pytest.mark.light

SMALL = Workload(num_documents=3, document_tokens=(50, 60), question_tokens=(8, 9), vocab_size=997)


@pytest.mark.parametrize(("rate", "rate_end"), [(20.0, 180.0), (180.0, 20.0), (100.0, 100.0)])
def test_a_ramp_has_the_rate_of_its_moment(rate: float, rate_end: float) -> None:
    load = OpenLoad(arrivals="ramp", rate=rate, rate_end=rate_end, duration_s=100.0)
    times = np.array(list(takewhile(lambda at: at < 150.0, arrivals(load, 0))))
    assert (np.diff(times) >= 0).all()
    counts = np.histogram(times, bins=15, range=(0.0, 150.0))[0]
    middles = np.minimum(np.arange(5.0, 150.0, 10.0), 100.0) / 100
    middles[10:] = 1.0
    expected = 10.0 * (rate + (rate_end - rate) * middles)
    assert np.abs(counts - expected) == pytest.approx(np.zeros(15), abs=4.5 * np.sqrt(expected.max()))
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi-square, 15 degrees of freedom: 1 in 1 000
    assert list(islice(arrivals(load, 0), 50)) == list(times[:50])
    assert list(islice(arrivals(load, 1), 50)) != list(times[:50])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrivals": "ramp"}, "a ramp needs rate_end and duration_s"),
        ({"arrivals": "ramp", "rate_end": 5, "duration_s": None, "num_requests": 9}, "a ramp needs"),
        ({"rate_end": 5}, "rate_end is for a ramp, not for poisson arrivals"),
        ({"arrivals": "ramp", "rate_end": 0}, "rate_end: "),
        ({"duration_s": None}, "a load needs duration_s or num_requests"),
        ({"idle_timeout_s": 0}, "idle_timeout_s: "),
    ],
)
def test_what_does_not_fit_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameterError, match=message) as caught:
        parse_load({"kind": "open", "rate": 2, "duration_s": 10, **values})
    assert "\n" not in str(caught.value)


def test_a_ramp_survives_plain_values() -> None:
    load = OpenLoad(arrivals="ramp", rate=1, rate_end=9, duration_s=10)
    assert parse_load(load.model_dump(mode="json")) == load


def test_a_stretch_of_the_queries_asks_the_same_but_arrives_from_the_start() -> None:
    documents, load = make_documents(SMALL), OpenLoad(rate=10, num_requests=5)
    whole = list(islice(queries(SMALL, documents, load), 30))
    stretch = list(islice(queries(SMALL, documents, load, first=20), 10))
    assert [(q.index, q.prompt.digest) for q in stretch] == [(q.index, q.prompt.digest) for q in whole[20:]]
    assert [q.intended_s for q in stretch] == [q.intended_s for q in whole[:10]]


# --- churn ----------------------------------------------------------------------------------------------------------


def test_cold_documents_arrive_at_their_times_among_the_others() -> None:
    workload = Workload(num_documents=2, document_tokens=(50, 60), question_tokens=(4, 6), vocab_size=100, seed=5)
    documents = make_documents(workload)
    quiet = OpenLoad(rate=10.0, duration_s=10.0)
    churning = quiet.model_copy(update={"cold_every_s": 1.5})
    usual = list(islice(queries(workload, documents, quiet, first=7), 60))
    mixed = list(islice(queries(workload, documents, churning, first=7), 60))
    times = [query.intended_s for query in mixed]
    assert times == sorted(times)  # type: ignore[type-var]
    cold = [query for query in mixed if query.document >= 2]
    assert [query.intended_s for query in cold] == [1.5 * (place + 1) for place in range(len(cold))]
    assert [query.document for query in cold] == [2 + place for place in range(len(cold))]
    others = [query for query in mixed if query.document < 2]
    assert [(q.index, q.prompt.digest, q.intended_s) for q in others] == [
        (q.index, q.prompt.digest, q.intended_s) for q in usual[: len(others)]
    ]


def test_a_cold_document_shares_no_first_token_with_any_other() -> None:
    workload = Workload(num_documents=2, document_tokens=(50, 50), question_tokens=(4, 4), vocab_size=40_000, seed=1)
    documents = make_documents(workload)
    cold = list(islice(cold_queries(workload, documents, 2.0), 20))
    firsts = [int(query.prompt.token_ids[0]) for query in cold if query.prompt.token_ids is not None]
    known = {int(document.passage.token_ids[0]) for document in documents if document.passage.token_ids is not None}
    assert len({*firsts} | known) == 22
    assert {query.num_document_tokens for query in cold} == {50}
    others = islice(cold_queries(workload, documents, 2.0, first=1_000_000), 20)
    assert not {query.prompt.digest for query in cold} & {query.prompt.digest for query in others}
