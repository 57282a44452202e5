"""Several runs of the same probe as one sample: histograms added, percentiles with intervals over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from hdrh.histogram import HdrHistogram

from p99lab.errors import BadParameterError
from p99lab.probe.histograms import merged, read_log, to_log, values_of
from p99lab.probe.intervals import Figure, FloatArray, percentile
from p99lab.probe.output import HISTOGRAMS, REQUESTS, SUMMARY, Folder, figure_lines, to_json
from p99lab.probe.records import read_parquet
from p99lab.probe.stats import QUANTILES, Distribution, correlation_note, measured, metric_values

_MAY_DIFFER = {"repetition", "api_key_env", "requests", "duration_s", "warmup_share"}


@dataclass(frozen=True, slots=True)
class Part:
    """One run's folder: its summary, its histograms, and each metric's values where the requests were kept."""

    path: Path
    summary: dict[str, Any]
    histograms: dict[str, HdrHistogram]
    values: dict[str, FloatArray] | None

    @classmethod
    def read(cls, path: Path) -> Part:
        """
        Raises:
            BadParameterError: the folder holds no probe's result.
        """
        try:
            summary = orjson.loads((path / SUMMARY).read_bytes())
            window = summary["steady_window"]
            used = slice(window["first"], window["last"] + 1)
            _ = summary["workload_digest"], summary["options"], summary["began_unix_s"], summary["void"]
            _ = summary["target"]["name"], summary["counts"]
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
            raise BadParameterError(f"{path} holds no result of a probe (no readable {SUMMARY})") from None
        requests = path / REQUESTS
        kept = metric_values(measured(read_parquet(requests))[used]) if requests.is_file() else None
        return cls(path, summary, read_log(path / HISTOGRAMS), kept)

    @property
    def conditions(self) -> dict[str, Any]:
        """What has to be the same for two runs to be one sample."""
        options = {name: value for name, value in self.summary["options"].items() if name not in _MAY_DIFFER}
        return {"workload": self.summary["workload_digest"], "target": self.summary["target"], **options}


@dataclass(frozen=True, slots=True)
class Merged:
    """The sum of the parts. `exact`: intervals are of the requests themselves; else of the histograms, to three digits
    and as if requests were independent beyond what each run's own effective n says."""

    parts: tuple[Part, ...]
    histograms: dict[str, HdrHistogram]
    metrics: dict[str, Distribution]
    exact: bool
    notes: tuple[str, ...]

    @property
    def began_unix_s(self) -> float:
        return min(float(part.summary["began_unix_s"]) for part in self.parts)

    @property
    def target(self) -> dict[str, str]:
        """Name, transport and clients, of the first run."""
        target: dict[str, str] = self.parts[0].summary["target"]
        return target

    @property
    def counts(self) -> dict[str, int]:
        """Requests of all runs by phase and outcome."""
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update(part.summary["counts"])
        return dict(total)

    @property
    def void(self) -> tuple[str, ...]:
        """Reasons of the runs that are void; none unless the merge was forced."""
        return tuple(f"{part.path}: {reason}" for part in self.parts for reason in part.summary["void"])

    @property
    def is_closed(self) -> bool:
        """No run has arrivals of its own: figures from send are the same."""
        return all(part.summary["options"]["load"] == "closed" for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        first = self.parts[0].summary
        return {
            "void": list(self.void),
            "notes": list(self.notes),
            "target": self.target,
            "counts": self.counts,
            **{name: metric.as_dict() for name, metric in self.metrics.items()},
            "exact": self.exact,
            "merged": [str(part.path) for part in self.parts],
            "workload_digest": first["workload_digest"],
            "options": {name: value for name, value in first["options"].items() if name not in _MAY_DIFFER},
        }


def merge(folders: Sequence[Path], force: bool = False) -> Merged:
    """Read and add the results in several folders of `p99lab probe --output`.

    Raises:
        BadParameterError: fewer than two, the same twice, no result in one; and, unless forced, results of different
            conditions or void ones.
    """
    parts = tuple(Part.read(path) for path in folders)
    differences = _differences(parts)
    problems = [*differences, *(f"{p.path} is void: {p.summary['void'][0]}" for p in parts if p.summary["void"])]
    if problems and not force:
        raise BadParameterError(f"{problems[0]} (--force merges all the same)")
    names = [name for name in parts[0].histograms if all(name in part.histograms for part in parts)]
    histograms = {name: merged([part.histograms[name] for part in parts]) for name in names}
    exact = all(part.values is not None for part in parts)
    metrics = {name: _exact(parts, name) if exact else _from_histogram(parts, name, histograms[name]) for name in names}
    unsteady = [part for part in parts if part.summary["steady_window"]["verdict"] == "drifting"]
    notes = [
        *differences,
        *(f"{part.path}: no steady window, its latency or load was drifting" for part in unsteady),
        *(correlation_note(metrics["e2e"]) if "e2e" in metrics else ()),
        *([] if exact else [f"{REQUESTS} is missing: intervals are of the histograms, to three digits"]),
    ]
    return Merged(parts, histograms, metrics, exact, tuple(notes))


def write(result: Merged, folder: Folder) -> None:
    """`merged.json`, `merged.csv` and `latency.hlog`."""
    folder.write("merged.json", to_json(result.as_dict()))
    folder.write("merged.csv", figure_lines(result.metrics))
    last = max(float(part.summary["began_unix_s"]) for part in result.parts)
    folder.write(HISTOGRAMS, to_log(result.histograms, result.began_unix_s, last - result.began_unix_s))


def _differences(parts: Sequence[Part]) -> list[str]:
    if len(parts) < 2:
        raise BadParameterError("a merge takes two folders or more")
    if len({part.path.resolve() for part in parts}) < len(parts):
        raise BadParameterError("a folder is named twice: a run must not count twice")
    differences, first = [], parts[0]
    for part in parts[1:]:
        differ = [name for name, value in first.conditions.items() if part.conditions.get(name) != value]
        if differ:
            differences.append(f"{part.path} differs from {first.path} in {', '.join(differ)}")
    return differences


def _exact(parts: Sequence[Part], name: str) -> Distribution:
    return Distribution.of(np.concatenate([part.values[name] for part in parts if part.values is not None]))


def _from_histogram(parts: Sequence[Part], name: str, hdr: HdrHistogram) -> Distribution:
    """Ranks looked up in the histogram; failed requests, which it does not hold, are slower than all."""
    summaries = [part.summary[name] for part in parts]
    failed = sum(summary["num_failed"] for summary in summaries)
    effective = sum(summary["effective_n"] for summary in summaries)
    answered = values_of(hdr)
    values = np.concatenate([answered, np.full(failed, np.inf)])
    why = "needs the requests in order of time"
    return Distribution(
        n=len(values),
        effective_n=effective,
        num_failed=failed,
        mean_s=float(answered.mean()) if len(answered) else None,
        max_s=float(answered.max()) if len(answered) else None,
        std=Figure(None, None, None, len(answered), effective, why),
        percentiles={at: percentile(values, q, _worth(summaries, at)) for at, q in QUANTILES.items()},
        reason=None if len(values) else "no such measurement",
    )


def _worth(summaries: Sequence[dict[str, Any]], at: str) -> int:
    """Independent values of all runs together: they are independent of each other."""
    return sum(int(summary[at]["effective_n"]) for summary in summaries)
