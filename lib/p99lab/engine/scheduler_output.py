"""What a scheduler says of its steps: whom it admitted, what was sampled, and its counters since the start."""

from __future__ import annotations

from dataclasses import dataclass

from p99lab.engine.request import Logprobs, Request


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """What was done for the latest plan. `running` hold pages while its step runs, scheduled or not."""

    running: tuple[Request, ...] = ()
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that a step has sampled for a request, which may have ended with it (`request.finish_reason`)."""

    request: Request
    token_id: int
    logprobs: Logprobs | None


@dataclass(slots=True)
class Counters:
    """Since the start. Queries count each request that may read the cache once, at its first admission."""

    num_queries: int = 0
    num_hits: int = 0  # queries that found at least one token
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_page_waits: int = 0  # admissions that had to wait for pages, however long
