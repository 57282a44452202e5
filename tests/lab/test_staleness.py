"""What has changed since a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from p99lab import project
from p99lab.lab import sources
from p99lab.lab.claims import load_claims, rule_digest
from p99lab.lab.parameters import find, load, tier_digest
from p99lab.lab.staleness import Present, changes, is_stale, rule_changed

pytestmark = pytest.mark.light

NOTEBOOK = "01_headline_p99"


@pytest.fixture(scope="module")
def present() -> Present:
    return Present()


@pytest.fixture
def fresh(tmp_path: Path, present: Present) -> tuple[Path, dict[str, Any]]:
    """The folder and run.json of a run made now, here."""
    digests = sources.digests(project.notebooks_dir() / f"{NOTEBOOK}.ipynb")
    parameters = load(find(NOTEBOOK), "laptop").model_dump(mode="json")
    (tmp_path / "sources.json").write_bytes(orjson.dumps(digests))
    (tmp_path / "parameters.yaml").write_text(yaml.safe_dump(parameters))
    return tmp_path, {"notebook": NOTEBOOK, "tier": "laptop", "hardware": present.hardware}


def test_nothing_has_changed_right_after(fresh: tuple[Path, dict[str, Any]], present: Present) -> None:
    assert changes(*fresh, present) == []


def test_changed_modules_are_named(fresh: tuple[Path, dict[str, Any]], present: Present) -> None:
    folder, record = fresh
    digests = orjson.loads((folder / "sources.json").read_bytes())
    digests |= dict.fromkeys(
        ["p99lab.engine.scheduler", "p99lab.caches.pages", f"{NOTEBOOK}.ipynb", "p99lab.gone"], "x"
    )
    (folder / "sources.json").write_bytes(orjson.dumps(digests))
    assert changes(folder, record, present) == [f"code: {NOTEBOOK}.ipynb, caches.pages, engine.scheduler and 1 more"]


def test_other_parameters_and_another_machine(fresh: tuple[Path, dict[str, Any]], present: Present) -> None:
    folder, record = fresh
    parameters = yaml.safe_load((folder / "parameters.yaml").read_text())
    (folder / "parameters.yaml").write_text(yaml.safe_dump({**parameters, "seed": 7}))
    found = changes(folder, {**record, "hardware": "a node"}, present)
    assert found == ["parameters: seed", "hardware: measured on another machine"]
    assert is_stale(found)


def test_parameters_given_by_hand_are_a_remark(fresh: tuple[Path, dict[str, Any]], present: Present) -> None:
    folder, record = fresh
    parameters = yaml.safe_load((folder / "parameters.yaml").read_text())
    (folder / "parameters.yaml").write_text(yaml.safe_dump({**parameters, "seed": 7}))
    found = changes(folder, {**record, "tier_digest": tier_digest(NOTEBOOK, "laptop")}, present)
    assert found == ["by hand: seed"]
    assert not is_stale(found)


def test_a_run_that_recorded_nothing_says_so(tmp_path: Path, present: Present) -> None:
    record = {"notebook": "09_gone", "tier": "laptop", "hardware": present.hardware}
    assert changes(tmp_path, record, present) == ["the run did not record its code"]
    (tmp_path / "sources.json").write_text("{}")
    assert changes(tmp_path, record, present) == ["its notebook is gone"]


def test_a_claims_rule() -> None:
    first, second = load_claims()[:2]
    assert rule_changed(first, {}) == "the run did not record its rules"
    assert rule_changed(first, {"rules": {second.id: rule_digest(second)}}) == "the claim is newer than the run"
    assert rule_changed(first, {"rules": {first.id: rule_digest(second)}}) == "the rule has changed"
    assert rule_changed(first, {"rules": {first.id: rule_digest(first)}}) is None


def test_prose_of_a_claim_is_no_rule() -> None:
    claim = load_claims()[0]
    assert rule_digest(claim.model_copy(update={"says": "otherwise", "note": "new"})) == rule_digest(claim)
    assert rule_digest(claim.model_copy(update={"stated": 5.0})) != rule_digest(claim)
