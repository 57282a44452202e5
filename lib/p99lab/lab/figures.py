"""Figures: what a run measured, under the names that the tests of claims.yaml ask for.

A notebook hands in figures and never a verdict (see `p99lab.lab.claims`). Works on the base install.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from p99lab.lab.run_folder import RunFolder

FIGURES = "metrics/figures.parquet"

Conditions = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """What a run measured under a name that some claim's test asks for.

    `ci_low`, `ci_high` bound its 95 % confidence interval; both None where `n` is too small for one. `conditions` say
    what the figure was taken under, in the names of claims.yaml; the GPU's name is added from the run's hardware.
    """

    metric: str
    value: float | None
    unit: str
    ci_low: float | None = None
    ci_high: float | None = None
    n: int | None = None
    conditions: Conditions = field(default_factory=dict)
    takes: str | None = None  # what testing it would take, where this machine cannot

    def __post_init__(self) -> None:
        numbers = [x for x in (self.value, self.ci_low, self.ci_high) if x is not None]
        if not all(math.isfinite(x) for x in numbers):
            raise ValueError(f"figure {self.metric}: {numbers} holds a number that is not finite")
        if (self.value is None) == (self.takes is None):
            raise ValueError(f"figure {self.metric}: give a value, or say what it would take")
        if (self.ci_low is None) != (self.ci_high is None) or (self.ci95 and self.ci95[0] > self.ci95[1]):
            raise ValueError(f"figure {self.metric}: [{self.ci_low}, {self.ci_high}] is no interval")

    @classmethod
    def exact(cls, metric: str, value: float, unit: str, conditions: Conditions | None = None) -> Figure:
        """A figure that was counted or computed, without sampling: its interval is itself."""
        return cls(metric, value, unit, value, value, None, conditions or {})

    @classmethod
    def untestable(cls, metric: str, takes: str) -> Figure:
        """This machine cannot show it; `takes` says what could. Holds for `metric` and every `metric/…`."""
        return cls(metric, None, "", takes=takes)

    @property
    def ci95(self) -> tuple[float, float] | None:
        return None if self.ci_low is None or self.ci_high is None else (self.ci_low, self.ci_high)


SCHEMA = pa.schema(
    [
        ("metric", pa.string()),
        ("value", pa.float64()),
        ("ci_low", pa.float64()),
        ("ci_high", pa.float64()),
        ("n", pa.int64()),
        ("unit", pa.string()),
        ("conditions", pa.string()),  # JSON
        ("takes", pa.string()),
    ]
)


def write_figures(folder: RunFolder, figures: Iterable[Figure]) -> Path:
    """Write a run's figures, all at once.

    Raises:
        ValueError: two figures have one name.
        SealedError: the run has ended.
    """
    rows = [{**dataclasses.asdict(figure), "conditions": json.dumps(dict(figure.conditions))} for figure in figures]
    names = [row["metric"] for row in rows]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two figures of one name: {', '.join(doubled)}")
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer)
    return folder.write(FIGURES, buffer.getvalue().to_pybytes())


def read_figures(path: Path) -> dict[str, Figure]:
    """The figures of a run by metric; none where it wrote no file."""
    if not path.is_file():
        return {}
    rows = pq.read_table(path, schema=SCHEMA).to_pylist()
    return {row["metric"]: Figure(**{**row, "conditions": json.loads(row["conditions"])}) for row in rows}
