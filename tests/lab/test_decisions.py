"""Effects and the decision page that is read from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.lab.decisions import Decision, decisions
from p99lab.lab.effects import EFFECTS, Effect, read_effects, write_effects
from p99lab.lab.run_folder import RunFolder

pytestmark = pytest.mark.light


def effect(ratio: float = 2.0, low: float | None = 1.5, high: float | None = 2.5, measure: str = "groups") -> Effect:
    return Effect(measure, "chunked", "closed, 4 clients", "E2E P99", ratio, low, high, 400, {"documents": 2})


def make_run(outputs: Path, started: str, *effects: Effect, **changes: str) -> RunFolder:
    folder = RunFolder(outputs / "09_example" / started)
    record = {
        "notebook": "09_example",
        "tier": "laptop",
        "status": "completed",
        "started": started,
        "hardware": "laptop",
    }
    folder.write_json("run.json", {**record, **changes})
    write_effects(folder, effects)
    folder.seal()
    return folder


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.1, 3.0, "helps"),
        (0.9, 3.0, "no effect shown"),
        (1.0, 3.0, "no effect shown"),
        (0.5, 0.9, "hurts"),
        (None, 0.9, "hurts"),
        (1.1, None, "helps"),
        (None, None, "no effect shown"),
    ],
)
def test_the_interval_decides(low: float | None, high: float | None, verdict: str) -> None:
    assert effect(1.0, low, high).verdict == verdict


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_is_positive_and_finite(ratio: float) -> None:
    with pytest.raises(ValueError, match="no ratio"):
        effect(ratio)


def test_effects_are_kept_exactly(tmp_path: Path) -> None:
    several = [effect(), effect(0.7, None, None, "tiers")]
    write_effects(RunFolder(tmp_path), several)
    assert read_effects(tmp_path / EFFECTS) == several
    assert read_effects(tmp_path / "nothing.parquet") == []


def test_the_latest_sound_run_speaks_and_what_nobody_tried_is_named(tmp_path: Path) -> None:
    make_run(tmp_path, "1", effect(3.0, 2.5, 3.5))
    make_run(tmp_path, "2", effect(0.5, 0.4, 0.6))
    make_run(tmp_path, "3", effect(9.0, 8.0, 9.5), status="kernel died")
    make_run(tmp_path, "4", effect(9.0, 8.0, 9.5), tier="smoke")
    tampered = make_run(tmp_path, "5", effect(9.0, 8.0, 9.5)).path / EFFECTS
    tampered.chmod(0o644)
    tampered.write_bytes(b"")
    make_run(tmp_path, "0", effect(1.2, 0.9, 1.5), hardware="node")
    laptop, node, untried = decisions(tmp_path, ["groups", "tiers"])
    assert (laptop.run, laptop.verdict, laptop.hardware) == ("2", "hurts", "laptop")
    assert laptop.size == "E2E P99 2.00 times longer (ratio 0.50 [0.40, 0.60])"
    assert laptop.under == "closed, 4 clients; documents 2"
    assert laptop.report == tmp_path / "09_example" / "2" / "report.html"
    assert (node.run, node.verdict) == ("0", "no effect shown")
    assert untried == Decision("tiers")
    assert (untried.verdict, untried.size, untried.under) == ("not measured", "", "")
