"""Tables of figures on the terminal: never cut, however narrow it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table

from p99lab.commands.console import out
from p99lab.probe.tables import HEADER

_WIDEST = 300  # columns; a narrower terminal wraps what does not fit


def figure_table(rows: Iterable[Sequence[str]], header: Sequence[str] = HEADER) -> None:
    table = Table(*header, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    table.width = Measurement.get(out, out.options.update(max_width=_WIDEST), table).maximum
    out.print(table, crop=False)
