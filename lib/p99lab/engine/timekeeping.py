"""Who is charged for a stretch of the engine's time: see `Timeline` for the shares.

Steps run one after the other. One that was launched while another ran begins when that one has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from p99lab.engine.plan import StepPlan
from p99lab.engine.request import Request, Status, TimeShare
from p99lab.engine.scheduler_output import ScheduleOutcome


def book_launch(outcome: ScheduleOutcome, now_s: float) -> None:
    """The time up to the launch of a step while no other runs."""
    admitted = set(outcome.admitted)
    for request in outcome.preempted:
        request.timeline.book(TimeShare.SCHEDULING, now_s)
        request.timeline.num_preemptions += 1
    for request in outcome.running:
        if request in admitted:
            _book_queue(request, now_s)
        else:
            request.timeline.book(TimeShare.SCHEDULING, now_s)


def book_step(running: Iterable[Request], plan: StepPlan, next_admitted: Iterable[Request], now_s: float) -> None:
    """The time of a step that has ended, before its result is taken in.

    `running`: all that hold pages now. `next_admitted`: those of them who were let in while it ran, to the step that
    begins now.
    """
    starts = {row.number: row.num_computed_tokens for row in plan.rows}
    queued = set(next_admitted)
    for request in running:
        if request in queued:
            _book_queue(request, now_s)
        else:
            request.timeline.book(_share(request, starts.get(request.number)), now_s)


def book_end(request: Request, running: StepPlan | None, now_s: float) -> None:
    """The time up to an end that comes from outside, perhaps while a step runs."""
    if request.status is not Status.RUNNING:
        share = TimeShare.QUEUE
    elif running is None:
        share = TimeShare.SCHEDULING
    else:
        starts = (row.num_computed_tokens for row in running.rows if row.number == request.number)
        share = _share(request, next(starts, None))
    request.timeline.book(share, now_s)


def _book_queue(request: Request, now_s: float) -> None:
    timeline = request.timeline
    timeline.book(TimeShare.QUEUE, now_s)
    if timeline.admitted_s is None:
        timeline.admitted_s = now_s


def _share(request: Request, start: int | None) -> TimeShare:
    """What a step was to a request that computed tokens from `start` on in it (None: no tokens)."""
    if start is None:
        timeline = request.timeline
        return TimeShare.STALLED if timeline.prefill_s or timeline.decode_s else TimeShare.QUEUE
    return TimeShare.PREFILL if start < request.num_prompt_tokens else TimeShare.DECODE
