"""What a notebook leaves in its run folder, and shows on its page: the same numbers and the same pixels in both."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from p99lab.lab.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from IPython.display import Image
    from matplotlib.figure import Figure

_DPI = 160
_THIN_SPACE = "\u202f"  # at which no line is broken
_SHORT, _LONG = 28, 60  # characters: a column of no more than the first keeps its lines whole


class Shown:
    """A table as a page shows it: no row numbers, numbers short, nothing for a missing value but a dash.

    `empty`: what is said of a table without rows.
    """

    def __init__(self, frame: pd.DataFrame, empty: str = "") -> None:
        self._frame = frame
        self._empty = f"nothing here: {empty}" if empty else "nothing here"

    def _repr_html_(self) -> str:
        if self._frame.empty:
            return f'<p class="empty">{html.escape(self._empty)}</p>'
        text = self._text()
        names = [str(name) for name in text.columns]
        widths = [_width(text.iloc[:, place]) for place in range(len(names))]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{_row(values, widths)}</tr>\n" for values in text.itertuples(index=False))
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"

    def __repr__(self) -> str:
        return self._empty if self._frame.empty else str(self._text().to_string(index=False))

    def _text(self) -> pd.DataFrame:
        return self._frame.astype(object).where(self._frame.notna(), None).map(shown)


def table(name: str, frame: pd.DataFrame | pa.Table, page: pd.DataFrame | None = None, empty: str = "") -> Shown:
    """Keep a table as `metrics/<name>.parquet`, and return it for display.

    Args:
        page: what is displayed in its place.
        empty: why it has no rows, where it has none.

    Raises:
        SealedError: the run has ended.
    """
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = pa.Table.from_pandas(frame, preserve_index=False) if isinstance(frame, pd.DataFrame) else frame
    buffer = io.BytesIO()
    pq.write_table(columns, buffer)
    RunFolder.current().write(f"metrics/{name}.parquet", buffer.getvalue())
    if page is not None:
        return Shown(page, empty)
    whole_numbers = {pa.int64(): pd.Int64Dtype()}  # which a missing value leaves whole
    return Shown(columns.to_pandas(types_mapper=whole_numbers.get), empty)


def metrics(name: str, values: Mapping[str, Any]) -> Shown:
    """Keep named values (plain, possibly nested) as `metrics/<name>.json`, and return them for display.

    Raises:
        SealedError: the run has ended.
    """
    import pandas as pd

    RunFolder.current().write_json(f"metrics/{name}.json", dict(values))
    return Shown(pd.DataFrame([{"name": key, "value": value} for key, value in _flat(values)]))


def figure(name: str, drawing: Figure, alt: str = "") -> Image:
    """Keep a figure as `figures/<name>.png`, and return that picture for display; `alt` says in words what it shows.

    Raises:
        SealedError: the run has ended.
    """
    from IPython.display import Image

    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=_DPI, facecolor="white")
    RunFolder.current().write(f"figures/{name}.png", buffer.getvalue())
    width = round(drawing.get_figwidth() * 96)  # CSS pixels; the picture itself is sharper
    return Image(data=buffer.getvalue(), format="png", width=width, alt=alt or name.replace("_", " "))  # type: ignore[no-untyped-call]


def shown(value: Any) -> str:
    """A value in a table: three significant digits, no exponent, a dash for nothing."""
    if hasattr(value, "tolist"):  # numpy's, as they come back from a file
        value = value.tolist()
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "–"
    if isinstance(value, (int, float)):
        return _shown_number(value)
    return str(value)


def bounded(value: float | None, low: float | None, high: float | None) -> str:
    """A figure beside its interval: `1.23 [1.10, 1.41]`, `1.23 [≥ 1.10]` where there is one bound, a dash for none."""
    if value is None or (low is None and high is None):
        return shown(value)
    if high is None:
        return f"{shown(value)} [≥ {shown(low)}]"
    return f"{shown(value)} [≤ {shown(high)}]" if low is None else f"{shown(value)} [{shown(low)}, {shown(high)}]"


def _width(texts: Iterable[str]) -> str:
    """The class of a column's cells, by the longest of them."""
    longest = max(map(len, texts))
    return "short" if longest <= _SHORT else "long" if longest <= _LONG else "text"


def _row(values: Iterable[str], widths: Iterable[str]) -> str:
    return "".join(
        f'<td class="{width}">{html.escape(value)}</td>' for value, width in zip(values, widths, strict=True)
    )


def _shown_number(value: int | float) -> str:
    if isinstance(value, int) or not math.isfinite(value):
        return f"{value:,}".replace(",", _THIN_SPACE)
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace(",", _THIN_SPACE)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested mappings as dotted names, in order; lists of mappings by number."""
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            rows += _flat({str(number): item for number, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value))
    return rows
