"""What the commands share: the console they print to, and the word for a missing extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from p99lab.errors import P99labError

out = Console(highlight=False, soft_wrap=True)


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Say in one line which extra brings a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise P99labError(
            f"{what} needs {error.name}: install the extra '{extra}' (in a checkout: pip install '.[{extra}]')"
        ) from None
