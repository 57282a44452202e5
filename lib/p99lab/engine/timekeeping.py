"""Who is charged for a stretch of the engine's time: see `Timeline` for the shares."""

from __future__ import annotations

from p99lab.engine.plan import StepPlan
from p99lab.engine.request import Share
from p99lab.engine.scheduler import Turn


def book_host_time(turn: Turn, now_s: float) -> None:
    """The time up to the start of a step, once it is planned."""
    admitted = set(turn.admitted)
    for request in turn.preempted:
        request.timeline.book(Share.SCHEDULING, now_s)
        request.timeline.num_preemptions += 1
    for request in turn.running:
        timeline = request.timeline
        timeline.book(Share.QUEUE if request in admitted else Share.SCHEDULING, now_s)
        if timeline.admitted_s is None:
            timeline.admitted_s = now_s


def book_step(turn: Turn, plan: StepPlan, now_s: float) -> None:
    """The time of a step, before its result is taken in."""
    scheduled = {row.request_id for row in plan.rows}
    for request in turn.running:
        if request.request_id not in scheduled:
            share = Share.STALLED
        else:
            share = Share.PREFILL if request.is_prefill else Share.DECODE
        request.timeline.book(share, now_s)
