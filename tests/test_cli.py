"""What a user who mistypes sees, and what a shell gets back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer

from p99lab.cli import guarded
from p99lab.commands.console import needs_extra
from p99lab.errors import ModelError, P99labError

pytestmark = pytest.mark.light


def p99lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "p99lab.cli", *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "01", "--teir", "smoke"], "p99lab: No such option: --teir; did you mean '--tier'?\n"),
        (["clams"], "p99lab: No such command 'clams'. Did you mean 'claims'?\n"),
        (["frobnicate"], "p99lab: No such command 'frobnicate'.\n"),
        (["models", "ftch"], "p99lab: No such command 'ftch'. Did you mean 'fetch'?\n"),
    ],
)
def test_a_mistyped_command_line_is_one_line(arguments: list[str], says: str) -> None:
    done = p99lab(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)


def test_a_value_of_the_wrong_kind_is_one_line_that_names_the_flag() -> None:
    done = p99lab("probe", "--concurrency", "four")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--concurrency" in done.stderr


def test_help_is_whole_and_no_error() -> None:
    done = p99lab("run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--tier" in done.stdout


def test_no_arguments_show_the_help() -> None:
    done = p99lab()
    assert "claims" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def app_of(command: Callable[[], Any]) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(command)
    return app


def exit_code_of(command: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["p99lab"])
    with pytest.raises(SystemExit) as caught:
        guarded(app_of(command))
    return caught.value.code or 0


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (typer.Exit(10), 10),
        (typer.Exit(0), 0),
        (typer.Abort(), 130),
        (KeyboardInterrupt(), 130),
        (P99labError("so it is"), 1),
        (ModelError("no such model"), 4),
    ],
)
def test_exit_codes(
    error: BaseException, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(raising(error), monkeypatch) == exit_code
    expected = f"p99lab: {error}\n" if isinstance(error, P99labError) else ""
    assert capsys.readouterr().err == expected


def test_a_command_that_returns_is_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code_of(lambda: None, monkeypatch) == 0


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["p99lab"])
    with pytest.raises(ZeroDivisionError):
        guarded(app_of(raising(ZeroDivisionError())))


def test_a_missing_extra_is_named_with_a_command_that_works_in_a_checkout() -> None:
    with pytest.raises(P99labError, match=r"it needs torch: .*pip install '\.\[engine\]'"), needs_extra("engine", "it"):
        raise ModuleNotFoundError(name="torch")
