"""Who comes first: a policy is a sort key over requests, smaller first.

The waiting request of the smallest key is admitted next; the running request of the largest key gives way when pages
run out. Keys end in the request's number, so that no two are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from p99lab.engine.request import Request

Policy = Callable[[Request, float], tuple[float, ...]]


def fcfs(request: Request, now: float) -> tuple[float, ...]:
    """First come, first served, by intended arrival."""
    return (request.timeline.arrival_s, request.number)


def priority(request: Request, now: float) -> tuple[float, ...]:
    """The smaller `priority` first, then first come, first served."""
    return (request.priority, *fcfs(request, now))


def deadline(request: Request, now: float) -> tuple[float, ...]:
    """The earliest deadline first; requests without one last, first come, first served."""
    return (float("inf") if request.deadline_s is None else request.deadline_s, *fcfs(request, now))


POLICIES: Mapping[str, Policy] = MappingProxyType({"fcfs": fcfs, "priority": priority, "deadline": deadline})
