"""What the target's cache held, checked against what the load declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p99lab.probe.load import Run
from p99lab.probe.records import Outcome, RequestRecord
from p99lab.probe.workload import CacheState

COLD_SHARE, COLD_TOKENS = 0.01, 32  # of a prompt, found by accident: a template's head, a line's first token
PRIMED_SHARE = 0.90  # of the documents' tokens; block caches round down
KNOWN_QUESTIONS_SHARE = 0.05  # of the requests: above, the cache held what only this run should have asked
KNOWN_QUESTIONS_COUNT = 3  # and at least so many: in a dozen requests, one is more than 5 %


@dataclass(frozen=True, slots=True)
class HitRates:
    """What the target's cache held. `verdict`: as declared, contaminated, or unknown where nothing is reported.

    `cached_share`: of the measured prompts' tokens. `document_share`: of what a primed cache would hold, the documents.
    `known_questions`: share of the requests whose question was cached too, for the most part: it had been asked before.
    `counter_share`: by the target's own totals over the whole run, warm-up included.
    """

    declared: CacheState
    verdict: str
    cached_share: float | None
    document_share: float | None
    known_questions: float | None
    counter_share: float | None
    reason: str | None = None

    @classmethod
    def of(cls, records: Sequence[RequestRecord], run: Run, declared: CacheState) -> HitRates:
        known = _with_hits_reported(records, run)
        counters = _counter_share(run)
        cached = sum(record.num_cached_tokens or 0 for record in known)
        prompts = sum(record.num_prompt_tokens for record in known)
        documents = sum(min(record.num_document_tokens, record.num_prompt_tokens) for record in known)
        share = cached / prompts if prompts else counters
        of_documents = min(1.0, cached / documents) if documents else None
        num_asked_before = sum(map(_question_known, known))
        asked_before = num_asked_before / len(known) if known else None
        allowed = COLD_SHARE + (COLD_TOKENS * len(known) / prompts if prompts else 0.0)
        shown = asked_before if num_asked_before >= KNOWN_QUESTIONS_COUNT else None
        verdict, reason = _cache_verdict(declared, share, of_documents, shown, allowed)
        return cls(declared, verdict, share, of_documents, asked_before, counters, reason)


def _with_hits_reported(records: Sequence[RequestRecord], run: Run) -> list[RequestRecord]:
    """Answered requests whose hits are known; none where the target tells them of no request.

    Where it does, a request without a number found nothing: vLLM leaves the number out when it is 0.
    """
    if all(record.num_cached_tokens is None for record in run.records):
        return []
    return [record for record in records if record.outcome is Outcome.OK]


def _question_known(record: RequestRecord) -> bool:
    """More than half of what follows the document was cached; lengths may be estimates, hence the half."""
    question = record.num_prompt_tokens - record.num_document_tokens
    return record.num_prompt_tokens - (record.num_cached_tokens or 0) < question / 2


def _cache_verdict(
    declared: CacheState,
    share: float | None,
    of_documents: float | None,
    asked_before: float | None,
    allowed: float,
) -> tuple[str, str | None]:
    if declared == "mixed":
        return "as declared", None
    if share is None:
        return "unknown", "the target reports no cache hits"
    if declared == "cold" and share > allowed:
        return "contaminated", f"declared cold, but {share:.1%} of the prompts' tokens were cached"
    held = share if of_documents is None else of_documents
    if declared == "primed" and held < PRIMED_SHARE:
        return "contaminated", f"declared primed, but only {held:.1%} of the documents' tokens were cached"
    if declared == "primed" and asked_before is not None and asked_before > KNOWN_QUESTIONS_SHARE:
        known = f"{asked_before:.0%} of the questions had been asked before"
        return "contaminated", f"declared primed, but {known}: --repetition N asks others"
    return "as declared", None


def _counter_share(run: Run) -> float | None:
    queried, cached = (
        run.counters_after.get(name, 0) - run.counters_before.get(name, 0)
        for name in ("num_queried_tokens", "num_cached_tokens")
    )
    return cached / queried if queried > 0 else None
