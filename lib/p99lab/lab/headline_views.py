"""How notebook 01's tables look on its page: the rows of the kept ones in fewer columns, a figure beside its bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from p99lab.lab.headline_arms import measured_arms
from p99lab.lab.parameters import Headline01
from p99lab.lab.results import bounded, shown

PERCENTILES = ("p50", "p90", "p99")
METRICS = ("ttft", "itl", "e2e", "queue_time")


def coverage(kept: pd.DataFrame, parameters: Headline01) -> pd.DataFrame:
    """The arms that the run was to measure; of the others the table of arms says why they are not there."""
    return kept[kept["arm"].isin([arm.name for arm in measured_arms(parameters)])]


def percentiles(kept: pd.DataFrame) -> pd.DataFrame:
    """P50, P90 and P99 of the metrics that the page speaks of, a column each."""
    rows = [_percentiles_row(row) for row in kept.to_dict("records") if row["metric"] in METRICS]
    return pd.DataFrame(rows)


def goodput(kept: pd.DataFrame) -> pd.DataFrame:
    """Under headings that say what is meant."""
    return kept.rename(columns={"at least/s": "goodput at least (1/s)", "below/s": "and below (1/s)"})


def churn(kept: pd.DataFrame) -> pd.DataFrame:
    """Under headings that say what is meant."""
    return kept.rename(
        columns={
            "of whom cold": "found in no cache",
            "others' P99 (s)": "others' P99, E2E (s)",
            "quiet P99 (s)": "without churn (s)",
            "times": "× without churn",
        }
    )


def windows(kept: pd.DataFrame) -> pd.DataFrame:
    """The window in one column, in hundredths of a second; columns of which every block says nothing are left out."""
    rows = pd.DataFrame([_windows_row(row) for row in kept.to_dict("records")])
    return rows.replace("", None).dropna(axis="columns", how="all")


def claims(kept: pd.DataFrame) -> pd.DataFrame:
    """The measured figure with its unit and its bounds in one column."""
    return pd.DataFrame([_claims_row(row) for row in kept.to_dict("records")])


def _percentiles_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        "arm": row["arm"],
        "load": row["load"],
        "metric": row["metric"],
        "n": f"{shown(row['n'])}{' (void)' if row['void'] else ''}",
        "effective n": row["effective n"],
        **{
            name.upper(): _bounded(row[name], row[f"{name} low"], row[f"{name} high"]) for name in ("p50", "p90", "p99")
        },
        "max": row["max"],
    }


def _windows_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    late = {name.replace("client late, ", "late, "): row[name] for name in row if name.startswith("client late")}
    return {
        **{name: row[name] for name in ("order", "arm", "load", "block", "verdict")},
        "window (s)": f"{row['from (s)']:.2f} – {row['to (s)']:.2f}",
        "requests": row["requests"],
        **late,
        "allowed (ms)": row["allowed (ms)"],
        "reason": row["reason"],
    }


def _claims_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    measured = _bounded(row["measured"], row["low"], row["high"])
    unit = "" if measured == shown(None) else f" {row['unit']}"
    return {
        **{name: row[name] for name in ("claim", "says", "stated")},
        "measured": f"{measured}{unit}",
        **{name: row[name] for name in ("n", "verdict", "why")},
    }


def _bounded(value: Any, low: Any, high: Any) -> str:
    """As numbers come out of a table, where NaN stands for nothing."""
    return bounded(*(None if x is None or math.isnan(x) else float(x) for x in (value, low, high)))
