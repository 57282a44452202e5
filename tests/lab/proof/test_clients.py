"""The proof part `clients`, short of its servers: lm-eval's task, and the verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from p99lab.lab.proof import clients, harness
from p99lab.lab.proof.peer_tools import Measured

pytestmark = pytest.mark.light

ITEM = harness.Item((-0.5, -9.0, -8.0, -7.5), (True, False, False, False), 1.0)


def test_every_question_has_four_choices_the_right_one_where_it_says(tmp_path: Path) -> None:
    harness.write_task(tmp_path / "task")
    lines = (tmp_path / "task" / "questions.jsonl").read_text().splitlines()
    questions = [json.loads(line) for line in lines]
    assert len(questions) == 40
    for question in questions:
        assert len(set(question["choices"])) == harness.NUM_CHOICES
    first = questions[5]
    assert first["question"] == "The capital of Egypt is"
    assert first["choices"][first["answer"]] == "Cairo"
    assert {question["answer"] for question in questions} == set(range(harness.NUM_CHOICES))


def verdicts(ours: Sequence[harness.Item], theirs: Sequence[harness.Item]) -> list[bool]:
    return [check.passed for check in clients.compared(ours, theirs)]


def test_what_agrees_passes_and_each_kind_of_disagreement_fails_its_own_check() -> None:
    near = replace(ITEM, loglikelihoods=(-0.5005, -9.0, -8.0, -7.5))
    far = replace(ITEM, loglikelihoods=(-0.5, -9.0, -8.002, -7.5))
    wrong, not_greedy = replace(ITEM, acc=0.0), replace(ITEM, greedy=(False,) * 4)
    assert verdicts([ITEM, near], [ITEM, ITEM]) == [True, True, True]
    assert verdicts([ITEM, far], [ITEM, ITEM]) == [True, False, True]
    assert verdicts([ITEM, not_greedy], [ITEM, ITEM]) == [True, True, False]
    assert verdicts([wrong, ITEM], [ITEM, wrong]) == [False, True, True]  # the same mean is not the same


MEASURED = Measured(
    {"ttft": np.full(20, 0.1), "e2e": np.full(20, 0.8), "tpot": np.full(20, 0.1)}, {}, (8,) * 20, num_failed=0
)


@pytest.mark.parametrize(
    ("measured", "passed"),
    [
        (MEASURED, [True, True, True]),
        (replace(MEASURED, num_failed=1), [False, True, True]),
        (replace(MEASURED, values={**MEASURED.values, "e2e": np.full(19, 0.8)}), [False, True, False]),
        (replace(MEASURED, num_output_tokens=(8,) * 19 + (7,)), [True, False, True]),
        (replace(MEASURED, values={"e2e": np.full(20, 0.8)}), [True, True, False]),  # nothing was streamed
        (replace(MEASURED, values={**MEASURED.values, "ttft": np.full(20, 0.8)}), [True, True, False]),  # all at once
        (Measured({}, {}, (), num_failed=20), [False, False, False]),
    ],
)
def test_each_thing_that_guidellm_may_miss_fails_its_own_check(measured: Measured, passed: list[bool]) -> None:
    assert [check.passed for check in clients.answered(measured)] == passed
