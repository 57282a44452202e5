"""The scheduler's accounts: what steps in flight hold, and the proof that pages and requests add up."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import IntArray, Request, Status
from p99lab.errors import AccountingError


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step in flight, the requests of its rows, and what is given back when it has ended."""

    plan: StepPlan
    requests: tuple[Request, ...]
    leaving: list[Request] = field(default_factory=list)  # have ended, and still hold their pages
    replaced: list[IntArray] = field(default_factory=list)  # pages that no page table holds any more


def check_accounts(
    tree: PrefixTree,
    live: Mapping[str, Request],
    waiting: Sequence[Request],
    running: Sequence[Request],
    in_flight: Collection[PlannedStep],
) -> None:
    """Prove all accounts: pages against tree, page tables and copies, and every request's place and progress.

    Args:
        live: all requests that have not ended, by their ids.
        in_flight: oldest first.

    Raises:
        AccountingError: anything that does not add up.
    """
    leaving = [request for step in in_flight for request in step.leaving]
    tables = [request.pages for request in (*running, *leaving)]
    replaced = [pages for step in in_flight for pages in step.replaced]
    tree.check([*tables, *replaced], [copy for step in in_flight for copy in step.plan.copies])
    for request in (*running, *waiting):
        is_known = live.get(request.request_id) is request
        is_placed = any(request is other for other in (running if request.status is Status.RUNNING else waiting))
        _check_request(request, is_known, is_placed, _rows(request, in_flight), tree.pool.page_size)
    if len(live) != len(running) + len(waiting):
        raise AccountingError("a live request neither waits nor runs")
    if any(request.status is not Status.FINISHED for request in leaving):
        raise AccountingError("a live request gives its pages back")


def _rows(request: Request, in_flight: Collection[PlannedStep]) -> list[Row]:
    """The request's rows of steps in flight, oldest first."""
    return [
        row for step in in_flight for row, owner in zip(step.plan.rows, step.requests, strict=True) if owner is request
    ]


def _check_request(request: Request, is_known: bool, is_placed: bool, rows: Sequence[Row], page_size: int) -> None:
    is_running = request.status is Status.RUNNING
    num_computed = request.num_computed_tokens - sum(row.num_scheduled_tokens for row in rows)  # and taken in
    starts, stops = [row.num_computed_tokens for row in rows], [row.seq_len for row in rows]
    num_due = min(request.num_tokens + request.num_placeholders, len(request.tokens) - 1)
    num_slots = request.num_pages * page_size
    num_sampling = sum(row.samples for row in rows)
    for ok, problem in (
        (is_known, "is not known"),
        (request.status is not Status.FINISHED, "has finished"),
        (is_placed, "is misplaced"),
        (is_running or request.num_pages == 0, "waits and holds pages"),
        (is_running or request.num_computed_tokens == 0, "waits and counts computed tokens"),
        (is_running or not rows, "waits and is in flight"),
        (num_computed < request.num_tokens, "has nothing to compute"),
        (num_computed <= request.num_reusable_tokens, "has computed tokens and not scored them"),
        (request.num_due_tokens == num_due, "is to compute other tokens than are due"),
        (request.num_computed_tokens <= request.num_due_tokens, "computes tokens that are not due"),
        (request.num_computed_tokens <= num_slots, "has computed more than its pages hold"),
        (request.num_placeholders == num_sampling, "has placeholders that no step in flight fills"),
        ([num_computed, *stops] == [*starts, request.num_computed_tokens], "has a gap between its steps"),
    ):
        if not ok:
            raise AccountingError(f"request '{request.request_id}' {problem}")
