"""The known servers by name: what `coverage` and `peers` measure, and under which load."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from p99lab.lab.proof.laws import (
    Either,
    Erlang,
    Independent,
    Later,
    Law,
    Lockstep,
    Lognormal,
    Pareto,
    Stalling,
    StandsStillOnce,
    quantile,
)
from p99lab.probe.documents import Passage
from p99lab.probe.stats import QUANTILES
from p99lab.probe.workload import Load, OpenLoad, Query, arrivals, parse_load

PERCENTILES = ("p50", "p99")
PROMPT = "How long does it take?"
ONE_STALL = "one 2 s stall"
Make = Callable[[np.random.Generator], Law]


@dataclass(frozen=True)
class Case:
    """A law, the load that meets it, and the metrics whose truth it tells."""

    says: str
    make: Make
    load: Load
    metrics: tuple[str, ...] = ("e2e",)
    num_tokens: int = 1

    def law(self, seed: int) -> Law:
        return self.make(np.random.default_rng([seed, 11]))

    def truths(self) -> dict[tuple[str, str], float]:
        """The true percentiles by metric and name, seconds."""
        laws = self.law(0).truth()
        return {(metric, p): quantile(laws[metric], QUANTILES[p]) for metric in self.metrics for p in PERCENTILES}

    def queries(self, seed: int) -> Iterator[Query]:
        """One prompt again and again, at the load's arrivals of that seed."""
        first = Query(0, 0, Passage.of(PROMPT, None), 0, self.num_tokens, ignore_eos=True)
        times = arrivals(self.load, seed) if isinstance(self.load, OpenLoad) else None
        for index in itertools.count():
            yield replace(first, index=index, intended_s=next(times) if times else None)


def _open(**values: Any) -> Load:
    return parse_load({"kind": "open", "cache": "mixed", **values})


_WORK = Lognormal(0.1, 0.3)
_STEP = Erlang(0.1, 8)

CASES: Mapping[str, Case] = MappingProxyType(
    {
        "light": Case("Erlang", lambda rng: Independent(Erlang(0.1, 9), rng), _open(rate=20, num_requests=500)),
        "heavy tail": Case(
            "Pareto, alpha 2", lambda rng: Independent(Pareto(0.05, 2.0), rng), _open(rate=20, num_requests=500)
        ),
        "bimodal": Case(
            "one in ten is ten times as slow",
            lambda rng: Independent(Either(Lognormal(0.05, 0.2), Lognormal(0.5, 0.2), 0.1), rng),
            _open(rate=20, num_requests=500),
        ),
        "slow first chunk": Case(
            "at least 300 ms to the first token, 5 ms between two",
            lambda rng: Independent(Later(0.3, Lognormal(0.1, 0.6)), rng, Erlang(0.005, 4)),
            _open(rate=20, num_requests=500),
            ("ttft", "itl"),
            num_tokens=4,
        ),
        "2 s stalls": Case(
            "the whole server stands still every 40 s on the average, 30 times a run",
            lambda rng: Stalling(_WORK, rng, 2.0, 38.0),
            _open(rate=5, num_requests=6000),
        ),
        ONE_STALL: Case(
            "the whole server stands still, once",
            lambda rng: StandsStillOnce(Lognormal(0.05, 0.3), rng, 2.0, 10.0, (2.0, 20.0)),
            _open(rate=30, duration_s=20.0, warmup_share=0.1),
        ),
        "lockstep, closed": Case(
            "4 clients answered together",
            lambda rng: Lockstep(_STEP, rng, "closed"),
            parse_load({"kind": "closed", "concurrency": 4, "num_requests": 2000, "cache": "mixed"}),
        ),
        "lockstep, open": Case(
            "batches of all that came meanwhile, 4 on the average",
            lambda rng: Lockstep(_STEP, rng, "open"),
            _open(rate=40, num_requests=2000),
        ),
    }
)
