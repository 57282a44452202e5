"""Environments of other projects' tools: made once, whole, and anew where what is asked for changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.lab.proof import environments
from p99lab.lab.proof.environments import PeerEnvironmentError, environment

pytestmark = pytest.mark.light


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; folders of environments are made."""
    ran: list[list[str]] = []

    def run(command: list[str]) -> None:
        ran.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()

    monkeypatch.setenv("P99LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(environments, "_run", run)
    return ran


def test_an_environment_is_made_once_and_anew_for_other_requirements(tmp_path: Path, commands: list[list[str]]) -> None:
    for requirements in (("a==1",), ("a==1",), ("a==2",)):
        assert environment("tool", requirements) == tmp_path / "peers" / "tool" / "bin" / "python"
    folder = str(tmp_path / "peers" / "tool")
    assert [command[-1] for command in commands] == [folder, "a==1", folder, "a==2"]


def test_it_is_made_anew_for_other_constraints_which_pip_is_given(tmp_path: Path, commands: list[list[str]]) -> None:
    limits = tmp_path / "peers" / "tool" / "constraints.txt"
    for constraints in ((), ("b==1", "c==2"), ("b==1", "c==2"), ("b==2",)):
        environment("tool", ("a==1",), constraints)
        assert limits.read_text().split() == list(constraints)
    installs = [command for command in commands if "pip" in command]
    assert len(installs) == 3
    for command in installs:
        assert command[command.index("--constraint") + 1] == str(limits)
        assert command[-1] == "a==1"


def test_it_is_made_anew_by_another_python(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    environment("tool", ("a==1",))
    monkeypatch.setattr(environments.platform, "python_version", lambda: "3.99.0")
    environment("tool", ("a==1",))
    assert len(commands) == 4


def test_an_environment_that_failed_is_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P99LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(environments.sys, "executable", "/bin/false")
    for _ in range(2):
        with pytest.raises(PeerEnvironmentError, match=r"-m venv .* has failed: no reason given"):
            environment("tool", ("a==1",))
