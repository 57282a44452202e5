from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from p99lab.errors import BadParameterError
from p99lab.probe.documents import Passage, cut, question, stdlib_documents, synthetic_documents
from p99lab.probe.workload import ClosedLoad, OpenLoad, Workload, arrivals, digest, make_documents, parse_load, queries

pytestmark = pytest.mark.light


def words(text: str) -> list[int]:
    """A tokenizer of the usual kind: words with their leading space, runs of space, single marks."""
    return [hash_of(piece) for piece in re.findall(r" ?\w{1,4}|\s+|[^\w\s]", text)]


def hash_of(piece: str) -> int:
    return sum(ord(c) * 131**i for i, c in enumerate(piece)) % 30011


def take(count: int, **options: object) -> list:
    return list(islice(stdlib_documents(7, (300, 500), **options), count))


def test_documents_are_the_same_each_time_and_however_many_are_taken() -> None:
    few, many = take(3, tokenize=words), take(8, tokenize=words)
    assert [d.passage.digest for d in few] == [d.passage.digest for d in many[:3]]
    assert len({d.passage.digest for d in many}) == 8


@pytest.mark.parametrize("tokenize", [None, words])
def test_lengths_lie_within_the_range(tokenize: object) -> None:
    assert all(300 <= d.passage.num_tokens <= 500 for d in take(20, tokenize=tokenize))


def test_documents_share_neither_files_nor_first_tokens() -> None:
    documents = take(30, tokenize=words)
    files = [file for d in documents for file in d.source.split(" + ")]
    assert len(files) == len(set(files))
    assert len({int(d.passage.token_ids[0]) for d in documents}) == 30
    assert len({d.passage.text[:4] for d in take(30)}) == 30


def test_token_ids_are_those_of_the_text() -> None:
    for document in take(10, tokenize=words):
        ids, again = document.passage.token_ids.tolist(), words(document.passage.text)
        assert ids[: len(again) - 4] == again[:-4]  # a cut inside a token may differ at the very end


def test_a_document_longer_than_any_file_is_made_of_several() -> None:
    document = next(stdlib_documents(0, (150_000, 150_000)))
    assert document.passage.num_tokens == 150_000
    assert " + " in document.source


def test_used_up_sources_are_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def first_function(): pass\n" * 100)
    documents = stdlib_documents(0, (200, 200), root=tmp_path)
    next(documents)
    with pytest.raises(BadParameterError, match="used up at document 1"):
        next(documents)


@pytest.mark.parametrize("num_tokens", [1, 7, 100, 611])
def test_cut_is_exact_in_tokens(num_tokens: int) -> None:
    text = take(1)[0].passage.text * 3
    assert cut(text, num_tokens, words).num_tokens == num_tokens


def test_cut_gives_all_of_a_text_that_is_too_short() -> None:
    assert cut("a few words", 100, words).text == "a few words"


@pytest.mark.parametrize("span", [(48, 80), (64, 64)])
@pytest.mark.parametrize("tokenize", [None, words])
def test_questions_ask_about_a_name_of_the_document(span: tuple[int, int], tokenize: object) -> None:
    document = take(1, tokenize=tokenize)[0]
    for seed in range(20):
        asked = question(document, np.random.default_rng(seed), span, tokenize)
        assert span[0] <= asked.num_tokens <= span[1]
        assert re.match(r"\n\nQuestion \d{5}: In this code, what does `", asked.text)
        assert asked.text.endswith("\nAnswer:")
        assert asked.text.split("`")[1] in document.passage.text


def test_questions_of_one_document_do_not_begin_alike_though_its_names_are_few() -> None:
    document = take(1)[0]
    numbers = [question(document, np.random.default_rng(seed), (48, 80)).text.split()[1] for seed in range(400)]
    assert len(set(numbers)) > 390


def test_a_question_too_short_for_its_frame_is_a_user_error() -> None:
    with pytest.raises(BadParameterError, match="no room"):
        question(take(1)[0], np.random.default_rng(0), (1, 1))


def test_synthetic_documents_differ_from_their_first_id_on() -> None:
    documents = list(islice(synthetic_documents(0, (50, 60), 101), 101))
    assert len({int(d.passage.token_ids[0]) for d in documents}) == 101
    assert all(50 <= d.passage.num_tokens <= 60 and d.passage.token_ids.max() < 101 for d in documents)


def test_a_digest_depends_on_text_and_on_ids() -> None:
    assert Passage.of("a", [1]).digest != Passage.of("a", [2]).digest != Passage.of("b", [2]).digest
    joined = Passage.of("ab", [1, 2]).then(Passage.of("c", [3]))
    assert (joined.text, joined.token_ids.tolist(), joined.num_tokens) == ("abc", [1, 2, 3], 3)


# --- workload -------------------------------------------------------------------------------------------------------

CLOSED = ClosedLoad(num_requests=10)
WORKLOAD = Workload(document_tokens=(100, 200))


def test_every_arm_sees_the_same_queries() -> None:
    documents = make_documents(WORKLOAD, words)
    closed = list(islice(queries(WORKLOAD, documents, CLOSED, words), 50))
    opened = list(islice(queries(WORKLOAD, documents, OpenLoad(rate=3, num_requests=1), words), 50))
    assert [q.prompt.digest for q in closed] == [q.prompt.digest for q in opened]
    assert [q.index for q in closed] == list(range(50))
    assert {q.document for q in closed} == {0, 1, 2, 3}
    assert closed[0].intended_s is None


def test_another_seed_is_another_workload() -> None:
    other = Workload(document_tokens=(100, 200), seed=1)
    assert digest(WORKLOAD, make_documents(WORKLOAD)) == digest(WORKLOAD, make_documents(WORKLOAD))
    assert digest(WORKLOAD, make_documents(WORKLOAD)) != digest(other, make_documents(other))


@pytest.mark.parametrize("tokenize", [None, words])
def test_fresh_documents_begin_with_a_line_of_their_own(tokenize: object) -> None:
    workload = Workload(document_tokens=(100, 200), fresh_documents=True)
    documents = make_documents(workload, tokenize)
    sent = list(islice(queries(workload, documents, CLOSED, tokenize), 30))
    assert len({q.prompt.text[:12] for q in sent}) == 30
    assert all(q.num_document_tokens == documents[q.document].passage.num_tokens for q in sent)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 2.0), ("constant", 0.0)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(kind: str, cv: float) -> None:
    load = OpenLoad(rate=5, arrivals=kind, cv=2.0, num_requests=1)
    gaps = np.diff(list(islice(arrivals(load, 0), 20_000)))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1)


def test_warmup_is_at_least_one_round_of_clients() -> None:
    assert ClosedLoad(num_requests=100, concurrency=64).num_warmup_requests(64) == 64
    assert ClosedLoad(num_requests=1000, concurrency=4).num_warmup_requests(4) == 100
    assert ClosedLoad(num_requests=1, warmup_share=0).num_warmup_requests(4) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "closed"}, "duration_s or num_requests"),
        ({"kind": "open", "num_requests": 3}, "rate"),
        ({"kind": "closed", "num_requests": 3, "concurency": 2}, "did you mean 'concurrency'"),
        ({"kind": "ajar", "num_requests": 3}, "kind"),
    ],
)
def test_a_wrong_load_is_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(BadParameterError, match=message) as caught:
        parse_load(values)
    assert "\n" not in str(caught.value)


def test_a_wrong_range_is_one_line() -> None:
    with pytest.raises(BadParameterError, match=r"document_tokens: .*20-10 is not a range"):
        Workload.parse({"document_tokens": (20, 10)})
