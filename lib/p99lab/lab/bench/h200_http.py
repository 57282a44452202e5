"""The cases of `p99lab bench h200` over HTTP: one clients' process sends token ids to a server, ours or a peer's.

A case has a figure where every answer is whole and as long as it was asked for, and the server's cache held what the
case says. Else it has a reason.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from p99lab.lab.bench.h200_sizes import CASES, ON_DOCUMENTS, OVER_HTTP, H200Bench
from p99lab.probe.client_process import ClientJob, ClientProcess
from p99lab.probe.openai_target import TargetSpec
from p99lab.probe.records import Outcome, RequestRecord
from p99lab.probe.stats import gaps, measured, ttft
from p99lab.probe.workload import ClosedLoad, Workload

Tell = Callable[[str], None]
FIRST_QUERY = 1_000_000  # far from what is asked in process
QUERIES_A_CASE = 10_000
TOLERATED = 0.01  # of a prompt's tokens, found in the cache or not; of the answers', bundled with others unsaid
MOST_BUNDLED = 0.25  # of the answers' tokens: a median of gaps between chunks is one of gaps between tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """What stands for `n` times, seconds; NaN where there is nothing, and `failed` says why.

    `note`: what is to be known of it.
    """

    time_s: float
    n: int
    failed: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    """What is sent, by how many clients, and what of the answers is the case's figure: `stands_for` these `times`.

    `warms_up`: one more request comes before the `num_requests`. Many clients send all of theirs at once.
    """

    workload: Workload
    num_clients: int
    num_requests: int
    times: Callable[[Sequence[RequestRecord]], list[float]]
    warms_up: bool = False
    stands_for: Callable[[list[float]], float] = statistics.median

    @property
    def load(self) -> ClosedLoad:
        warmup_share = 1e-6 if self.warms_up else 0.0
        return ClosedLoad(
            num_requests=self.num_requests, concurrency=self.num_clients, warmup_share=warmup_share, cache="mixed"
        )

    @property
    def num_sent(self) -> int:
        return self.num_requests + self.load.num_warmup_requests(self.num_clients)


def measure(
    bench: H200Bench, cases: Iterable[str], clients: ClientProcess, server: TargetSpec, prime: bool, tell: Tell
) -> Iterator[tuple[str, Sample]]:
    """What the clients of a server see, case by case as soon as it is known.

    Args:
        prime: send each document once before the first case that asks about them.

    Raises:
        TargetError: the server cannot be reached.
    """
    for name in (name for name in CASES if name in OVER_HTTP and name in cases):
        tell(f"{name}: {CASES[name]}")
        needs_priming = prime and name in ON_DOCUMENTS
        run = clients.run(_job(bench, name, server, needs_priming))
        prime = prime and not needs_priming
        yield name, sample(bench, name, measured(run.records))


def sample(bench: H200Bench, name: str, records: Sequence[RequestRecord]) -> Sample:
    """A case's figure, from those of its records that count."""
    case = _cases(bench)[name]
    if (failed := _failed(name, case, records)) is not None:
        return Sample(math.nan, 0, failed)
    times_s = case.times(records)
    return Sample(case.stands_for(times_s), len(times_s), note=_bundled(case, records, TOLERATED))


def _cases(bench: H200Bench) -> dict[str, _Case]:
    enough = -(-bench.num_alone_steps // (bench.answer_len - 1))
    first_only = bench.shared.model_copy(update={"answer_tokens": (2, 2)})
    return {
        "itl-1": _Case(bench.shared, 1, enough, _gaps, warms_up=True),
        "ttft-1": _Case(first_only, 1, bench.num_questions, _first_tokens, warms_up=True),
        "itl-64": _Case(bench.shared, bench.num_requests, bench.num_requests, _gaps),
        "itl-short": _Case(bench.short, bench.num_requests, bench.num_requests, _gaps),
        "cold": _Case(bench.whole, 1, bench.num_cold, _first_tokens, stands_for=max),
    }


def _job(bench: H200Bench, name: str, server: TargetSpec, prime: bool) -> ClientJob:
    case = _cases(bench)[name]
    documents = bench.shared if name in ON_DOCUMENTS else case.workload
    return ClientJob(
        target=server,
        workload=documents,
        asked=case.workload,
        load=case.load,
        first_query=first_query(name),
        num_queries=case.num_sent,
        prime=prime,
    )


def first_query(name: str) -> int:
    """Where a case's stretch of the endless queries begins."""
    return FIRST_QUERY + list(CASES).index(name) * QUERIES_A_CASE


def _gaps(records: Sequence[RequestRecord]) -> list[float]:
    found: list[float] = gaps(records).tolist()
    return found


def _first_tokens(records: Sequence[RequestRecord]) -> list[float]:
    return [ttft(record) for record in records]


# --- why a case has no figure ---------------------------------------------------------------------------------------


def _failed(name: str, case: _Case, records: Sequence[RequestRecord]) -> str | None:
    """What keeps these records from being the case's; None: nothing."""
    bad = [record for record in records if record.outcome is not Outcome.OK]
    if len(records) < case.num_requests or bad:
        num_whole, first = len(records) - len(bad), f" ({bad[0].error or bad[0].outcome})" if bad else ""
        return f"{num_whole} of {case.num_requests} requests were answered{first}"
    short = [record for record in records if record.num_output_tokens != record.max_tokens]
    if short:
        lengths = f"{short[0].num_output_tokens} tokens of {short[0].max_tokens}"
        return f"{len(short)} of {len(records)} answers are not as long as asked for ({lengths})"
    return _bundled(case, records, MOST_BUNDLED) or _contaminated(name, records)


def _bundled(case: _Case, records: Sequence[RequestRecord], tolerated: float) -> str | None:
    """Tokens that came with others, or without a sign, where gaps are measured; None: no larger a share than that."""
    num_tokens = sum(record.num_output_tokens for record in records)
    num_bundled = sum(abs(record.num_output_tokens - len(record.token_times_s)) for record in records)
    if case.times is not _gaps or num_bundled <= tolerated * num_tokens:
        return None
    return f"{num_bundled} of {num_tokens} tokens had no time of their own"


def _contaminated(name: str, records: Sequence[RequestRecord]) -> str | None:
    """How the cache was not as the case says. Both servers tell what they have found there."""
    if name in ON_DOCUMENTS:
        found = [
            (record.num_cached_tokens or 0) >= (1.0 - TOLERATED) * record.num_document_tokens for record in records
        ]
        return None if all(found) else f"{found.count(False)} of {len(found)} documents were not in the cache"
    known = [(record.num_cached_tokens or 0) > TOLERATED * record.num_prompt_tokens for record in records]
    return f"{sum(known)} of {len(known)} prompts were in the cache" if any(known) else None
