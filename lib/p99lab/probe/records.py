"""One record per request, and their Parquet file. Times are seconds after the start of the run, by one clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


class Phase(enum.StrEnum):
    WARMUP = "warmup"
    MEASURED = "measured"
    COOLDOWN = "cooldown"  # keeps the load up while measured requests finish; never counted


class Outcome(enum.StrEnum):
    OK = "ok"
    ERROR = "error"  # refused, failed or malformed; `error` says how
    CUT = "cut"  # the stream ended before the answer did
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  # by us; never counted


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request, as its client saw it.

    `intended_s` is the arrival that an open load meant, None in a closed one. `token_times_s` holds one time per
    token, or per chunk where a server bundles tokens (`num_output_tokens` counts tokens). The five shares and
    `num_preemptions` are the engine's own account (`engine.request.Timeline`), None where the target gives none.
    """

    index: int
    phase: Phase
    document: int
    client: int | None
    intended_s: float | None
    send_s: float
    first_token_s: float | None
    end_s: float
    token_times_s: tuple[float, ...]
    outcome: Outcome
    error: str | None
    max_tokens: int
    num_prompt_tokens: int
    num_document_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    prompt_digest: str
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    stalled_s: float | None = None
    scheduling_s: float | None = None
    num_preemptions: int | None = None

    @property
    def start_s(self) -> float:
        """Where its clock starts: the intended arrival, or the send in a closed loop."""
        return self.send_s if self.intended_s is None else self.intended_s


_TYPES: dict[str, pa.DataType] = {
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "Phase": pa.string(),
    "Outcome": pa.string(),
    "tuple[float, ...]": pa.list_(pa.float64()),
}
SCHEMA = pa.schema(
    [
        pa.field(f.name, _TYPES[str(f.type).removesuffix(" | None")], "| None" in str(f.type))
        for f in fields(RequestRecord)
    ]
)


def to_table(records: Iterable[RequestRecord], **columns: str) -> pa.Table:
    """Records as an Arrow table; `columns` are constants set before them (arm=…, run=…)."""
    rows = list(records)
    table = pa.table({f.name: [getattr(r, f.name) for r in rows] for f in SCHEMA}, schema=SCHEMA)
    for place, (name, value) in enumerate(columns.items()):
        table = table.add_column(place, name, pa.array([value] * len(rows), pa.string()))
    return table


def from_table(table: pa.Table) -> list[RequestRecord]:
    """The records of a table; columns that are not theirs are left aside."""
    return [_record(row) for row in table.select(SCHEMA.names).to_pylist()]


def write_parquet(records: Sequence[RequestRecord], path: Path, **columns: str) -> None:
    pq.write_table(to_table(records, **columns), path, compression="zstd")


def read_parquet(path: Path) -> list[RequestRecord]:
    return from_table(pq.read_table(path))


def _record(row: dict[str, Any]) -> RequestRecord:
    typed = {
        "phase": Phase(row["phase"]),
        "outcome": Outcome(row["outcome"]),
        "token_times_s": tuple(row["token_times_s"]),
    }
    return RequestRecord(**{**row, **typed})
