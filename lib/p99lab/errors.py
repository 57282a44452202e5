"""The errors a user can cause, each one line long and each with its exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class P99labError(Exception):
    """Something the user can act on: the command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class BadParameterError(P99labError):
    """A parameter, flag or config key that does not exist or does not fit."""

    exit_code = 2


class ModelError(P99labError):
    """A model that cannot be found, read or used; nothing of it stays loaded."""

    exit_code = 4


class EngineClosedError(P99labError):
    """An engine was used after its `close`, or in a process forked from its own."""


class EngineFailedError(P99labError):
    """An engine was used after one of its steps had failed. What it holds cannot be trusted: make a new one."""


class QueueFullError(P99labError):
    """As many requests wait as may wait. Nothing has changed: the same request may be sent again later."""


class AccountingError(RuntimeError):
    """An invariant of pages, tree or scheduler is broken. Never caught, never repaired."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `known`, or the empty string."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
