"""How often the steady-window test accepts stationary series and rejects drifting ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from p99lab.lab.proof.check import Check
from p99lab.probe.intervals import FloatArray
from p99lab.probe.steady import steady_window

Make = Callable[..., FloatArray]  # of a generator of random numbers
NUM_REQUESTS, NUM_SERIES = 400, 1000
_LEVEL = 8.0


def independent(rng: np.random.Generator, n: int = NUM_REQUESTS) -> FloatArray:
    """Lognormal, sigma 0.3."""
    return np.asarray(rng.lognormal(0.0, 0.3, n))


def autoregressive(rng: np.random.Generator, n: int = NUM_REQUESTS, phi: float = 0.7) -> FloatArray:
    """Lognormal, sigma 0.3, whose logarithms are AR(1)."""
    noise = rng.normal(size=n) * math.sqrt(1.0 - phi**2)
    series = np.empty(n)
    series[0] = rng.normal()
    for at in range(1, n):
        series[at] = phi * series[at - 1] + noise[at]
    return np.exp(0.3 * series)


def lockstep(rng: np.random.Generator, n: int = NUM_REQUESTS, size: int = 8) -> FloatArray:
    """Batches of one latency each, lognormal, sigma 0.5; the series begins anywhere in one."""
    batches = np.repeat(rng.lognormal(0.0, 0.5, n // size + 2), size)
    skip = int(rng.integers(size))
    return np.asarray(batches[skip : skip + n] * (1.0 + 1e-6 * rng.random(n)))


def drifting(make: Make, factor: float) -> Make:
    """A series whose level goes in a straight line from 1 to `factor`."""
    return lambda rng: (series := make(rng)) * np.linspace(1.0, factor, len(series))


@dataclass(frozen=True)
class Claim:
    """`verdict` in at least `at_least` of the series of a kind."""

    make: Make
    verdict: str
    at_least: float


CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {
        "independent": Claim(independent, "steady", 0.98),
        "AR(1), 0.7": Claim(autoregressive, "steady", 0.94),
        "lockstep, batches of 8": Claim(lockstep, "steady", 0.94),
        "independent, to 1.5": Claim(drifting(independent, 1.5), "drifting", 0.6),
        "independent, to 2": Claim(drifting(independent, 2.0), "drifting", 0.9),
        "AR(1), 0.7, to 2": Claim(drifting(autoregressive, 2.0), "drifting", 0.75),
        "lockstep, 1600, to 2": Claim(drifting(partial(lockstep, n=1600), 2.0), "drifting", 0.75),
    }
)


def checks() -> Iterator[Check]:
    for name, claim in CLAIMS.items():
        counts = verdicts(claim.make, NUM_SERIES)
        share = counts[claim.verdict] / NUM_SERIES
        others = ", ".join(f"{other} {number / NUM_SERIES:.1%}" for other, number in counts.items())
        expected = f"{claim.verdict} in at least {claim.at_least:.0%} of {NUM_SERIES} series"
        yield Check(f"steady window: {name}", expected, f"{share:.1%}", share >= claim.at_least, others)


def verdicts(make: Make, num_series: int, seed: int = 31) -> Counter[str]:
    """Verdicts on latency series of a kind, at a constant concurrency."""
    rng = np.random.default_rng(seed)
    return Counter(_verdict(make(rng)) for _ in range(num_series))


def _verdict(series: FloatArray) -> str:
    order = np.arange(len(series), dtype=np.float64)
    return steady_window(order, series, np.full(len(series), _LEVEL)).verdict
