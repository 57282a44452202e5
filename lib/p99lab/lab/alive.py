"""Whether the runner of a run still lives: its process, as run.json names it. Works on the base install."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import psutil

_CLOCK_TOLERANCE_S = 2.0  # a start is counted in ticks from a boot time that a corrected clock shifts


def this_process() -> dict[str, Any]:
    """This process, so that another one of the same number is not taken for it."""
    process = psutil.Process()
    started = datetime.datetime.fromtimestamp(process.create_time(), datetime.UTC)
    return {"pid": process.pid, "started": started.isoformat(timespec="milliseconds")}


def is_running(record: Mapping[str, Any]) -> bool:
    """Whether the runner that wrote this run.json is at work on this machine.

    One on another machine is not seen; it may be resumed all the same, for nothing is ever written into its folder.
    """
    runner = record.get("runner")
    if record.get("status") != "running" or not isinstance(runner, dict):
        return False
    try:
        process = psutil.Process(int(runner["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        started_s = datetime.datetime.fromisoformat(runner["started"]).timestamp()
        return abs(process.create_time() - started_s) < _CLOCK_TOLERANCE_S
    except (psutil.NoSuchProcess, KeyError, ValueError, TypeError):
        return False
