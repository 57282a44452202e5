"""Publishing a run: a small copy of it that git can hold, sealed anew, with the original's checksums as evidence.

Copied byte for byte: the records, and those metrics that are small. Rewritten: the page, its pictures made small. Left
out: the notebook (the page shows it), the pictures' files, large metrics. So the ledger reads the copy as it reads the
run, and `sha256sum` says by the original's checksums which files are the run's own.
"""

from __future__ import annotations

import base64
import io
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from p99lab import project
from p99lab.errors import P99labError
from p99lab.lab import inspection, secrets, staleness
from p99lab.lab.run_folder import CHECKSUMS, RunFolder, is_plain_name
from p99lab.lab.runs import PUBLISHED, Run

BUDGET_BYTES = 10 * 2**20  # of everything published: a clone stays small
MAX_REPORT_BYTES = 3 * 2**19
MAX_METRIC_BYTES = 64 * 2**10  # requests of a long run are beyond it; the rest is within
MAX_PATCH_BYTES = 256 * 2**10
PICTURE_WIDTH = 1000  # pixels: 1.5 for each of the page's
PICTURE_COLOURS = 64
ORIGIN_CHECKSUMS = "ORIGIN_SHA256SUMS"
RECORDS = ("run.json", "parameters.yaml", "hardware.json", "environment.json", "git.json", "sources.json")
ALWAYS = ("metrics/figures.parquet", "metrics/summary.parquet", "metrics/percentiles.parquet")
_EMBEDDED = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")
_HOME = re.compile(
    r"(?<![\w.-])/(?:home|Users)/[^/\s\"'<>]+|(?<![\w.-])/root/[^\s\"'<>]*|[A-Za-z]:\\+Users\\+[^\\\s\"'<>]+"
)
_TOO_COMMON = 4  # characters: a host's name as short as that is found in any text


class NotPublishableError(P99labError):
    """A run that must not, or need not, be published; one line that says why."""


@dataclass(frozen=True, slots=True)
class Published:
    """Where the copy is, its size, and what was left out of it for being large."""

    path: Path
    num_bytes: int
    left_out: tuple[str, ...]


def publish(outputs: Path, run: Run, allow_smoke: bool = False, budget_bytes: int = BUDGET_BYTES) -> Published:
    """Copy a run to `outputs/published/<notebook>/<run_id>/`, whole or not at all.

    Raises:
        NotPublishableError: the run is not completed, not as it was sealed (whatever file it is), a smoke run,
            published already, too large for the budget, names a path for its notebook, or holds a secret or the name of
            a host or of somebody's folder.
    """
    _refuse(run, allow_smoke)
    target = outputs / PUBLISHED / run.notebook / run.id
    if target.exists():
        raise NotPublishableError(f"run {run.id} is published already: {target}")
    draft = target.with_name(f".{run.id}-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        left_out = _copy(RunFolder(run.path), RunFolder(draft))
        num_bytes = _within(budget_bytes, outputs / PUBLISHED, draft)
        if found := list(private(draft)):
            raise NotPublishableError(f"run {run.id} is not for others: {'; '.join(found)}")
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Published(target, num_bytes, tuple(left_out))


def remarks(run: Run) -> Iterator[str]:
    """What a reader of the published run should know and what is no reason to refuse it: void arms, and staleness."""
    yield from (f"void: {reason}" for reason in inspection.void(run))
    clauses = staleness.changes(run.path, run.record, staleness.Present())
    if staleness.is_stale(clauses):
        yield f"stale: {'; '.join(clauses)}"


def private(folder: Path) -> Iterator[str]:
    """Where a folder's text names this host, this checkout or a home directory, one line a file."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        text = _text(path)
        for pattern in (_HOME, *_of_this_machine()):
            if match := pattern.search(text):
                yield f"{path.relative_to(folder).as_posix()} names {match[0]}"
                break


def _refuse(run: Run, allow_smoke: bool) -> None:
    if not is_plain_name(run.notebook):  # run.json says it, and a folder is made of it
        raise NotPublishableError(f"run {run.id} names a notebook that is no plain name: {run.notebook!r}")
    if run.status != "completed":
        raise NotPublishableError(f"run {run.id} is {run.status}: only a completed run can be published")
    if run.tier == "smoke" and not allow_smoke:
        raise NotPublishableError(f"run {run.id} is a smoke run, which proves nothing: --allow-smoke publishes it")
    if (changed := inspection.changes(run)) is None:
        raise NotPublishableError(f"run {run.id} was never sealed")
    if changed:
        raise NotPublishableError(f"run {run.id} was changed after its end: {', '.join(changed)}")
    if found := [*secrets.find(run.path), *map(str, run.record.get("contains_secret") or ())]:
        raise NotPublishableError(f"run {run.id} holds a secret: {'; '.join(found)}")


def _copy(run: RunFolder, draft: RunFolder) -> list[str]:
    """Copy and seal; returns what was left out for its size."""
    metrics = sorted(path.relative_to(run.path).as_posix() for path in (run.path / "metrics").glob("*"))
    limits = dict.fromkeys(metrics, MAX_METRIC_BYTES) | dict.fromkeys((*RECORDS, *ALWAYS), BUDGET_BYTES)
    limits["patch.diff"] = MAX_PATCH_BYTES
    there = {name: path.stat().st_size for name in limits if (path := run.path / name).is_file()}
    for name in (name for name, size in there.items() if size <= limits[name]):
        draft.write(name, (run.path / name).read_bytes())
    draft.write(inspection.REPORT, _report(run))
    draft.write(ORIGIN_CHECKSUMS, (run.path / CHECKSUMS).read_bytes())
    draft.seal()
    return [name for name, size in there.items() if size > limits[name]]


def _report(run: RunFolder) -> str:
    path = run.path / inspection.REPORT
    if not path.is_file():
        raise NotPublishableError(f"run {run.run_id} has no {inspection.REPORT}")
    page = smaller(path.read_text(encoding="utf-8"))
    if (size := len(page.encode())) > MAX_REPORT_BYTES:
        raise NotPublishableError(
            f"run {run.run_id}: its page has {_mib(size)} even with small pictures, {_mib(MAX_REPORT_BYTES)} may be"
        )
    return page


def smaller(page: str) -> str:
    """A page with its embedded pictures at most `PICTURE_WIDTH` pixels wide and of few colours; as it is without Pillow
    (which matplotlib brings)."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError:
        return page
    return _EMBEDDED.sub(lambda match: f"data:image/png;base64,{min(_recompressed(match[1]), match[1], key=len)}", page)


def _recompressed(encoded: str) -> str:
    """A PNG in base64, made small; what is no PNG comes back as it is."""
    from PIL import Image

    content = io.BytesIO()
    try:
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as original:
            layer = original.convert("RGBA")
    except (OSError, ValueError):
        return encoded
    picture = Image.new("RGB", layer.size, "white")
    picture.paste(layer, mask=layer.getchannel("A"))
    if picture.width > PICTURE_WIDTH:
        height = max(1, round(picture.height * PICTURE_WIDTH / picture.width))
        picture = picture.resize((PICTURE_WIDTH, height), Image.Resampling.LANCZOS)
    picture.quantize(PICTURE_COLOURS, dither=Image.Dither.NONE).save(content, format="PNG", optimize=True)
    return base64.b64encode(content.getvalue()).decode()


def _within(budget_bytes: int, published: Path, draft: Path) -> int:
    """The draft's size, if everything published stays within the budget with it."""
    own, everything = _size(draft), _size(published)  # the draft is among it
    if everything > budget_bytes:
        raise NotPublishableError(
            f"{published.name}/ would hold {_mib(everything)} with the {_mib(own)} of this run, and may hold "
            f"{_mib(budget_bytes)}: remove an older run there first"
        )
    return own


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _text(path: Path) -> str:
    """A file's text without embedded pictures; of a Parquet file its text columns."""
    if path.suffix != ".parquet":
        return re.sub(r"data:image/[^\"']*", "", path.read_text(encoding="utf-8", errors="replace"))
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    is_text = (pa.types.is_string, pa.types.is_large_string)
    columns = (column for column in table.columns if any(test(column.type) for test in is_text))
    return "\n".join(text for column in columns for text in column.unique().to_pylist() if text)


def _of_this_machine() -> Iterator[re.Pattern[str]]:
    """What names this very machine: its host name, unless it is a common word's length, and where the checkout lies."""
    host = platform.node().partition(".")[0]
    if len(host) > _TOO_COMMON and host != "localhost":
        yield re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])")
    yield re.compile(rf"(?<![\w./-]){re.escape(str(project.root()))}/")
    yield re.compile(rf"(?<![\w./-]){re.escape(str(Path.home()))}/")
