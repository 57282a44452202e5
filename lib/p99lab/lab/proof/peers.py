"""guidellm and aiperf beside the probe: the same server, which draws the same latencies for each, and the same load.

Where two tools define a figure alike they must agree; where not, `EXPLAINS` says how they differ. Percentiles, for
which each takes another rank, are made anew of the peer's own values, one per request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from p99lab.engine import model_store
from p99lab.lab.proof import real_runs
from p99lab.lab.proof.cases import CASES, ONE_STALL
from p99lab.lab.proof.check import Check
from p99lab.lab.proof.environments import PeerEnvironmentError
from p99lab.lab.proof.known_server import MODEL, serving
from p99lab.lab.proof.peer_tools import PEERS, Assignment, Measured, Peer, PeerError
from p99lab.probe.client_process import ClientProcess
from p99lab.probe.intervals import percentile
from p99lab.probe.stats import LATENESS_LIMIT_S, QUANTILES, Summary
from p99lab.probe.workload import Load, OpenLoad, parse_load

EXPLAINS = """Definitions, as their code has them:

| | p99lab probe | guidellm 0.8 | aiperf 0.13 |
|---|---|---|---|
| clock of TTFT and E2E starts | at the intended arrival (`…_from_send`: at the send) | at the send | at the send |
| E2E from the intended arrival | E2E | `request_scheduled_latency`; no such TTFT | none |
| the send | before a connection is had | once it is had, before the headers | before a connection is had |
| ITL | each gap between two tokens | a request's mean gap, counted once per token | a request's mean gap |
| a request's mean gap | TPOT | ITL (its TPOT: send to last token, over all tokens) | ITL |
| its end | end of the stream | last token | last token |
| end of E2E | end of the stream | end of the stream | last token |
| P99 of 400 values | the 396th | the 397th | between the 396th and the 397th |
| failed requests | slower than any answered one | figures of their own | left out; infinite in `adj_…` |
| warm-up | 10 %, no pause before what counts | none unless asked | none unless asked |
| interval of a percentile | 95 %, correlation counted | 95 %, as if independent; none of ITL | over repeated runs |

What may differ. Every tool's requests get the same latencies, drawn one by one in the order in which they come, so
that equal ranks are the same draw, and what is left is the clients' own:

- TTFT and E2E: 5 ms, as late as clients may be before the probe calls a run void. It covers the send (a connection)
  and the end of E2E (what follows the last token; of answers of one token, E2E less TTFT shows it).
- TPOT: 1 ms. What follows the last token, 3 ms at the most, is in ours alone, divided by three gaps.
- P99 under a stall and an open load: a gap between two arrivals more. Each request that waits for the end of the stall
  waits one gap less than the one before, and one more or fewer may come into it.
"""
SEED = 1
TPOT_TOLERANCE_S = 0.001
OURS = MappingProxyType({"ttft": "ttft_from_send", "e2e": "e2e_from_send", "tpot": "tpot"})


@dataclass(frozen=True)
class Meeting:
    """One server and load that every tool gets, and the metrics in which their definitions agree."""

    case: str
    load: Load
    metrics: tuple[str, ...] = ("ttft", "e2e")

    def tolerance(self, metric: str, p: str) -> tuple[float, str]:
        """How far two tools may lie apart, seconds, and why."""
        if metric == "tpot":
            gaps = CASES[self.case].num_tokens - 1
            after = f"{1000 * gaps * TPOT_TOLERANCE_S:g} ms from the last token to the end of the stream"
            return TPOT_TOLERANCE_S, f"{after}, over {gaps} gaps"
        clients = f"{1000 * LATENESS_LIMIT_S:g} ms: as late as clients may be"
        if p == "p99" and self.case == ONE_STALL and isinstance(self.load, OpenLoad):
            gap_s = 1.0 / self.load.rate
            return LATENESS_LIMIT_S + gap_s, f"{clients}; {_ms(gap_s)} ms: one request more or fewer in the stall"
        return LATENESS_LIMIT_S, clients


def _load(kind: str, **values: float | str) -> Load:
    return parse_load({"kind": kind, "num_requests": 400, "warmup_share": 0.0, "cache": "mixed", **values})


MEETINGS: Mapping[str, Meeting] = MappingProxyType(
    {
        "light, open": Meeting("light", _load("open", rate=20.0, arrivals="constant")),
        "heavy tail, open": Meeting("heavy tail", _load("open", rate=20.0, arrivals="constant")),
        "heavy tail, Poisson": Meeting("heavy tail", _load("open", rate=20.0)),
        "slow first chunk, open": Meeting(
            "slow first chunk", _load("open", rate=20.0, arrivals="constant"), ("ttft", "e2e", "tpot")
        ),
        "2 s stall, open": Meeting(ONE_STALL, _load("open", rate=30.0, arrivals="constant", num_requests=600)),
        "2 s stall, closed": Meeting(ONE_STALL, _load("closed", concurrency=4, num_requests=1000)),
    }
)


def checks(work: Path) -> Iterator[Check]:
    tokenizer = model_store.fetch("smollm2-135m")
    peers = []
    for peer in PEERS.values():
        try:
            peer.programs()
            peers.append(peer)
        except PeerEnvironmentError as error:
            yield Check(peer.name, f"{peer.requirement} installs", "it does not", False, str(error))
    with ClientProcess() as clients:
        for name, meeting in MEETINGS.items():
            ours = real_runs.measured(clients, meeting.case, SEED, meeting.load)
            yield from _differences(name, ours)
            for peer in peers:
                yield from _compared(name, meeting, ours, peer, tokenizer, work / peer.name / re.sub(r"\W+", "-", name))


def _compared(name: str, meeting: Meeting, ours: Summary, peer: Peer, tokenizer: Path, work: Path) -> Iterator[Check]:
    try:
        with serving(meeting.case, SEED) as url:
            theirs = peer.measure(Assignment(url, MODEL, meeting.load, CASES[meeting.case].num_tokens, tokenizer), work)
    except PeerError as error:
        yield Check(f"{name}: {peer.name}", "measures", "does not", False, str(error))
        return
    yield from agreements(f"{name}: {peer.name}", meeting, ours, theirs)


def agreements(name: str, meeting: Meeting, ours: Summary, theirs: Measured) -> Iterator[Check]:
    """Their figures beside ours, where the definitions agree."""
    counted, answered = ours.metrics["e2e"].n, len(theirs.values.get("e2e", ()))
    found = f"{answered} answered, {theirs.num_failed} failed"
    passed = counted == answered and theirs.num_failed == 0
    yield Check(f"{name}, requests", f"{counted} answered, 0 failed", found, passed)
    for metric in meeting.metrics:
        for p in ("p50", "p99"):
            figure, values = ours.metrics[OURS[metric]].percentiles[p], theirs.values.get(metric)
            other = None if values is None else percentile(values, QUANTILES[p])
            if figure.value is None or other is None or other.value is None:
                yield Check(f"{name}, {metric} {p}", "both give it", "one does not", False, figure.reason or "")
                continue
            allowed_s, why = meeting.tolerance(metric, p)
            yield Check(
                f"{name}, {metric} {p}",
                f"{_ms(figure.value)} ± {_ms(allowed_s)} ms",
                f"{_ms(other.value)} ms",
                abs(other.value - figure.value) <= allowed_s,
                f"{why}; ours: {OURS[metric]}; it reports {_ms(theirs.reported.get((metric, p)))} ms of these values",
            )


def _differences(name: str, ours: Summary) -> Iterator[Check]:
    """What the probe says besides: its interval, and how late its own clients were."""
    e2e, late_s = ours.metrics["e2e"].percentiles["p99"], ours.lateness.p99_at_least_s
    interval = f"{_ms(e2e.low)} to {_ms(e2e.high)} ms, {e2e.n} requests worth {e2e.effective_n}"
    late = "from the send: a closed load intends no arrivals"
    late = late if late_s is None else f"from the intended arrival; clients late by a P99 of {_ms(late_s)} ms"
    found = f"{_ms(e2e.value)} ms ({interval})"
    yield Check(f"{name}: p99lab, e2e p99", "a figure with its interval", found, e2e.low is not None, late)


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1000 * seconds:.1f}"
