"""outputs/index.html: all runs on one static page, newest first, by notebook; self-contained, for a phone too.

Works on the base install.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from p99lab import project
from p99lab.lab import inspection, runs
from p99lab.lab.claims import Claim, load_claims
from p99lab.lab.figures import FIGURES, Figure, read_figures
from p99lab.lab.results import shown
from p99lab.lab.run_folder import UnwritableError, is_plain_name
from p99lab.lab.runs import Run

PAGE = "index.html"
NEWEST = 8  # runs of a notebook that are not folded away
KEY_FIGURES, SUMMARY_LINES = 6, 9
CHAPTER = "chapter"  # the first column of notebook 99's summary
_TEMPLATES = Path(__file__).parent / "templates"
_SMOKE = '<p class="soft">a smoke run: it shows that the notebook works, its figures are no results</p>'
_OPEN = ("running", "by hand", "no record")


def write(outputs: Path) -> Path:
    """Write the page of all runs below `outputs` anew, whole or not at all.

    Raises:
        UnwritableError: the disk refuses; what was there before stays.
    """
    target = outputs / PAGE
    draft = outputs / f".{PAGE}.{os.getpid()}"
    try:
        outputs.mkdir(parents=True, exist_ok=True)
        draft.write_text(render(outputs, runs.catalogue(outputs)), encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise UnwritableError(f"cannot write {target}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return target


def render(outputs: Path, found: Sequence[Run]) -> str:
    """The page. Links are relative to `outputs`."""
    claims = load_claims()
    groups: dict[str, list[Run]] = {}
    for run in found:
        groups.setdefault(run.notebook, []).append(run)
    body = "".join(_group(outputs, notebook, groups[notebook], claims) for notebook in sorted(groups))
    nav = "".join(f'<a href="#{quote(name)}">{escape(name)}</a>' for name in sorted(groups))
    styles = "".join((_TEMPLATES / name).read_text() for name in ("page/page.css", "index/index.css"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<title>p99lab: runs</title>\n'
        f"<style>\n{styles}</style>\n</head>\n<body>\n<main>\n<header>\n<h1>Runs</h1>\n"
        f'<p class="facts">{_counts(found)}</p>\n<nav>{nav}</nav>\n</header>\n'
        f"{body or '<p>No runs yet: <code>p99lab run 01</code> makes one.</p>'}\n</main>\n</body>\n</html>\n"
    )


def _counts(found: Sequence[Run]) -> str:
    counts = Counter(run.status for run in found)
    spans = [f"<span>{number} {escape(status)}</span>" for status, number in counts.most_common()]
    return f"<span><b>{len(found)} in all</b></span>{''.join(spans)}"


def _group(outputs: Path, notebook: str, group: Sequence[Run], claims: Iterable[Claim]) -> str:
    own = [claim for claim in claims if claim.notebook == notebook]
    items = [_item(outputs, run, own) for run in group]
    older = "".join(items[NEWEST:])
    folded = f"<details><summary>{len(items) - NEWEST} older</summary><ul class='runs'>{older}</ul></details>"
    question = f'<p class="question">{escape(title)}</p>' if (title := _question(notebook)) else ""
    return (
        f'<section id="{escape(notebook, quote=True)}">\n<h2>{escape(notebook)} <small>{len(group)}</small></h2>\n'
        f'{question}\n<ul class="runs">{"".join(items[:NEWEST])}</ul>{folded if older else ""}\n</section>\n'
    )


def _question(notebook: str) -> str:
    """The notebook's first heading, empty where it is not here."""
    if not is_plain_name(notebook):
        return ""
    try:
        cells = json.loads((project.notebooks_dir() / f"{notebook}.ipynb").read_bytes())["cells"]
        first = "".join(cells[0]["source"]).splitlines()[0]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return ""
    return first.removeprefix("# ").strip() if first.startswith("# ") else ""


def _item(outputs: Path, run: Run, claims: Sequence[Claim]) -> str:
    is_smoke = run.tier == "smoke"
    figures = {} if is_smoke else _figures(run)
    kind = "good" if run.status == "completed" else "open" if run.status in _OPEN else "bad"
    facts = _SMOKE if is_smoke else _facts(run, figures)
    parts = (_heading(outputs, run), _reason(run), facts, _chips(run, figures, claims))
    return f'<li class="{kind}">{"".join(parts)}</li>\n'


def _heading(outputs: Path, run: Run) -> str:
    report, text = run.path / inspection.REPORT, escape(_moment(run))
    link = f'<a href="{_href(outputs, report)}">{text}</a>' if report.is_file() else f"<b>{text}</b>"
    facts = [run.id, runs.took(run.seconds), run.hardware, run.revision, "published" if run.published else ""]
    return (
        f'<div class="line">{link}<span class="status">{escape(run.status)}</span><span>{escape(run.tier)}</span></div>'
        f'<div class="soft">{" · ".join(escape(fact) for fact in facts if fact)}</div>'
    )


def _moment(run: Run) -> str:
    return f"{run.started[:16].replace('T', ' ')} UTC" if run.started else run.id


def _href(outputs: Path, path: Path) -> str:
    return quote(path.relative_to(outputs).as_posix())


def _reason(run: Run) -> str:
    reason = str(run.record.get("reason") or "")
    return f'<p class="reason">{escape(reason)}</p>' if reason else ""


def _facts(run: Run, figures: dict[str, Figure]) -> str:
    """The run's first figures, or what its summary says where it has none."""
    rows = list(islice(_key_figures(figures), KEY_FIGURES)) or list(islice(_summary(run), SUMMARY_LINES))
    items = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)} <span>{escape(bounds)}</span></dd></div>"
        for name, value, bounds in rows
    )
    return f'<dl class="figures">{"".join(items)}</dl>' if rows else ""


def _key_figures(figures: dict[str, Figure]) -> Iterator[tuple[str, str, str]]:
    for figure in figures.values():
        if figure.value is not None:
            low, high = figure.ci95 or (figure.value, figure.value)
            bounds = f"[{shown(low)}, {shown(high)}]" if low != high else ""
            yield figure.metric, f"{shown(figure.value)} {figure.unit}", bounds


def _summary(run: Run) -> Iterator[tuple[str, str, str]]:
    """A summary in two columns, a name and a value, as notebook 00's is; of the ledger's counts a sum per state."""
    path = run.path / inspection.SUMMARY
    table: Any = _tolerant(lambda: pq.read_table(path)) if path.is_file() else None
    if table is None:
        return
    if table.column_names[:1] == [CHAPTER]:
        yield from ((name, f"{sum(table[name].to_pylist())} rows", "") for name in table.column_names[1:])
    elif table.num_columns == 2:
        yield from ((shown(name), shown(value), "") for name, value in zip(*table.to_pydict().values(), strict=True))


def _chips(run: Run, figures: dict[str, Figure], claims: Sequence[Claim]) -> str:
    """How many claims stand where by this run's figures; nothing of runs that the ledger does not count."""
    if not run.is_counted or not claims:
        return ""
    if reason := inspection.withdrawn(run):
        return f'<ul class="chips"><li class="withdrawn">verdicts withdrawn: {escape(reason)}</li></ul>'
    counts = Counter(judged.verdict or "no verdict" for judged in inspection.judge(run, figures, claims))
    items = (f"<li>{number} {escape(name)}</li>" for name, number in counts.most_common())
    return f'<ul class="chips">{"".join(items)}</ul>' if counts else ""


def _figures(run: Run) -> dict[str, Figure]:
    return _tolerant(lambda: read_figures(run.path / FIGURES)) or {}


def _tolerant(read: Any) -> Any:
    """What a file says, None where it cannot be read: one broken run must not cost the page."""
    try:
        return read()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None
