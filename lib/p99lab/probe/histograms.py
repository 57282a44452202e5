"""HDR histograms of latencies: they can be added over runs, and their log is read by HdrHistogram's own tools.

The log is the project's format 1.3 (https://github.com/HdrHistogram/HdrHistogram), one tagged histogram a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogReader

from p99lab.errors import BadParameterError
from p99lab.probe.intervals import FloatArray

_TOP_S = 3600
_DIGITS = 3


def empty() -> HdrHistogram:
    """Microseconds up to an hour, three digits."""
    return HdrHistogram(1, _TOP_S * 1_000_000, _DIGITS)


def histogram(values_s: FloatArray) -> HdrHistogram:
    """The finite values; failed requests (infinite) are in no bucket."""
    hdr = empty()
    micros = np.clip(np.round(values_s[np.isfinite(values_s)] * 1e6), 1, _TOP_S * 1_000_000).astype(np.int64)
    for value, times in zip(*np.unique(micros, return_counts=True), strict=True):
        hdr.record_value(int(value), int(times))
    return hdr


def merged(histograms: Iterable[HdrHistogram]) -> HdrHistogram:
    """One histogram of all values of several, of several runs, say."""
    total = empty()
    for one in histograms:
        total.add(one)
    return total


def values_of(hdr: HdrHistogram) -> FloatArray:
    """The recorded values in seconds, ascending, each known to three digits, [count]."""
    recorded = [(item.value_iterated_to, item.count_at_value_iterated_to) for item in hdr.get_recorded_iterator()]
    values, counts = np.array(recorded, np.int64).reshape(-1, 2).T
    return np.repeat(values / 1e6, counts)


def to_log(histograms: Mapping[str, HdrHistogram], began_unix_s: float, seconds: float) -> str:
    """The log of one interval that began at `began_unix_s`. Written here: the library's writer knows no tags."""
    lines = [
        "#[Histogram log format version 1.3]",
        "#[p99lab: latencies in microseconds, maxima in seconds]",
        f"#[StartTime: {began_unix_s:.3f} (seconds since epoch)]",
        '"StartTimestamp","Interval_Length","Interval_Max","Interval_Compressed_Histogram"',
    ]
    for name, hdr in histograms.items():
        interval = f"{began_unix_s:.3f},{seconds:.3f},{hdr.get_max_value() / 1e6:.6f}"
        lines.append(f"Tag={name},{interval},{hdr.encode().decode()}")
    return "\n".join(lines) + "\n"


def read_log(path: Path) -> dict[str, HdrHistogram]:
    """The histograms of a log by tag; those of one tag are added.

    Raises:
        BadParameterError: there is no such file, or it is no such log.
    """
    found: dict[str, HdrHistogram] = {}
    try:
        reader = HistogramLogReader(str(path), empty())
        try:
            while (one := reader.get_next_interval_histogram()) is not None:
                found[one.get_tag()] = merged([found[one.get_tag()], one]) if one.get_tag() in found else one
        finally:
            reader.close()
    except OSError as error:
        raise BadParameterError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # the library raises whatever its decoding meets: zlib's, base64's and its own
        raise BadParameterError(f"{path} is no histogram log: {error or type(error).__name__}") from None
    return found
