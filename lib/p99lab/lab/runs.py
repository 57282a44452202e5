"""The runs below `outputs/`: what there is, however it ended, and SQL over what they recorded.

There is no database: run.json is read run by run, so that a broken one costs itself alone, and Parquet files through
DuckDB views in memory. Checksums are not looked at here, a thousand runs have too many bytes: see `lab.inspection`.
Works on the base install.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from p99lab.errors import BadParameterError, did_you_mean
from p99lab.lab import alive
from p99lab.lab.parameters import CONTRACTS
from p99lab.lab.provenance import short_revision
from p99lab.lab.run_folder import CHECKSUMS

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

PUBLISHED = "published"
BY_HAND = "interactive"  # where `RunFolder.current` writes for a notebook that is run by hand
VIEWS = ("figures", "percentiles", "requests")  # metrics/<view>.parquet of every run that has one
REQUEST_KEYS = ("arm", "load", "block", "transport")  # what notebook 01 sets before a request's own columns
_RUN_ID = re.compile(r"\d{8}-\d{6}-\d{3}-[0-9a-f]{4}")


@dataclass(frozen=True, slots=True)
class Run:
    """One folder. `record` is its run.json, empty where there is none that can be read.

    `status`: as the run ended, or `running`, `cut off` (no end was recorded and its runner is not alive on this
    machine), `by hand`, `unreadable` (run.json), `no record`. `published`: its copy below outputs/published, which is
    the folder itself where there is no other.
    """

    path: Path
    record: Mapping[str, Any]
    status: str
    is_sealed: bool
    published: Path | None = None

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def notebook(self) -> str:
        return str(self.record.get("notebook") or self.path.parent.name)

    @property
    def tier(self) -> str:
        return str(self.record.get("tier") or "")

    @property
    def started(self) -> str:
        """ISO 8601, UTC; by the folder's name where nothing else says it, else empty."""
        if isinstance(started := self.record.get("started"), str):
            return started
        if not _RUN_ID.fullmatch(self.id):
            return ""
        return f"{self.id[:4]}-{self.id[4:6]}-{self.id[6:8]}T{self.id[9:11]}:{self.id[11:13]}:{self.id[13:15]}+00:00"

    @property
    def seconds(self) -> float | None:
        seconds = self.record.get("seconds")
        return float(seconds) if isinstance(seconds, int | float) else None

    @property
    def hardware(self) -> str:
        return str(self.record.get("hardware") or "")

    @property
    def revision(self) -> str:
        return short_revision(self.record)

    @property
    def is_counted(self) -> bool:
        """Whether the ledger asks it: it completed, and more was meant than to show that the notebook works."""
        return self.status == "completed" and self.tier != "smoke"

    def as_record(self) -> dict[str, Any]:
        """The row of `p99lab runs --json` and of the view `runs`."""
        exit_code = self.record.get("exit_code")
        return {
            "run": self.id,
            "notebook": self.notebook,
            "tier": self.tier,
            "status": self.status,
            "exit_code": exit_code if isinstance(exit_code, int) else None,
            "reason": str(self.record.get("reason") or ""),
            "started": self.started or None,
            "seconds": self.seconds,
            "hardware": self.hardware,
            "revision": self.revision,
            "sealed": self.is_sealed,
            "published": self.published is not None,
            "path": str(self.path),
        }


def catalogue(outputs: Path) -> list[Run]:
    """Every run below `outputs`, newest first; a published copy is a run of its own only where the original is not."""
    found = {(folder.parent.name, folder.name): _read(folder) for folder in _folders(outputs)}
    for copy in _folders(outputs / PUBLISHED):
        original = found.get((copy.parent.name, copy.name)) or _read(copy)
        found[copy.parent.name, copy.name] = replace(original, published=copy)
    return sorted(found.values(), key=lambda run: (bool(_RUN_ID.fullmatch(run.id)), run.id), reverse=True)


def choose(
    runs: Iterable[Run], notebook: str | None = None, status: str | None = None, last: int | None = None
) -> list[Run]:
    """Those of a notebook (its number, its slug, or the beginning of either) and of a status, at most the first
    `last`.

    Raises:
        BadParameterError: no notebook goes by that name, neither a run's nor one of today.
    """
    runs = list(runs)
    known = sorted({*CONTRACTS, *(run.notebook for run in runs)})
    if notebook is not None and not any(_is_named(name, notebook) for name in known):
        raise BadParameterError(f"no notebook '{notebook}'; known are {', '.join(known)}")
    chosen = [
        run
        for run in runs
        if (notebook is None or _is_named(run.notebook, notebook)) and (status is None or run.status == status)
    ]
    return chosen if last is None else chosen[:last]


def find(outputs: Path, name: str) -> Run:
    """The run of this id, of an id that begins so, or in this folder.

    Raises:
        BadParameterError: there is none, or more than one.
    """
    if os.sep in name or (Path(name) / "run.json").is_file():
        return _at(Path(name))
    runs = catalogue(outputs)
    matches = [run for run in runs if run.id.startswith(name)] if name else []
    matches = [run for run in matches if run.id == name] or matches
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(run.id for run in matches[:4]) + (" …" if len(matches) > 4 else "")
        raise BadParameterError(f"'{name}' begins {len(matches)} run ids: {ids}")
    hint = did_you_mean(name, [run.id for run in runs]) or "; `p99lab runs` lists them" * bool(runs)
    raise BadParameterError(f"no run '{name}' among the {len(runs)} in {outputs}{hint}")


def connect(runs: Sequence[Run]) -> duckdb.DuckDBPyConnection:
    """A database in memory with a view `runs` and one per kind of Parquet file, each with a column `run`.

    The files of a view may differ in their columns: what a run lacks is NULL. The columns that are known are there even
    if no run has them. Nothing but these files can be read. Close it after use.
    """
    import duckdb

    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    connection.register("runs", _as_arrow(runs))
    readable: list[str] = []
    for view in VIEWS:
        files = [str(file) for run in runs if (file := run.path / "metrics" / f"{view}.parquet").is_file()]
        selects = [_no_rows(connection, view), *([_rows_of(files)] if files else [])]
        connection.sql(f"CREATE VIEW {view} AS {' UNION ALL BY NAME '.join(selects)}")
        readable += files
    connection.execute(f"SET allowed_paths = [{_listed(readable)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def query(outputs: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of a query over the views `runs`, `figures`, `percentiles` and `requests`.

    Raises:
        BadParameterError: the query is wrong, or a file that it reads is; or it does anything but ask.
    """
    import duckdb

    try:
        asking = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
        if any(statement.type not in asking for statement in duckdb.extract_statements(sql)):
            raise BadParameterError("a query over the runs is a SELECT, and changes nothing")
        with connect(catalogue(outputs)) as connection:
            try:
                result = connection.sql(sql)
            except duckdb.BinderException as error:
                raise BadParameterError(f"{_first_line(error)}{_columns(connection, sql)}") from None
            return ([], []) if result is None else (list(result.columns), result.fetchall())
    except duckdb.Error as error:
        raise BadParameterError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _columns(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    """The columns of each view that a query names: `; figures has run, metric, …`."""
    named = [view for view in ("runs", *VIEWS) if re.search(rf"\b{view}\b", sql, re.IGNORECASE)]
    return "".join(f"; {view} has {', '.join(connection.view(view).columns)}" for view in named)


def table(runs: Sequence[Run]) -> str:
    """One line per run under a heading. Plain text: a table of `rich` takes seconds for a thousand."""
    rows = [
        ("run", "notebook", "tier", "status", "began (UTC)", "took", "sealed", "code", "hardware"),
        *map(_row, runs),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def took(seconds: float | None) -> str:
    """`3.2 s`, `5:20`, `1:02:05`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _row(run: Run) -> tuple[str, ...]:
    sealed = ("yes" if run.is_sealed else "no") + (", published" if run.published else "")
    began = run.started[:16].replace("T", " ")
    return run.id, run.notebook, run.tier, run.status, began, took(run.seconds), sealed, run.revision, run.hardware


def _folders(outputs: Path) -> Iterator[Path]:
    """`<notebook>/<run>` below a directory, whatever they hold; hidden ones and the published ones are left out."""
    for notebook in _subfolders(outputs):
        if notebook.name != PUBLISHED:
            yield from _subfolders(notebook)


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
    return [folder / name for name in names]


def _at(folder: Path) -> Run:
    if not folder.is_dir():
        raise BadParameterError(f"no run in {folder}: it is no directory")
    return _read(folder.resolve())


def _read(folder: Path) -> Run:
    sealed = (folder / CHECKSUMS).is_file()
    try:
        record = orjson.loads((folder / "run.json").read_bytes())
    except FileNotFoundError:
        return Run(folder, {}, "by hand" if folder.parent.name == BY_HAND else "no record", sealed)
    except (OSError, orjson.JSONDecodeError):
        return Run(folder, {}, "unreadable", sealed)
    if not isinstance(record, dict) or not isinstance(record.get("status"), str):
        return Run(folder, {}, "unreadable", sealed)
    is_cut_off = record["status"] == "running" and not alive.is_running(record)
    return Run(folder, record, "cut off" if is_cut_off else record["status"], sealed)


def _as_arrow(runs: Sequence[Run]) -> pa.Table:
    import pyarrow as pa

    kinds: dict[str, Any] = {"exit_code": pa.int64(), "seconds": pa.float64(), "sealed": pa.bool_()}
    kinds["published"] = pa.bool_()
    rows = [run.as_record() for run in runs]
    names = list(rows[0]) if rows else list(Run(Path(), {}, "", False).as_record())
    return pa.Table.from_pylist(rows, pa.schema([(name, kinds.get(name, pa.string())) for name in names]))


def _no_rows(connection: duckdb.DuckDBPyConnection, view: str) -> str:
    known = connection.from_arrow(_known_columns(view).empty_table())
    columns = (f'NULL::{kind} AS "{name}"' for name, kind in zip(known.columns, known.types, strict=True))
    return f"SELECT {', '.join(columns)} WHERE false"


def _rows_of(files: Iterable[str]) -> str:
    return (
        "SELECT split_part(filename, '/', -3) AS run, * EXCLUDE (filename)"
        f" FROM read_parquet([{_listed(files)}], union_by_name = true, filename = true)"
    )


def _listed(files: Iterable[str]) -> str:
    return ", ".join("'" + file.replace("'", "''") + "'" for file in files)


def _known_columns(view: str) -> pa.Schema:
    """The columns that today's code writes to a view's files, and `run`."""
    import pyarrow as pa

    from p99lab.lab.figures import SCHEMA as FIGURES
    from p99lab.probe.records import SCHEMA as REQUESTS
    from p99lab.probe.stats import QUANTILES

    counts = {"void": pa.bool_(), "n": pa.int64(), "effective n": pa.int64()}
    bounds = {f"{name}{which}": pa.float64() for name in (*QUANTILES, "std") for which in ("", " low", " high")}
    texts = {name: pa.string() for name in ("arm", "load", "metric")}
    columns = {
        "figures": FIGURES,
        "percentiles": pa.schema({**texts, **counts, **bounds, "max": pa.float64()}),
        "requests": pa.schema([*((name, pa.string()) for name in REQUEST_KEYS), *REQUESTS]),
    }
    return pa.schema([("run", pa.string()), *columns[view]])


def _is_named(notebook: str, beginning: str) -> bool:
    return notebook.startswith(beginning) or notebook.lstrip("0123456789_").startswith(beginning)
