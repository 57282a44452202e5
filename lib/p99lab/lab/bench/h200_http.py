"""The cases of `p99lab bench h200` over HTTP: one clients' process sends token ids to a server, ours or a peer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from p99lab.errors import P99labError
from p99lab.lab.bench.h200_sizes import CASES, ON_DOCUMENTS, OVER_HTTP, H200Bench
from p99lab.probe.client_process import ClientJob, ClientProcess
from p99lab.probe.openai_target import TargetSpec
from p99lab.probe.records import RequestRecord
from p99lab.probe.stats import gaps, measured, ttft
from p99lab.probe.workload import ClosedLoad, Workload

Tell = Callable[[str], None]
FIRST_QUERY = 1_000_000  # far from what is asked in process
QUERIES_A_CASE = 10_000


@dataclass(frozen=True, slots=True)
class Sample:
    """The median of `n` times, seconds."""

    p50_s: float
    n: int


@dataclass(frozen=True, slots=True)
class _Case:
    """What is sent, by how many clients, and what of the answers is the case's figure. `num_requests`: after one that
    warms up, where there is one client; all of them at once, where there are many."""

    workload: Workload
    num_clients: int
    num_requests: int
    times: Callable[[list[RequestRecord]], list[float]]

    @property
    def load(self) -> ClosedLoad:
        warmup_share = 1e-6 if self.num_clients == 1 < self.num_requests else 0.0
        return ClosedLoad(
            num_requests=self.num_requests, concurrency=self.num_clients, warmup_share=warmup_share, cache="mixed"
        )

    @property
    def num_sent(self) -> int:
        return self.num_requests + self.load.num_warmup_requests(self.num_clients)


def measure(
    bench: H200Bench, cases: Iterable[str], server: TargetSpec, prime: bool, tell: Tell
) -> Mapping[str, Sample]:
    """The times that clients of a server see, by case.

    Args:
        prime: send each document once before.

    Raises:
        TargetError: the server cannot be reached.
        P99labError: it has answered none of a case's requests.
    """
    chosen = [name for name in CASES if name in OVER_HTTP and name in cases]
    found: dict[str, Sample] = {}
    with ClientProcess() as clients:
        for name in chosen:
            tell(f"{name}: {CASES[name]}")
            needs_priming = prime and name in ON_DOCUMENTS and not found.keys() & ON_DOCUMENTS
            run = clients.run(_job(bench, name, server, needs_priming))
            found[name] = _sample(name, _cases(bench)[name].times(measured(run.records)))
    return found


def _cases(bench: H200Bench) -> dict[str, _Case]:
    enough = -(-bench.num_alone_steps // (bench.answer_len - 1))
    first_only = bench.shared.model_copy(update={"answer_tokens": (2, 2)})
    return {
        "itl-1": _Case(bench.shared, 1, enough, _gaps),
        "ttft-1": _Case(first_only, 1, bench.num_questions, _first_tokens),
        "itl-64": _Case(bench.shared, bench.num_requests, bench.num_requests, _gaps),
        "itl-short": _Case(bench.short, bench.num_requests, bench.num_requests, _gaps),
        "cold": _Case(bench.whole, 1, 1, _first_tokens),
    }


def _job(bench: H200Bench, name: str, server: TargetSpec, prime: bool) -> ClientJob:
    case, place = _cases(bench)[name], list(CASES).index(name)
    documents = bench.shared if name in ON_DOCUMENTS else case.workload
    return ClientJob(
        target=server,
        workload=documents,
        asked=case.workload,
        load=case.load,
        first_query=FIRST_QUERY + place * QUERIES_A_CASE,
        num_queries=case.num_sent,
        prime=prime,
    )


def _gaps(records: list[RequestRecord]) -> list[float]:
    found: list[float] = gaps(records).tolist()
    return found


def _first_tokens(records: list[RequestRecord]) -> list[float]:
    return [ttft(record) for record in records]


def _sample(name: str, times_s: list[float]) -> Sample:
    answered = [value for value in times_s if np.isfinite(value)]
    if not answered:
        raise P99labError(f"{name}: none of its requests was answered")
    return Sample(float(np.median(answered)), len(answered))
