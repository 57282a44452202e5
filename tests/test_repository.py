"""What a visitor of the repository relies on: links that lead somewhere, and a clone that stays small."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.light

ROOT = Path(__file__).resolve().parents[1]
MAX_PUBLISHED_BYTES = 10 * 2**20


def linked(markdown: str) -> list[str]:
    """Targets of Markdown links and images, and of HTML's, outside of code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", markdown, flags=re.DOTALL)
    return re.findall(r"\]\(\s*<?([^)\s>]+)", prose) + re.findall(r"(?:src|href|srcset)=\"([^\"\s]+)", prose)


def relative(target: str) -> str | None:
    """The path in the repository that a link names; None for another site and for a place on the same page."""
    path = target.partition("#")[0]
    return path if path and not re.match(r"[a-z][a-z0-9+.-]*:|//", path) else None


def num_published_bytes(root: Path) -> int:
    """Of all files below outputs/published/ that git holds."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "outputs/published"], capture_output=True, check=True)
    return sum((root / name).stat().st_size for name in filter(None, listed.stdout.decode().split("\0")))


def test_links_are_found() -> None:
    text = '![a](docs/a.png) [b](b.md#there "B") `[c](c)` [d](https://d) [e](#e)\n```\n[f](f)\n```\n<img src="g.png">'
    assert [relative(target) for target in linked(text)] == ["docs/a.png", "b.md", None, None, "g.png"]


def test_every_relative_link_of_the_readme_leads_somewhere() -> None:
    paths = filter(None, map(relative, linked((ROOT / "README.md").read_text())))
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_published_files_are_counted(tmp_path: Path) -> None:
    subprocess.run(["git", "-C", tmp_path, "init", "--quiet"], check=True)
    for name, size in (("outputs/published/a b.html", 3), ("outputs/published/01/c.png", 4), ("outputs/d", 9)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    (tmp_path / "outputs/published/not-added").write_bytes(b"x" * 100)
    assert num_published_bytes(tmp_path) == 7


def test_published_runs_keep_a_clone_small() -> None:
    assert num_published_bytes(ROOT) <= MAX_PUBLISHED_BYTES
