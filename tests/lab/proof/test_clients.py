"""The proof part `clients`, short of its servers: the task, the verdicts, and the environment of lm-eval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p99lab.lab.proof import clients, environments, harness
from p99lab.lab.proof.environments import PeerEnvironmentError, environment

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


def test_an_environment_is_made_once_and_anew_for_other_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()

    monkeypatch.setenv("P99LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(environments, "_run", run)
    for requirements in (("a==1",), ("a==1",), ("a==2",)):
        assert environment("tool", requirements) == tmp_path / "peers" / "tool" / "bin" / "python"
    folder = str(tmp_path / "peers" / "tool")
    assert [command[-1] for command in commands] == [folder, "a==1", folder, "a==2"]


def test_an_environment_that_failed_is_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P99LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(environments.sys, "executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(PeerEnvironmentError, match=r"-m venv .* has failed: no reason given"):
            environment("tool", ("a==1",))
