"""Prompts as JSON: the same bytes as without the short cut."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.probe.documents import Passage
from p99lab.probe.prompt_json import PromptJson
from p99lab.probe.workload import Query

pytestmark = pytest.mark.light


def query(ids: list[int], num_document_tokens: int, document: int = 0) -> Query:
    return Query(0, document, Passage.of("", ids), num_document_tokens, max_tokens=1, ignore_eos=True)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), st.integers(0, 7))))
def test_it_is_the_array_whatever_was_asked_before(prompts: list[tuple[list[int], int]]) -> None:
    encoded = PromptJson()
    for ids, place in prompts:  # all about document 0, whose tokens are others each time
        assert orjson.loads(encoded.of(query(ids, place), np.array(ids, np.int32))) == ids


def test_more_documents_than_it_keeps() -> None:
    encoded = PromptJson()
    for document in range(40):
        ids = [document, 1, 2]
        assert orjson.loads(encoded.of(query(ids, 2, document), np.array(ids, np.int32))) == ids
