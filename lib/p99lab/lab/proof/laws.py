"""Latencies whose every quantile is known: distributions, and the laws by which a server of them answers.

A law says when the tokens of a request come, given when it arrived; the same object drives a server over HTTP and one
on a virtual clock. `truth` gives the distribution function of what a client measures, in closed form, or as an integral
by the trapezoidal rule on at least `_STEPS` points. Its quantiles are found by bisection. All times are seconds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal, Protocol

import numpy as np

from p99lab.probe.intervals import FloatArray

_STEPS = 4001
_ROUNDING_S = 1e-6  # who comes back at the end of a batch came during it, whatever the clock's last digits
Cdf = Callable[[FloatArray], FloatArray]


class Distribution(Protocol):
    """Positive numbers. `cdf` takes and gives arrays."""

    def draw(self, rng: np.random.Generator) -> float: ...
    def cdf(self, x: FloatArray) -> FloatArray: ...


@dataclass(frozen=True)
class Erlang:
    """The sum of `shape` exponentials: light-tailed."""

    mean_s: float
    shape: int

    def draw(self, rng: np.random.Generator) -> float:
        return float(rng.gamma(self.shape, self.mean_s / self.shape))

    def cdf(self, x: FloatArray) -> FloatArray:
        scaled = np.maximum(x, 0.0) * (self.shape / self.mean_s)
        terms = [scaled**k / math.factorial(k) for k in range(self.shape)]
        return np.asarray(1.0 - np.exp(-scaled) * np.sum(terms, axis=0))


@dataclass(frozen=True)
class Lognormal:
    median_s: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(self.median_s * math.exp(self.sigma * rng.standard_normal()))

    def cdf(self, x: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            standard = (np.log(np.maximum(x, 0.0)) - math.log(self.median_s)) / self.sigma
        return np.asarray(np.vectorize(NormalDist().cdf, otypes=[np.float64])(standard))


@dataclass(frozen=True)
class Pareto:
    """P(X > x) = (least / x)^alpha: heavy-tailed, without a variance at alpha = 2."""

    least_s: float
    alpha: float

    def draw(self, rng: np.random.Generator) -> float:
        return float(self.least_s * (1.0 - rng.random()) ** (-1.0 / self.alpha))

    def cdf(self, x: FloatArray) -> FloatArray:
        return np.asarray(1.0 - (self.least_s / np.maximum(x, self.least_s)) ** self.alpha)


@dataclass(frozen=True)
class Either:
    """`rare` with probability `share`, else `common`."""

    common: Distribution
    rare: Distribution
    share: float

    def draw(self, rng: np.random.Generator) -> float:
        return (self.rare if rng.random() < self.share else self.common).draw(rng)

    def cdf(self, x: FloatArray) -> FloatArray:
        return (1.0 - self.share) * self.common.cdf(x) + self.share * self.rare.cdf(x)


@dataclass(frozen=True)
class Later:
    """A distribution, moved to the right."""

    by_s: float
    then: Distribution

    def draw(self, rng: np.random.Generator) -> float:
        return self.by_s + self.then.draw(rng)

    def cdf(self, x: FloatArray) -> FloatArray:
        return self.then.cdf(x - self.by_s)


def quantile(cdf: Cdf, q: float) -> float:
    """Where a continuous distribution function reaches q, to 1e-9 of itself."""
    low, high = 0.0, 1.0
    while float(cdf(np.array([high]))[0]) < q:
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if float(cdf(np.array([middle]))[0]) < q else (low, middle)
    return high


# --- laws -----------------------------------------------------------------------------------------------------------


class Law(Protocol):
    """How a server answers. `truth`: of the latencies that clients see, by metric of the probe.

    `token_times_s`: when the tokens of a request come that arrived at `arrival_s`, both on the server's clock, which
    starts at 0. It is asked in order of arrival.
    """

    def token_times_s(self, arrival_s: float, num_tokens: int) -> list[float]: ...
    def truth(self) -> dict[str, Cdf]: ...


@dataclass
class Independent:
    """Every request has its own time to the first token, and every further token its own gap; nothing queues."""

    first: Distribution
    rng: np.random.Generator
    gap: Distribution | None = None

    def token_times_s(self, arrival_s: float, num_tokens: int) -> list[float]:
        first_s = arrival_s + self.first.draw(self.rng)
        gaps = [self.gap.draw(self.rng) if self.gap else 0.0 for _ in range(num_tokens - 1)]
        return list(itertools.accumulate([first_s, *gaps]))

    def truth(self) -> dict[str, Cdf]:
        return {"ttft": self.first.cdf, **({"itl": self.gap.cdf} if self.gap else {"e2e": self.first.cdf})}


@dataclass
class Stalling:
    """A server that stands still for `stall_s` at a time, all of it; between stalls each request needs its own work.

    From one stall's end to the next one's begin it is an exponential time of mean `between_s`, regardless of arrivals,
    so that Poisson arrivals see the time average (Wolff 1982): a share of them waits for the rest of a stall, and some
    meet stalls during their work.
    """

    work: Distribution
    rng: np.random.Generator
    stall_s: float
    between_s: float
    begins_s: list[float] = field(default_factory=list)

    def token_times_s(self, arrival_s: float, num_tokens: int) -> list[float]:
        return [_worked_through(arrival_s, self.work.draw(self.rng), self.stalls(arrival_s), self.stall_s)] * num_tokens

    def stalls(self, after_s: float) -> Iterator[float]:
        """Begins of the stalls that end later than that."""
        for place in itertools.count(bisect.bisect_right(self.begins_s, after_s - self.stall_s)):
            while place >= len(self.begins_s):
                free_from_s = self.begins_s[-1] + self.stall_s if self.begins_s else 0.0
                self.begins_s.append(free_from_s + self.rng.exponential(self.between_s))
            if self.begins_s[place] + self.stall_s > after_s:
                yield self.begins_s[place]

    def truth(self) -> dict[str, Cdf]:
        share = self.stall_s / (self.stall_s + self.between_s)
        remainder_s = np.linspace(0.0, self.stall_s, _STEPS)
        worked = self._worked()

        def cdf(x: FloatArray) -> FloatArray:
            waited = np.trapezoid(worked(x[:, None] - remainder_s), remainder_s, axis=1) / self.stall_s
            return np.asarray((1.0 - share) * worked(x) + share * waited)

        return {"ttft": cdf, "e2e": cdf}

    def _worked(self) -> Cdf:
        """P(work and the stalls met during it <= x); more than two of these are left out."""
        edges = np.linspace(0.0, quantile(self.work.cdf, 1.0 - 1e-7), 10 * _STEPS)
        mean = (edges[1:] + edges[:-1]) / 2.0 / self.between_s
        mass = np.diff(self.work.cdf(edges)) * np.exp(-mean)
        below = [np.append(0.0, np.cumsum(mass * mean**met / math.factorial(met))) for met in range(3)]

        def cdf(x: FloatArray) -> FloatArray:
            parts = [np.interp(x - met * self.stall_s, edges, mass_below) for met, mass_below in enumerate(below)]
            return np.asarray(np.sum(parts, axis=0))

        return cdf


@dataclass
class StandsStillOnce:
    """As `Stalling`, with one stall at a set time. Its truth is that of arrivals anywhere in a set span around it."""

    work: Distribution
    rng: np.random.Generator
    stall_s: float
    begin_s: float
    span_s: tuple[float, float]

    def token_times_s(self, arrival_s: float, num_tokens: int) -> list[float]:
        ahead = [self.begin_s] if arrival_s < self.begin_s + self.stall_s else []
        return [_worked_through(arrival_s, self.work.draw(self.rng), iter(ahead), self.stall_s)] * num_tokens

    def truth(self) -> dict[str, Cdf]:
        arrivals_s = np.linspace(*self.span_s, _STEPS)
        in_stall_s = self.begin_s + self.stall_s - arrivals_s
        after, within = in_stall_s <= 0.0, (in_stall_s > 0.0) & (in_stall_s <= self.stall_s)
        free_s = np.where(after, np.inf, self.begin_s - arrivals_s)  # work done before the stall, where it is ahead

        def at(x: float) -> float:
            ahead = self.work.cdf(np.minimum(x, free_s)) + np.maximum(
                0.0, self.work.cdf(np.full_like(free_s, x - self.stall_s)) - self.work.cdf(np.minimum(free_s, 1e6))
            )
            return float(np.mean(np.where(within, self.work.cdf(x - in_stall_s), ahead)))

        return dict.fromkeys(("ttft", "e2e"), lambda x: np.array([at(float(one)) for one in x]))


def _worked_through(start_s: float, work_s: float, stalls_s: Iterator[float], stall_s: float) -> float:
    """When work ends that starts then and rests during the stalls ahead."""
    end_s = start_s + work_s
    for begin_s in stalls_s:
        if begin_s >= end_s:
            break
        end_s += min(stall_s, begin_s + stall_s - start_s)
    return end_s


@dataclass
class Lockstep:
    """Batches, back to back: what arrived during one is answered whole at the end of the next.

    Clients of a closed load come back at the end of one and wait for exactly the next. Poisson arrivals (`open`) wait
    for the remainder of one first, whose density is (1 - F) / mean (the inspection paradox).
    """

    step: Distribution
    rng: np.random.Generator
    load: Literal["closed", "open"]
    ends_s: list[float] = field(default_factory=lambda: [0.0])

    def token_times_s(self, arrival_s: float, num_tokens: int) -> list[float]:
        came_s = arrival_s - _ROUNDING_S
        while len(self.ends_s) < 2 or self.ends_s[-2] < came_s:
            self.ends_s.append(self.ends_s[-1] + self.step.draw(self.rng))
        return [self.ends_s[bisect.bisect_left(self.ends_s, came_s) + 1]] * num_tokens

    def truth(self) -> dict[str, Cdf]:
        if self.load == "closed":
            return {"ttft": self.step.cdf, "e2e": self.step.cdf}
        remainder_s = np.linspace(0.0, quantile(self.step.cdf, 1.0 - 1e-7), _STEPS)
        density = 1.0 - self.step.cdf(remainder_s)
        density /= np.trapezoid(density, remainder_s)

        def cdf(x: FloatArray) -> FloatArray:
            return np.asarray(np.trapezoid(density * self.step.cdf(x[:, None] - remainder_s), remainder_s, axis=1))

        return {"ttft": cdf, "e2e": cdf}
