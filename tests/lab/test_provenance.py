from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from p99lab.lab import provenance

pytestmark = pytest.mark.light


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", "-C", root, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return tmp_path


def test_a_clean_checkout(checkout: Path) -> None:
    state = provenance.git_state(checkout)
    assert state.revision is not None
    assert len(state.revision) == 40
    assert state.as_record() == {"revision": state.revision, "dirty": False, "untracked": []}


def test_changes_are_a_patch_and_new_files_a_name(checkout: Path) -> None:
    (checkout / "a.py").write_text("a = 2\n")
    (checkout / "b.py").write_text("secret = 3\n")
    state = provenance.git_state(checkout)
    assert state.is_dirty
    assert state.untracked == ("b.py",)
    assert "+a = 2" in state.patch
    assert "secret" not in state.patch


def test_what_was_measured_is_no_change_of_the_code(checkout: Path) -> None:
    run = checkout / "outputs" / "published" / "01" / "run.json"
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    assert not provenance.git_state(checkout).is_dirty
    (checkout / "outputs.py").write_text("")
    assert provenance.git_state(checkout).untracked == ("outputs.py",)


def test_changed_results_are_no_change_of_the_code(checkout: Path) -> None:
    results = checkout / "outputs" / "README.md"
    results.parent.mkdir(exist_ok=True)
    results.write_text("one")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "two")
    results.write_text("two")
    assert not provenance.git_state(checkout).is_dirty


def test_the_patch_restores_the_change(checkout: Path) -> None:
    (checkout / "a.py").write_text("a = 2\n")
    patch = provenance.git_state(checkout).patch
    git(checkout, "checkout", "a.py")
    subprocess.run(["git", "-C", checkout, "apply"], input=patch.encode(), check=True)
    assert (checkout / "a.py").read_text() == "a = 2\n"


def test_no_repository_and_no_git_are_both_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance.git_state(tmp_path) == provenance.GitState(None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(tmp_path) == provenance.GitState(None)


def test_an_enclosing_repository_is_a_strangers(checkout: Path) -> None:
    inside = checkout / "venv" / "site-packages"
    inside.mkdir(parents=True)
    assert provenance.git_state(inside) == provenance.GitState(None)


def test_a_checkout_may_be_reached_by_another_name(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("elsewhere") / "link"
    link.symlink_to(checkout)
    assert provenance.git_state(link).revision == provenance.git_state(checkout).revision


def test_a_repository_without_a_commit_has_no_revision(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert provenance.git_state(tmp_path) == provenance.GitState(None)


def test_environment_knows_the_packages_and_no_paths() -> None:
    record = provenance.environment()
    assert record["packages"]["numpy"]
    assert "/" not in "".join(record["packages"].values())
