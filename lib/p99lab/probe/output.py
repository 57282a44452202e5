"""What a result leaves in a folder: every request, summary, histograms and drawings, each written whole or not at all.

A folder holds one result: one that is not empty is refused, unless it may be overwritten; then the files that a probe
writes are removed from it, and nothing else.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from p99lab.errors import BadParameterError
from p99lab.probe import plots
from p99lab.probe.command import ProbeResult
from p99lab.probe.histograms import histogram, to_log
from p99lab.probe.intervals import Figure
from p99lab.probe.records import write_parquet
from p99lab.probe.stats import Distribution, metric_values
from p99lab.probe.sweep import SweepPoint, SweepResult
from p99lab.strict import StrictModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

REQUESTS, SUMMARY, HISTOGRAMS = "requests.parquet", "summary.json", "latency.hlog"
_OURS = (REQUESTS, SUMMARY, HISTOGRAMS, "summary.csv", "sweep.json", "sweep.csv", "merged.json", "merged.csv", "*.png")
_FOLDERS = ("capacity", "rate-*")
_DPI = 200


class Printed(StrictModel):
    """How a result is printed."""

    format: Literal["table", "json", "csv"] = "table"


class Folder:
    """A folder for one result, made when this is; nothing is removed before something is written.

    Raises:
        BadParameterError: it is not empty and may not be overwritten, or it cannot be made.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            empty = not any(path.iterdir())
        except OSError as error:
            raise BadParameterError(f"cannot write to {path}: {error.strerror}") from None
        if not empty and not overwrite:
            raise BadParameterError(f"{path} is not empty: name another --output, or add --overwrite")
        self._stale = not empty

    def part(self, name: str) -> Folder:
        """A folder inside this one."""
        with self._writable():
            return Folder(self.path / name, overwrite=True)

    def write(self, name: str, content: bytes | str) -> None:
        with self.file(name) as draft:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """A draft to be written, which becomes `name` at the end.

        Raises:
            BadParameterError: the disk refuses; what was there before stays.
        """
        draft = self.path / f".{name}.{os.getpid()}"
        with self._writable():
            try:
                yield draft
                draft.replace(self.path / name)
            finally:
                draft.unlink(missing_ok=True)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            if self._stale:
                _remove_ours(self.path)
                self._stale = False
            yield
        except OSError as error:
            raise BadParameterError(f"cannot write to {self.path}: {error.strerror}") from None


def write(result: ProbeResult, folder: Folder) -> list[str]:
    """Everything of a probe: its data, and `timeline.png` and `ecdf.png`.

    Returns:
        What a reader should know of it, a line each: drawings that could not be made.

    Raises:
        BadParameterError: the folder cannot be written.
    """
    write_data(result, folder)
    return draw({"timeline": lambda: plots.timeline(result), "ecdf": lambda: plots.ecdf(result)}, folder)


def write_data(result: ProbeResult, folder: Folder) -> None:
    """`requests.parquet`, `summary.json`, `summary.csv` and `latency.hlog`."""
    series = metric_values(result.used)
    with folder.file(REQUESTS) as draft:
        write_parquet(result.run.records, draft)
    folder.write(SUMMARY, to_json(result.as_dict()))
    folder.write("summary.csv", to_csv(result))
    hdrs = {name: histogram(values) for name, values in series.items()}
    folder.write(HISTOGRAMS, to_log(hdrs, result.run.began_unix_s, result.seconds))


def write_sweep(result: SweepResult, folder: Folder) -> list[str]:
    """`sweep.json`, `sweep.csv` and `curve.png`; the loads' own folders are written as they end. Returns as `write`."""
    folder.write("sweep.json", to_json(result.as_dict()))
    folder.write("sweep.csv", sweep_csv(result))
    return draw({"curve": lambda: plots.rate_curve(result)}, folder)


def draw(drawings: dict[str, Callable[[], Drawing]], folder: Folder) -> list[str]:
    """Each drawing as `<name>.png`; one line instead where the packages that draw are not installed."""
    try:
        for name, make in drawings.items():
            with folder.file(f"{name}.png") as draft:
                make().savefig(draft, format="png", dpi=_DPI, facecolor="white")
    except ModuleNotFoundError as error:
        return [f"no plots: {error.name} is missing, install the extra 'lab' (in a checkout: pip install '.[lab]')"]
    return []


def to_json(shape: dict[str, Any]) -> bytes:
    return orjson.dumps(shape, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def to_csv(result: ProbeResult) -> str:
    """One line per metric and figure, see `figure_lines`."""
    return figure_lines(result.summary.metrics)


def figure_lines(metrics: dict[str, Distribution]) -> str:
    """CSV: metric, figure, value_s, low_s, high_s, n, effective_n, reason."""
    header = ["metric", "figure", "value_s", "low_s", "high_s", "n", "effective_n", "reason"]
    return lines(header, (_row(metric, *one) for metric, of in metrics.items() for one in figures(of).items()))


def sweep_csv(result: SweepResult) -> str:
    """One line per rate: throughput and the SLO's quantile, with intervals, and what came of it."""
    header = ["rate", "offered_per_s", "answered_per_s", "answered_low", "answered_high", "metric", "quantile"]
    header += ["value_s", "low_s", "high_s", "n", "effective_n", "window", "verdict", "saturated", "void"]
    return lines(header, (_sweep_row(result, point) for point in result.points))


def lines(header: list[str], rows: Iterator[list[Any]]) -> str:
    """CSV text; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def figures(distribution: Distribution) -> dict[str, Figure]:
    """Every figure of a metric by name: its percentiles, `max` (without an interval) and `std`."""
    largest = Figure(distribution.max_s, None, None, distribution.n, distribution.effective_n)
    return {**distribution.percentiles, "max": largest, "std": distribution.std}


def _row(metric: str, name: str, figure: Figure) -> list[Any]:
    return [metric, name, figure.value, figure.low, figure.high, figure.n, figure.effective_n, figure.reason]


def _sweep_row(result: SweepResult, point: SweepPoint) -> list[Any]:
    answered, figure, summary = point.answered, point.figure, point.result.summary
    flow = [point.rate, point.throughput.offered, answered.value, answered.low, answered.high]
    of = [result.metric, result.quantile, figure.value, figure.low, figure.high, figure.n, figure.effective_n]
    return [*flow, *of, summary.steady_window.verdict, point.verdict, point.saturated, "; ".join(summary.void) or None]


def _remove_ours(folder: Path) -> None:
    """Files that a probe writes, here and in the folders of a sweep's points; folders that are then empty."""
    for path in folder.iterdir():
        if path.is_dir() and any(fnmatch(path.name, pattern) for pattern in _FOLDERS):
            _remove_ours(path)
            if not any(path.iterdir()):
                path.rmdir()
        elif path.is_file() and any(fnmatch(path.name, pattern) for pattern in _OURS):
            path.unlink()
