"""The prefix groups of rows that stay in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from p99lab.engine.grouping import arrange
from p99lab.engine.plan import PrefixGroup, Row


def group_rows(rows: Sequence[Row], page_size: int, min_shared_tokens: int) -> tuple[PrefixGroup, ...]:
    """As `arrange` finds them, each named by its rows' places in `rows`."""
    order, groups = arrange(rows, page_size, min_shared_tokens)
    return tuple(replace(group, rows=tuple(sorted(order[i] for i in group.rows))) for group in groups)
