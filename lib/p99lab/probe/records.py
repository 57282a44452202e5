"""One record per request, and their Parquet file. Times are seconds after the start of the run, by one clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
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
    CANCELLED = "cancelled"  # by us, at the end of a run; never a measurement


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request, as its client saw it.

    `intended_s` is the arrival that an open load meant, None in a closed one. `send_s`: when its client had sent the
    first byte, or would have, had there been a connection; when it began, in a closed load and in process (the rule is
    in `probe.load`). `first_byte_s`, `last_byte_s`: when the transport had taken them, None where it never was or there
    is none. `token_times_s` holds one time per token, or per chunk where a server bundles tokens (`num_output_tokens`
    counts tokens). `error` is one of few kinds, `error_detail` what the target said besides. `num_prompt_tokens` is the
    target's count where it gives one, `num_prompt_tokens_sent` ours (None where we could only estimate): their
    difference is the drift. The five shares and `num_preemptions` are the engine's own account
    (`engine.request.Timeline`), None where the target gives none.
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
    num_prompt_tokens_sent: int | None = None
    error_detail: str | None = None
    first_byte_s: float | None = None
    last_byte_s: float | None = None

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
    """The records of a table; columns that are not theirs are left aside, those with a default may be missing."""
    added = {f.name for f in fields(RequestRecord) if f.default is not MISSING}  # older files may lack them
    names = [name for name in SCHEMA.names if name in table.column_names or name not in added]
    return [from_row(row) for row in table.select(names).to_pylist()]


def from_row(row: dict[str, Any]) -> RequestRecord:
    """A record from plain values by field."""
    typed = {
        "phase": Phase(row["phase"]),
        "outcome": Outcome(row["outcome"]),
        "token_times_s": tuple(row["token_times_s"]),
    }
    return RequestRecord(**{**row, **typed})


def write_parquet(records: Sequence[RequestRecord], path: Path, **columns: str) -> None:
    pq.write_table(to_table(records, **columns), path, compression="zstd")


def read_parquet(path: Path) -> list[RequestRecord]:
    return from_table(pq.read_table(path))
