from __future__ import annotations

from pathlib import Path

import pytest

from p99lab.observe import ceilings

TINY = ceilings.Sizes(buffer_mib=1, matmul_size=32, disk_mib=1, launches=10, repeats=2)
HOST = {"memory read", "memory copy", "matmul fp32", "disk write", "disk read"}


def test_what_can_be_measured_is_and_the_rest_says_why(tmp_path: Path) -> None:
    rows = {row.name: row for row in ceilings.ceilings(TINY, tmp_path)}
    for name in HOST:
        best, middle = rows[name].best, rows[name].median
        assert best is not None
        assert middle is not None
        assert best >= middle > 0
    for row in rows.values():
        assert (row.best is None) == ("not testable here" in row.how)
    assert not list(tmp_path.iterdir())


def test_without_torch_numpy_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings.importlib.util, "find_spec", lambda _: None)
    rows = {row.name: row for row in ceilings.ceilings(TINY, tmp_path)}
    assert rows.keys() >= HOST
    assert "numpy" in rows["memory copy"].how
    assert "numpy" in rows["matmul fp32"].how
    assert rows["launch graph"].best is None


@pytest.mark.gpu
def test_a_device_is_measured_whole(tmp_path: Path) -> None:
    rows = ceilings.ceilings(TINY, tmp_path)
    assert all(row.best is not None and row.best > 0 for row in rows)
