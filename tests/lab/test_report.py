from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from p99lab.lab import report
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.units import Units, basis

RUN = {
    "run_id": "20261129-120000-000-abcd",
    "notebook": "05_tiny",
    "tier": "smoke",
    "status": "completed",
    "exit_code": 0,
    "reason": "",
    "started": "2026-11-29T12:00:00.000+00:00",
    "seconds": 3.21,
    "revision": "0123456789abcdef" * 2,
    "dirty": True,
    "hardware": "AMD <EPYC>",
    "code": "c0de",
    "parameters_digest": "d19e57",
    "p99lab": "0.1.0",
}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==\n"
OUTPUTS = [
    new_output("stream", name="stdout", text="\x1b[31mred & <b>\x1b[0m"),
    new_output("display_data", {"text/html": "<table><tr><td>x</td></tr></table>", "text/plain": "plain"}),
    new_output("display_data", {"image/png": PNG, "text/plain": "p"}, metadata={"image/png": {"alt": 'a "line"'}}),
    new_output("display_data", {"application/javascript": "document.title = 1"}),
    new_output("error", ename="E", evalue="v", traceback=["\x1b[31mTraceback\x1b[0m <x>"]),
    new_output("error", ename="KeyboardInterrupt", evalue="", traceback=["\x1b[31mTraceback\x1b[0m at"]),
]


class Page(HTMLParser):
    """Collects tags with their attributes, and checks that they nest."""

    VOID = frozenset({"meta", "img", "br", "hr", "link", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def render(tmp_path: Path) -> Callable[..., str]:
    def render(
        run: dict[str, Any] | None = None, status: str = "completed", injected: bool = True, units: Sequence[str] = ()
    ) -> str:
        folder = RunFolder.create(tmp_path)
        cells = [
            new_markdown_cell(
                "# Is it <fast>?\n\nA question with a [link](https://example.org/paper).\n\n|a|b|\n|-|-|\n|1|2|"
            ),
            new_code_cell("word = 'the default'", metadata={"tags": ["parameters"]}),
            *([new_code_cell("word = 'what ran'", metadata={"tags": ["injected-parameters"]})] if injected else []),
            new_code_cell("print(1 < 2)", outputs=OUTPUTS, metadata={"papermill": {"status": status}}),
        ]
        metadata = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
        folder.write("notebook.ipynb", nbformat.writes(new_notebook(cells=cells, metadata=metadata)))
        folder.write_json("run.json", RUN | (run or {}))
        folder.write("parameters.yaml", "word: <a>\nsizes: [1, 2]\n")
        folder.write_json("git.json", {"revision": None, "dirty": True, "untracked": ["x"]})
        for name in units:
            Units(folder, basis(folder.read_json("run.json"))).finish(name, {}, 1.0)
        return report.render(folder)

    return render


def test_nothing_is_loaded_from_elsewhere(render: Callable[..., str]) -> None:
    page = Page(render())
    assert not page.open
    assert not page.all("script")
    assert not page.all("link")
    assert not page.all("iframe")
    sources = [attributes.get("src") for _, attributes in page.tags if "src" in attributes]
    assert sources
    assert all(source and source.startswith("data:") for source in sources)
    styles = re.findall(r"<style>(.*?)</style>", render(), re.DOTALL)
    assert "@import" not in "".join(styles)
    assert "url(" not in "".join(styles)


def test_the_header_says_what_ran_where_and_when(render: Callable[..., str]) -> None:
    html = render()
    for text in ("Is it &lt;fast&gt;?", RUN["run_id"], "smoke", "AMD &lt;EPYC&gt;", "2026-11-29 12:00 UTC", "3.2 s"):
        assert str(text) in html
    assert "0123456789ab + changes" in html
    assert html.count("<h1") == 1
    assert "&lt;a&gt;</td>" in html  # the parameter's value


def test_code_is_folded_and_of_the_parameters_what_ran_is_shown(render: Callable[..., str]) -> None:
    assert "the default" in render(injected=False)
    html = render()
    assert "what ran" in html
    assert "the default" not in html
    assert html.count('<details class="source">') == 2
    assert not any("open" in attributes for attributes in Page(html).all("details"))


def test_wide_things_scroll_inside_their_own_box(render: Callable[..., str]) -> None:
    html = render()
    assert '<div class="scroll" tabindex="0"><table>' in html
    assert re.search(r"\btable \{[^}]*overflow-x: auto", html)
    assert re.search(r"\bimg \{[^}]*max-width: 100%", html)
    assert re.search(r"\bpre[^{]*\{[^}]*overflow-x: auto", html)
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in Page(html).all("meta")


def test_outputs_are_escaped_and_coloured(render: Callable[..., str]) -> None:
    html = render()
    assert "red &amp; &lt;b&gt;" in html
    assert "\x1b" not in html
    assert [image["alt"] for image in Page(html).all("img")] == ['a "line"']
    assert "document.title" not in html
    assert 'class="error"' in html


def test_a_run_that_ended_badly_says_so_first(render: Callable[..., str]) -> None:
    failed = {"status": "kernel died", "exit_code": 30, "reason": "the kernel was killed by SIGKILL in <cell 3>"}
    html = render(failed, status="not run")
    assert "(kernel died, exit code 30)" in html
    assert "SIGKILL in &lt;cell 3&gt;" in html
    assert html.index("SIGKILL") < html.index("A question with")
    assert '<p class="not-run-note">not run</p>' in html


def test_a_good_run_carries_no_warning(render: Callable[..., str]) -> None:
    assert 'class="failed"' not in render()
    assert 'class="note"' not in render({"tier": "h200"})


def test_a_smoke_run_is_said_to_prove_nothing(render: Callable[..., str]) -> None:
    assert "Its figures are no results" in render()


def test_a_resumed_run_says_what_it_took_over(render: Callable[..., str]) -> None:
    earlier = {"run_id": "20261128-1", "status": "timed out", "restored": ["a", "b"], "damaged": [], "measured": ["c"]}
    html = render({"resumed_from": earlier})
    assert "Resumed from run 20261128-1 (timed out): 2 work units taken over, 1 measured here" in html


def test_a_run_that_was_stopped_says_what_is_done_and_how_to_go_on(render: Callable[..., str]) -> None:
    html = render({"status": "timed out", "exit_code": 20, "reason": "too long"}, units=("closed.stock.1",))
    assert "1 work unit done: closed.stock.1." in html
    assert "<code>p99lab run --resume 20261129-120000-000-abcd</code>" in html
    assert html.index("where it was stopped</summary>") < html.index("Traceback</span> at")
    assert "--resume" not in render({"status": "failed", "exit_code": 10, "reason": "an error"})
    assert "No work units done" in render({"status": "pre-empted", "exit_code": 40, "reason": "SIGTERM"})
