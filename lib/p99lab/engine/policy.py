"""Who comes first: a policy is a sort key over requests, smaller first.

The waiting request of the smallest key is admitted next; the running request of the largest key gives way when pages
run out. Keys end in the request's number, so that no two are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from p99lab.engine.request import Request

Policy = Callable[[Request, float], tuple[float, ...]]
Urgency = Callable[[Request], float]
"""The part of a policy's key before arrival. A short prompt may pass a long one only if both have the same."""


def fcfs(request: Request, now: float) -> tuple[float, ...]:
    """First come, first served, by intended arrival."""
    return (request.timeline.arrival_s, request.number)


def priority(request: Request, now: float) -> tuple[float, ...]:
    """The smaller `priority` first, then first come, first served."""
    return (_priority(request), *fcfs(request, now))


def deadline(request: Request, now: float) -> tuple[float, ...]:
    """The earliest deadline first; requests without one last, first come, first served."""
    return (_deadline_s(request), *fcfs(request, now))


def _equal(request: Request) -> float:
    return 0.0


def _priority(request: Request) -> float:
    return request.priority


def _deadline_s(request: Request) -> float:
    return math.inf if request.deadline_s is None else request.deadline_s


POLICIES: Mapping[str, Policy] = MappingProxyType({"fcfs": fcfs, "priority": priority, "deadline": deadline})
URGENCIES: Mapping[str, Urgency] = MappingProxyType({"fcfs": _equal, "priority": _priority, "deadline": _deadline_s})
