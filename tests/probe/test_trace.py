from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p99lab.errors import BadParameterError
from p99lab.probe.documents import CHARS_PER_TOKEN, Passage
from p99lab.probe.records import Outcome, Phase
from p99lab.probe.stats import measured
from p99lab.probe.trace import Prompts, TraceRow, read_trace
from p99lab.probe.workload import (
    Query,
    TraceLoad,
    Workload,
    make_documents,
    needs_documents,
    parse_load,
    queries,
    with_end,
)

pytestmark = pytest.mark.light

RANDOM = Workload(num_documents=2, document_tokens=(50, 60), question_tokens=(8, 9), vocab_size=997)
TEXT = RANDOM.model_copy(update={"vocab_size": None})
# Two rows like those of the published traces: 12 blocks in common, the last one partial.
MOONCAKE = [
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [*range(46, 58), 2353, 2354]},
    {"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [*range(46, 58), 2366]},
]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def sent(path: Path, workload: Workload = RANDOM, tokenize: Any = None, first: int = 0, **changes: Any) -> list[Query]:
    load = TraceLoad(path=path, **changes)
    documents = make_documents(workload, tokenize) if needs_documents(load) else ()
    return list(queries(workload, documents, load, tokenize, first))


def in_common(one: Any, other: Any) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


def test_a_mooncake_trace_is_sent_as_recorded(tmp_path: Path) -> None:
    first, second = sent(written(tmp_path / "t.jsonl", MOONCAKE))
    assert (first.intended_s, second.intended_s) == (0.0, pytest.approx(3.053))
    assert [(q.prompt.num_tokens, q.max_tokens) for q in (first, second)] == [(6955, 52), (6472, 26)]
    assert in_common(first.prompt.token_ids, second.prompt.token_ids) == 12 * 512
    assert (first.num_document_tokens, second.num_document_tokens) == (0, 12 * 512)
    assert (first.document, second.document) == (46, 46)


traces = st.lists(
    st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(1, 16)), min_size=2, max_size=8
)


@given(rows=traces, seed=st.integers(0, 3))
def test_prompts_share_what_their_block_ids_share_and_no_more(rows: list[tuple[list[int], int]], seed: int) -> None:
    prompts = Prompts(seed, 16, None, vocab_size=101)
    made = [
        (ids, prompts.of(TraceRow(0.0, 16 * (len(ids) - 1) + last, 1, tuple(ids)), number).token_ids)
        for number, (ids, last) in enumerate(rows)
    ]
    for one, prompt in made:
        for other, compared in made:
            assert prompt is not None
            assert compared is not None
            expected = min(16 * in_common(one, other), len(prompt), len(compared))
            assert in_common(prompt, compared) == expected


def test_blocks_without_ids_are_a_rows_own(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 1300, "output_length": 1, "hash_ids": [7, 8]}] * 2
    first, second = sent(written(tmp_path / "t.jsonl", rows))
    assert in_common(first.prompt.token_ids, second.prompt.token_ids) == 1024
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 1}] * 2
    first, second = sent(written(tmp_path / "t.jsonl", rows))
    assert in_common(first.prompt.token_ids, second.prompt.token_ids) == 0
    assert first.document != second.document


def test_without_a_vocabulary_prompts_are_text_of_about_that_length(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", MOONCAKE)
    first, second = sent(path, TEXT)
    assert first.prompt.token_ids is None
    assert len(first.prompt.text) == pytest.approx(6955 * CHARS_PER_TOKEN, rel=0.01)
    assert in_common(first.prompt.text, second.prompt.text) == pytest.approx(12 * 512 * CHARS_PER_TOKEN, abs=2)
    assert [q.prompt.digest for q in sent(path, TEXT)] == [first.prompt.digest, second.prompt.digest]
    assert sent(path, TEXT.model_copy(update={"seed": 1}))[0].prompt.digest != first.prompt.digest


def test_with_a_tokenizer_they_are_exact(tmp_path: Path) -> None:
    def tokenize(text: str) -> list[int]:
        return [sum(map(ord, word)) for word in text.split(" ")]  # some words are very long

    first, second = sent(written(tmp_path / "t.jsonl", MOONCAKE), TEXT, tokenize)
    assert first.prompt.token_ids is not None
    assert (len(first.prompt.token_ids), second.prompt.num_tokens) == (6955, 6472)
    assert in_common(first.prompt.token_ids, second.prompt.token_ids) == 12 * 512


@pytest.mark.parametrize(
    "rows",
    [
        ["3.5", "3.0", "", "7"],
        ["time_s", "3.0", "3.5", "7"],
        [{"time_s": 3.0}, {"time_s": 3.5}, {"time_s": 7}],
        [{"timestamp": 3000}, {"timestamp": 7000}, {"timestamp": 3500, "chat_id": 9}],
    ],
)
def test_a_file_of_times_is_asked_about_documents(tmp_path: Path, rows: list[Any]) -> None:
    path = written(tmp_path / "times", rows)
    asked = sent(path)
    assert [q.intended_s for q in asked] == [0.0, 0.5, 4.0]
    assert needs_documents(TraceLoad(path=path))
    assert {q.document for q in asked} <= {0, 1}


def test_a_csv_may_have_lengths(tmp_path: Path) -> None:
    rows = ["output_length, time_s, input_length", "4, 0.5, 100", "5, 1.5, 200"]
    asked = sent(written(tmp_path / "t.csv", rows))
    assert [(q.intended_s, q.prompt.num_tokens, q.max_tokens) for q in asked] == [(0.0, 100, 4), (1.0, 200, 5)]
    assert [q.max_tokens for q in sent(written(tmp_path / "t.csv", ["0, 100, 4"]))] == [4]


def test_time_is_scaled_and_begins_where_it_is_told_to(tmp_path: Path) -> None:
    path = written(tmp_path / "t", ["10", "12", "14", "18"])
    assert [q.intended_s for q in sent(path, speedup=2.0)] == [0.0, 1.0, 2.0, 4.0]
    assert [(q.index, q.intended_s) for q in sent(path, start_s=3.0, speedup=2.0)] == [(0, 0.5), (1, 2.5)]
    assert [(q.index, q.intended_s) for q in sent(path, first=2)] == [(2, 0.0), (3, 4.0)]
    with pytest.raises(BadParameterError, match="has ended before start_s = 9"):
        sent(path, start_s=9.0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["1", "2", "three"], ":3: 'three' is neither a JSON object nor time_s"),
        (["1", "2,5"], ":2: 2 fields where there should be 1"),
        (["1", "nan"], ":2: nan is no time"),
        (["time_s,color", "1,red"], ":1: unknown column 'color'"),
        (["input_length", "5"], ":2: needs a timestamp"),
        (['{"timestamp": 1}', "", '{"timestamp": 1'], ":3: no JSON object"),
        ([{"input_length": 5}], ":1: needs a timestamp (ms) or a time_s"),
        ([{"timestamp": 5, "time_s": 5}], ":1: needs a timestamp (ms) or a time_s"),
        ([{"timestamp": "noon"}], ":1: 'noon' is no time"),
        ([{"timestamp": True}], ":1: True is no time"),
        ([{"timestamp": 1, "input_length": 0}], ":1: input_length must be an integer from 1 up, not 0"),
        ([{"timestamp": 1, "input_length": 9, "output_length": 1.5}], ":1: output_length must be"),
        ([{"timestamp": 1, "input_length": 512, "hash_ids": [1, 2]}], ":1: 2 hash_ids for 512 tokens"),
        ([{"timestamp": 1, "input_length": 5, "hash_ids": ["a"]}], ":1: hash_ids must be"),
        ([{"timestamp": 1, "input_length": 5, "hash_ids": [-1]}], ":1: hash_ids must be"),
        ([{"timestamp": 1, "hash_ids": [1]}], ":1: hash_ids without an input_length"),
        ([{"timestamp": 1, "input_length": 5}, {"timestamp": 1}], ":2: either every line has an input_length"),
        (["[1, 2]"], ":1: "),
        ([""], " has no requests"),
    ],
)
def test_a_bad_line_is_one_error_with_its_number(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(BadParameterError) as caught:
        read_trace(written(tmp_path / "t.jsonl", rows))
    assert f"{tmp_path / 't.jsonl'}{message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(BadParameterError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    with pytest.raises(BadParameterError, match="bytes:1: "):
        read_trace(tmp_path / "bytes")


# --- driven ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "num_warmup"), [(100, 10), (77, 8), (10, 1), (2, 1), (1, 0)])
def test_a_run_of_a_trace_ends_with_the_trace(
    fake_target: Any, drive_virtually: Any, tmp_path: Path, num_rows: int, num_warmup: int
) -> None:
    load = TraceLoad(path=written(tmp_path / "t", [str(i) for i in range(num_rows)]))
    assert load.cache == "mixed"
    target, run = drive_virtually(lambda: fake_target(plan=lambda query: (3.0, 0.1)), load)
    assert target.num_sent == len(run.records) == num_rows
    assert [r.phase for r in run.records].count(Phase.WARMUP) == num_warmup
    assert len(measured(run.records)) == num_rows - num_warmup
    assert {r.outcome for r in run.records} == {Outcome.OK}
    assert [r.send_s for r in run.records] == pytest.approx(range(num_rows))


def test_limits_end_a_trace_earlier(fake_target: Any, drive_virtually: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "t", [str(i) for i in range(100)])
    load = TraceLoad(path=path, num_requests=10, warmup_share=0.5)
    target, run = drive_virtually(lambda: fake_target(plan=lambda query: (3.0, 0.1)), load)
    assert [r.index for r in measured(run.records)] == list(range(5, 15))
    assert run.num_cancelled == target.num_sent - 15 - sum(
        r.phase is Phase.COOLDOWN and r.outcome is Outcome.OK for r in run.records
    )
    _, run = drive_virtually(fake_target, TraceLoad(path=path, duration_s=20.0, warmup_share=0.25))
    assert [r.index for r in measured(run.records)] == list(range(5, 20))


def test_a_trace_with_lengths_is_driven_without_documents(
    fake_target: Any, drive_virtually: Any, tmp_path: Path
) -> None:
    _, run = drive_virtually(fake_target, TraceLoad(path=written(tmp_path / "t", MOONCAKE), speedup=10.0))
    assert [r.num_prompt_tokens for r in run.records] == [6955, 6472]
    assert [r.num_output_tokens for r in run.records] == [52, 26]


def test_a_trace_is_a_load_in_plain_values(tmp_path: Path) -> None:
    load = TraceLoad(path=written(tmp_path / "t", ["1", "2"]), speedup=3.0)
    assert parse_load(load.model_dump(mode="json")) == load
    assert with_end(load).num_requests == 1
    assert with_end(with_end(load)) == with_end(load)
    with pytest.raises(BadParameterError, match="path: Field required"):
        parse_load({"kind": "trace"})
    with pytest.raises(BadParameterError, match="'closed', 'open' or 'trace', got 'ajar'"):
        parse_load({"kind": "ajar"})


def test_joining_passages_keeps_ids_only_where_all_have_them() -> None:
    known, unknown = Passage.of("ab", [1, 2]), Passage.of("cd", None)
    both = Passage.joined([known, known])
    assert both.token_ids is not None
    assert both.token_ids.tolist() == [1, 2, 1, 2]
    assert Passage.joined([known, unknown]).token_ids is None
    assert Passage.joined([known, unknown]).text == "abcd"
