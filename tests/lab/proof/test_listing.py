from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.lab.proof import listing

pytestmark = pytest.mark.light


def test_the_part_finds_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "NUM_RUNS", 12)
    monkeypatch.setattr(listing, "REPEATS", 1)
    found = list(listing.checks(tmp_path))
    timed = [check for check in found if check.expected.startswith("median under")]
    assert len(timed) == 2
    assert [check for check in found if check not in timed and not check.passed] == []


def test_a_limit_that_is_not_kept_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LIMIT_S", 0.0)
    assert not listing._timed("anything", lambda: None).passed
