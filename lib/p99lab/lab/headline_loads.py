"""Notebook 01's loads, and the plan of a run: which arm is put under which load, in which order, for how long.

Closed blocks come first: what an arm answers under them is its capacity, and decides the rates of its open loads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from p99lab.lab.headline_arms import BASELINE, Arm, long_arms, measured_arms
from p99lab.lab.parameters import Headline01
from p99lab.probe.workload import ClosedLoad, OpenLoad

Kind = Literal["closed", "common", "share", "bursty", "rate", "churn"]
Capacities = Mapping[str, float]  # what each arm answers under the closed load, requests per second

WEIGHT_WITHOUT_CACHE = 20.0  # a request that computes its document takes about as long as so many that find it
WARMUP_SHARE = 0.1
QUERIES_A_SLOT = 1_000_000  # far more than a block sends: blocks that share questions would find them in the cache
_FIRST_SLOT: Mapping[Kind, int] = {"closed": 0, "common": 100, "share": 200, "bursty": 300, "rate": 400, "churn": 500}


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load in the abstract. `value`: a share of a capacity, or requests per second (`rate`); 0 for `closed`.

    `common`: a share of what the baseline answers, alike for all arms; the other shares are of the arm's own capacity.
    `place`: among those of its kind.
    """

    kind: Kind
    value: float = 0.0
    place: int = 0

    @property
    def name(self) -> str:
        """As tables show it; `open` alone is the rate that is common to all arms."""
        match self.kind:
            case "closed":
                return "closed"
            case "common":
                return "open"
            case "share":
                return f"open {100 * self.value:g} %"
            case "bursty":
                return f"bursty {100 * self.value:g} %"
            case "rate":
                return f"open {self.value:g}/s"
            case "churn":
                return f"churn {100 * self.value:g} %"

    def rate(self, arm: Arm, capacities: Capacities) -> float:
        """Requests per second."""
        if self.kind == "rate":
            return self.value
        return self.value * capacities[BASELINE if self.kind == "common" else arm.name]


@dataclass(frozen=True, slots=True)
class Planned:
    """A block that is still to run, for a number of requests or of seconds (or whichever ends first).

    `weight`: its share of the time, in closed requests over primed documents, or in seconds where every block has some.
    """

    arm: Arm
    load: LoadSpec
    number: int
    num_requests: int | None
    duration_s: float | None
    weight: float

    @property
    def name(self) -> str:
        """Its work unit's."""
        load = self.load.name.replace(" %", "").replace(" ", "-").replace("/s", "-per-s")
        return f"{load}.{self.arm.name.replace(' ', '-')}.{self.number + 1}"

    @property
    def first_query(self) -> int:
        """Where its questions begin: alike for every arm, and apart from every other block's."""
        return (_FIRST_SLOT[self.load.kind] + self.load.place + self.number) * QUERIES_A_SLOT

    def __str__(self) -> str:
        return f"{self.load.name} load, {self.arm.name}, block {self.number + 1}"


def plan(parameters: Headline01) -> list[Planned]:
    """All blocks of a run. The arms under each load come in seeded random order, peers before everything else: the
    engine cannot share the device with them."""
    arms = measured_arms(parameters)
    closed = [
        _closed(arm, number, parameters)
        for arm in arms
        for number in range(parameters.num_blocks if arm.prefix_cache else 1)
    ]
    chance = random.Random(parameters.seed)
    chance.shuffle(closed)
    opened = [arm for arm in long_arms(parameters) if parameters.open_arms is None or arm.name in parameters.open_arms]
    blocks = list(closed)
    for load in open_loads(parameters):
        chance.shuffle(opened)
        blocks += [_open(arm, load, parameters) for arm in opened]
    return sorted(blocks, key=lambda planned: not planned.arm.is_peer)


def open_loads(parameters: Headline01) -> list[LoadSpec]:
    """All but the closed one, the churn last: its cold documents are left in the cache."""
    loads = [LoadSpec("common", parameters.open_share)] if parameters.open_requests else []
    loads += [LoadSpec("share", share, place) for place, (share, _) in enumerate(parameters.open_shares)]
    loads += [LoadSpec("bursty", share, place) for place, (share, _) in enumerate(parameters.bursty_shares)]
    loads += [LoadSpec("rate", rate, place) for place, (rate, _) in enumerate(parameters.open_rates)]
    return loads + ([LoadSpec("churn", parameters.churn_share)] if parameters.cold_documents else [])


def all_loads(parameters: Headline01) -> list[LoadSpec]:
    return [LoadSpec("closed"), *open_loads(parameters)]


def skipped(planned: Planned, capacities: Capacities) -> str | None:
    """Why a block is not run after all, known once the capacities are; None where it is."""
    load, name = planned.load, planned.arm.name
    needed = BASELINE if load.kind == "common" else name
    if load.kind != "closed" and not capacities.get(needed):
        return f"not run: {needed} has no capacity to take a share of"
    if load.kind == "rate" and load.value > capacities[name]:
        return f"not run: above what {name} can answer ({capacities[name]:.3g}/s)"
    return None


def closed_load(planned: Planned, parameters: Headline01, limit_s: float) -> ClosedLoad:
    arm = planned.arm
    return ClosedLoad(
        num_requests=planned.num_requests,
        duration_s=limit_s,
        concurrency=parameters.concurrency if arm.prefix_cache else parameters.clients_without_cache,
        warmup_share=WARMUP_SHARE if arm.prefix_cache else 0.0,  # nothing to warm, and each request takes seconds
        cache=arm.cache_state,
    )


def open_load(planned: Planned, parameters: Headline01, rate: float, limit_s: float) -> OpenLoad:
    is_churn = planned.load.kind == "churn"
    return OpenLoad(
        num_requests=planned.num_requests,
        duration_s=limit_s,
        rate=rate,
        arrivals="gamma" if planned.load.kind == "bursty" else "poisson",
        cold_every_s=parameters.cold_every_s if is_churn else None,
        warmup_share=WARMUP_SHARE,
        cache="primed",
    )


def _closed(arm: Arm, number: int, parameters: Headline01) -> Planned:
    if parameters.block_s is not None and arm.prefix_cache:
        return Planned(arm, LoadSpec("closed"), number, None, parameters.block_s, parameters.block_s)
    num_blocks = parameters.num_blocks if arm.prefix_cache else 1
    num_requests = math.ceil(_num_requests(arm, parameters) / num_blocks)
    weight = num_requests if arm.prefix_cache else num_requests * WEIGHT_WITHOUT_CACHE
    return Planned(arm, LoadSpec("closed"), number, num_requests, None, weight)


def _open(arm: Arm, load: LoadSpec, parameters: Headline01) -> Planned:
    if load.kind == "common":
        num_requests, pace = parameters.open_requests, 1.0 / parameters.open_share
        return Planned(arm, load, 0, num_requests, None, num_requests * pace)  # answered no faster than it arrives
    if load.kind == "churn":
        seconds = churn_s(parameters)
    else:
        lasting = {"share": parameters.open_shares, "bursty": parameters.bursty_shares, "rate": parameters.open_rates}
        seconds = lasting[load.kind][load.place][1]
    return Planned(arm, load, 0, None, seconds, seconds)


def open_s(planned: Planned, parameters: Headline01, rate: float) -> float | None:
    """Seconds of an open block: its own, and longer where its rate is too low for the requests that are wanted."""
    if planned.duration_s is None or planned.load.kind == "churn":
        return planned.duration_s
    return max(planned.duration_s, parameters.open_block_requests / (1.0 - WARMUP_SHARE) / rate)


def churn_s(parameters: Headline01) -> float:
    """Seconds of the churn load: one interval without a cold document, one behind each of them."""
    return parameters.cold_every_s * (parameters.cold_documents + 1)


def _num_requests(arm: Arm, parameters: Headline01) -> int:
    if not arm.prefix_cache:
        return parameters.requests_without_cache
    return parameters.requests_for_p99 if arm in long_arms(parameters) else parameters.requests_for_p90
