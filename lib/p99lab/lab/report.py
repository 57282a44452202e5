"""A run as one page: report.html, self-contained, readable offline, on a phone, in the dark and on paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import yaml

from p99lab.lab import units
from p99lab.lab.run_folder import RunFolder

if TYPE_CHECKING:
    from nbconvert.exporters import HTMLExporter

_TEMPLATES = Path(__file__).parent / "templates"


def render(folder: RunFolder) -> str:
    """The page of a run whose notebook and records are written: header, parameters, then the notebook, code folded."""
    notebook = nbformat.read(folder.path / "notebook.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    _leave_out_defaults(notebook)
    title, body = _split_title(notebook, folder.read_json("run.json")["notebook"])
    page = {"title": title, "styles": _styles(), **_header(folder)}
    html, _ = _exporter().from_notebook_node(body, resources={"page": page})
    return str(html)


def _header(folder: RunFolder) -> dict[str, Any]:
    parameters = yaml.safe_load((folder.path / "parameters.yaml").read_text())
    run = folder.read_json("run.json")
    return {
        "run": run,
        "resumed": _resumed(run.get("resumed_from")),
        "done": [] if run["exit_code"] == 0 else [unit.manifest.name for unit in units.finished(folder)[0]],
        "parameters": parameters or {},
        "untracked": folder.read_json("git.json")["untracked"],
        "has_patch": (folder.path / "patch.diff").exists(),
    }


def _resumed(earlier: dict[str, Any] | None) -> str:
    """What a resumed run took over, in a sentence; empty for others."""
    if earlier is None:
        return ""
    taken, own = (len(earlier[key]) for key in ("restored", "measured"))
    units_taken = f"{taken} work unit{'' if taken == 1 else 's'} taken over, {own} measured here; run.json names them."
    return f"Resumed from run {earlier['run_id']} ({earlier['status']}): {units_taken}"


def _leave_out_defaults(notebook: nbformat.NotebookNode) -> None:
    """Of the two cells that set parameters, the injected one says what ran."""
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    if any("injected-parameters" in own for own in tags):
        notebook.cells = [cell for cell, own in zip(notebook.cells, tags, strict=True) if "parameters" not in own]


def _split_title(notebook: nbformat.NotebookNode, fallback: str) -> tuple[str, nbformat.NotebookNode]:
    """The first heading becomes the page's title and leaves the body, so that it is not shown twice."""
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        return fallback, notebook
    first, _, rest = notebook.cells[0].source.lstrip().partition("\n")
    if not first.startswith("# "):
        return fallback, notebook
    notebook.cells[0].source = rest.strip()
    return first.removeprefix("# ").strip(), notebook


def _exporter() -> HTMLExporter:
    from nbconvert.exporters import HTMLExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    merged_streams: Any = CoalesceStreamsPreprocessor(enabled=True)  # type: ignore[no-untyped-call]
    return HTMLExporter(  # type: ignore[no-untyped-call]
        template_name="page",
        extra_template_basedirs=[str(_TEMPLATES)],
        preprocessors=[merged_streams],
        default_preprocessors=[],
        exclude_anchor_links=True,
        mathjax_url="",
        require_js_url="",
        jquery_url="",
    )


def _styles() -> str:
    """The page's CSS, with Pygments' colours for light and for dark."""
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    own = (_TEMPLATES / "page" / "page.css").read_text()
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n{own}"
