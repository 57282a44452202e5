"""A sweep over a queue of known saturation, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p99lab.lab.proof import virtual_clock
from p99lab.probe.command import ProbeResult, SessionHere
from p99lab.probe.options import ProbeOptions
from p99lab.probe.slo import Slo
from p99lab.probe.sweep import Sweep, SweepResult, over, parse_rates
from p99lab.probe.workload import make_documents
from tests.probe.conftest import FakeTarget

OPTIONS = {
    "target": "in-process",
    "documents": 3,
    "document_tokens": (200, 300),
    "question_tokens": (20, 30),
    "answer_tokens": (4, 4),
    "random_tokens": 997,
    "timeout_s": 120.0,
    "concurrency": 8,
}
A_SECOND = (0.7, 0.1)  # to the first of four tokens, and to each after it


def swept(
    rates: str,
    slo: Slo | None = None,
    tell: Callable[[str], None] = lambda line: None,
    on_point: Callable[[str, ProbeResult], None] = lambda name, result: None,
    target: FakeTarget | None = None,
    slots: int = 4,
    **changes: Any,
) -> SweepResult:
    """Over `slots` servers of a fixed second each: saturation is `slots` requests per second."""

    async def main() -> SweepResult:
        options = ProbeOptions.parse({**OPTIONS, **changes})
        served = target or FakeTarget(plan=lambda query: A_SECOND, slots=slots)
        clock = asyncio.get_running_loop().time
        # A sleep to just after an arrival: one to it can end before it, by a rounding of the sum.
        session = SessionHere(served, make_documents(options.workload), clock, spin_s=-1e-9)
        numbers, of_capacity = parse_rates(rates)
        return await over(
            session, Sweep(probe=options, rates=numbers, of_capacity=of_capacity, slo=slo), tell, on_point
        )

    return virtual_clock.run(main)
