"""Effects: what adding one measure did to a latency, under one load. The decision page is read from them.

A notebook hands in numbers; `verdict` follows from the interval alone. Works on the base install.
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

EFFECTS = "metrics/effects.parquet"


@dataclass(frozen=True, slots=True)
class Effect:
    """How many times shorter `metric` became when `measure` was added to `against`: above 1 it helps.

    `load` in a few words (closed, 4 clients). `conditions`: what the answer depends on, such as the number of documents
    and their length. `ci_low`, `ci_high`: 95 % bounds of `ratio`, None where a side cannot be had.
    """

    measure: str
    against: str
    load: str
    metric: str
    ratio: float
    ci_low: float | None
    ci_high: float | None
    n: int
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(math.isfinite(x) and x > 0 for x in (self.ratio, self.ci_low, self.ci_high) if x is not None):
            raise ValueError(f"effect of {self.measure}: {self.ratio} [{self.ci_low}, {self.ci_high}] is no ratio")

    @property
    def verdict(self) -> str:
        """`helps` or `hurts` where the interval leaves 1 out on that side."""
        if self.ci_low is not None and self.ci_low > 1.0:
            return "helps"
        return "hurts" if self.ci_high is not None and self.ci_high < 1.0 else "no effect shown"


SCHEMA = pa.schema(
    [
        ("measure", pa.string()),
        ("against", pa.string()),
        ("load", pa.string()),
        ("metric", pa.string()),
        ("ratio", pa.float64()),
        ("ci_low", pa.float64()),
        ("ci_high", pa.float64()),
        ("n", pa.int64()),
        ("conditions", pa.string()),  # JSON
    ]
)


def write_effects(folder: RunFolder, effects: Iterable[Effect]) -> Path:
    """Write a run's effects, all at once.

    Raises:
        SealedError: the run has ended.
    """
    rows = [{**dataclasses.asdict(effect), "conditions": json.dumps(dict(effect.conditions))} for effect in effects]
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), buffer)
    return folder.write(EFFECTS, buffer.getvalue().to_pybytes())


def read_effects(path: Path) -> list[Effect]:
    """The effects of a run; none where it wrote no file."""
    if not path.is_file():
        return []
    rows = pq.read_table(path, schema=SCHEMA).to_pylist()
    return [Effect(**{**row, "conditions": json.loads(row["conditions"])}) for row in rows]
