"""Proof: a thousand runs are listed in under a second, broken ones among them, and nothing is written for it."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from p99lab.lab import index, runs
from p99lab.lab.figures import Figure, write_figures
from p99lab.lab.proof.check import Check
from p99lab.lab.run_folder import RunFolder
from p99lab.probe.records import Outcome, Phase, RequestRecord, write_parquet

NUM_RUNS = 1000
NUM_REQUESTS = 400
REPEATS = 5
LIMIT_S = 1.0
NOTEBOOKS = ("00_environment", "01_headline_p99", "02_1_kv_growth", "04_2_isolation")
CLAIMED = NOTEBOOKS[1]  # whose claims the template's figures speak to
STATUSES = ("completed", "completed", "completed", "failed", "timed out", "kernel died")


def checks(work: Path) -> Iterator[Check]:
    """The checks of this part, a thousand runs written below `work`."""
    outputs = work / "outputs"
    template = _template(work)
    for number in range(NUM_RUNS - 3):
        _copy(template, outputs, number)
    _odd_ones(outputs, template)
    before = _files(outputs)
    listed = runs.catalogue(outputs)
    yield _equal("runs listed", NUM_RUNS, len(listed))
    odd = sorted(run.status for run in listed if run.status not in STATUSES)
    yield _equal("broken and foreign ones among them", ["cut off", "no record", "unreadable"], odd)
    yield _timed("catalogue and table, in process", lambda: runs.table(runs.catalogue(outputs)))
    command = [sys.executable, "-m", "p99lab.cli", "runs", "list", "--outputs", str(outputs)]
    yield _timed(
        "p99lab runs list, the whole command", lambda: subprocess.run(command, capture_output=True, check=True)
    )
    yield _equal("files written for it", [], sorted(_files(outputs) - before))
    page = index.write(outputs).read_text()
    yield _equal("runs on index.html", NUM_RUNS, page.count("<li class=") - page.count('<li class="withdrawn"'))
    judged = sum(run.status == "completed" and run.notebook == CLAIMED for run in listed)
    chips = (page.count('<ul class="chips">'), page.count('<li class="withdrawn"'))
    yield _equal("runs with verdicts on it, and with withdrawn ones", (judged, 0), chips)
    _, counted = runs.query(outputs, "SELECT count(DISTINCT run), count(*) FROM requests")
    with_requests = NUM_RUNS - 2  # all but the foreign folder and the broken one
    yield _equal("SQL over every run's requests", [(with_requests, with_requests * NUM_REQUESTS)], counted)


def _template(work: Path) -> RunFolder:
    """What the runs have in common, of realistic size: figures, a table of percentiles, 400 requests, a page."""
    folder = RunFolder.create(work / "template")
    sampled = [Figure(f"p99_e2e_{name}", 1.5, "s", 1.4, 1.7, NUM_REQUESTS) for name in ("stock", "full")]
    write_figures(folder, [*sampled, Figure.exact("num_pages", 128, "pages")])
    row = {
        "arm": "stock",
        "load": "closed",
        "metric": "e2e",
        "void": False,
        "p99": 1.5,
        "p99 low": 1.4,
        "p99 high": 1.7,
    }
    pq.write_table(pa.Table.from_pylist([row] * 40), folder.path / "metrics" / "percentiles.parquet")
    write_parquet([_request(number) for number in range(NUM_REQUESTS)], folder.path / "metrics" / "requests.parquet")
    folder.write("report.html", "<!DOCTYPE html><title>run</title>" + "x" * 300_000)
    folder.write_json("hardware.json", {"id": "0123456789ab", "numa_nodes": 1, "gpus": []})
    return folder


def _request(number: int) -> RequestRecord:
    began, tokens = 0.25 * number, tuple(0.25 * number + 0.5 + 0.01 * token for token in range(16))
    return RequestRecord(
        index=number,
        phase=Phase.MEASURED,
        document=number % 4,
        client=number % 4,
        intended_s=None,
        send_s=began,
        first_token_s=tokens[0],
        end_s=tokens[-1],
        token_times_s=tokens,
        outcome=Outcome.OK,
        error=None,
        max_tokens=16,
        num_prompt_tokens=2000,
        num_document_tokens=1950,
        num_cached_tokens=1950,
        num_output_tokens=16,
        prompt_digest=f"{number:032x}",
    )


def _copy(template: RunFolder, outputs: Path, number: int, **changes: Any) -> None:
    """A run with a record and checksums of its own, sealed if it ended; its other files are links to the template's."""
    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(minutes=17 * number)
    run_id, notebook = f"{began:%Y%m%d-%H%M%S}-000-{number:04x}", NOTEBOOKS[number % len(NOTEBOOKS)]
    folder = RunFolder(outputs / notebook / run_id)
    shutil.copytree(template.path, folder.path, copy_function=lambda source, target: Path(target).hardlink_to(source))
    record = {"run_id": run_id, "notebook": notebook, **_record(began, STATUSES[number % len(STATUSES)]), **changes}
    folder.write_json("run.json", record)
    if record["status"] != "running":
        folder.seal()


def _record(began: datetime.datetime, status: str) -> dict[str, Any]:
    cell = {"id": "a-cell", "heading": "A part of the page with a heading of its own", "status": "completed"}
    return {
        "tier": "laptop",
        "status": status,
        "exit_code": 0 if status == "completed" else 10,
        "reason": "" if status == "completed" else "cell 7 of 15 (Figures and tables): ValueError: no such arm",
        "started": began.isoformat(timespec="milliseconds"),
        "p99lab": "0.1.0",
        "revision": "0123456789abcdef" * 2,
        "dirty": False,
        "hardware": "AMD EPYC, 2 CPUs, no GPU",
        "seconds": 320.0,
        "cells": [{"number": number, **cell, "seconds": 1.25} for number in range(1, 16)],
    }


def _odd_ones(outputs: Path, template: RunFolder) -> None:
    """A run that was cut off, one whose record is broken, and a folder that is none."""
    _copy(
        template, outputs, NUM_RUNS, status="running", runner={"pid": 2**31 - 1, "started": "2026-01-01T00:00:00+00:00"}
    )
    broken = outputs / NOTEBOOKS[0] / "20250101-000000-000-0000"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text('{"run_id": "2025')
    (outputs / "notes" / "not a run").mkdir(parents=True)


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _timed(name: str, call: Callable[[], object]) -> Check:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    found = f"median {median(seconds):.2f} s, longest {max(seconds):.2f} s of {REPEATS}"
    return Check(name, f"median under {LIMIT_S:g} s", found, median(seconds) < LIMIT_S)


def _equal(name: str, expected: object, found: object) -> Check:
    return Check(name, str(expected), str(found), expected == found)
