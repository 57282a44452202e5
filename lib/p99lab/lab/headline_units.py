"""A block of notebook 01 as a work unit: its load, what its clients saw and what the engine counted, bit for bit."""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow.parquet as pq

from p99lab.engine.stats import EngineStats
from p99lab.lab.units import Unit
from p99lab.probe.load import Run
from p99lab.probe.records import from_table, to_table
from p99lab.probe.workload import Load, parse_load

_REQUESTS, _BLOCK = "requests.parquet", "block.json"


@dataclass(frozen=True, slots=True)
class Measurement:
    """All that is kept of a block; everything else follows from it. `stats`: over the block, warm-up included; None of
    a peer."""

    load: Load
    run: Run
    stats: EngineStats | None


def files(measurement: Measurement) -> dict[str, bytes]:
    """The files of its unit."""
    buffer = io.BytesIO()
    pq.write_table(to_table(measurement.run.records), buffer, compression="zstd")
    counters: dict[str, Any] = {
        field.name: getattr(measurement.run, field.name) for field in dataclasses.fields(Run) if field.name != "records"
    }
    stats = None if measurement.stats is None else measurement.stats.as_dict()
    block = {"load": measurement.load.model_dump(mode="json"), "run": counters, "stats": stats}
    return {_REQUESTS: buffer.getvalue(), _BLOCK: orjson.dumps(block, option=orjson.OPT_INDENT_2)}


def read(unit: Unit) -> Measurement:
    """The measurement that a unit's files hold."""
    block = orjson.loads(unit.read(_BLOCK))
    records = tuple(from_table(pq.read_table(io.BytesIO(unit.read(_REQUESTS)))))
    stats = None if block["stats"] is None else EngineStats(**block["stats"])
    return Measurement(parse_load(block["load"]), Run(records, **block["run"]), stats)
