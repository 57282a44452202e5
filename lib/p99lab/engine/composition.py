"""How a step is put together from the requests that hold pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from p99lab.engine.costs import StepCost
from p99lab.engine.policy import URGENCIES, Urgency
from p99lab.engine.request import Request

LONG_SHARE = 1 / 8  # of what a step has for prompts, kept for the most urgent one that no step can hold whole
MIN_CHUNK = 64  # tokens: what prompts get of a step even if decoding alone takes longer than the bound

Share = tuple[Request, int]
"""A request, and how many of its tokens a step computes."""


class Composition(Protocol):
    """Puts steps together from the requests that hold pages (most urgent first)."""

    def room(self, running: Sequence[Request]) -> int:
        """Prompt tokens that a step could still take if one more request were admitted."""
        ...

    def shares(self, running: Sequence[Request]) -> list[Share]:
        """Who computes how many tokens in this step; at least one share when anybody has tokens left to compute."""
        ...


@dataclass(frozen=True, slots=True)
class StepBound:
    """How long a step may take while requests decode. `decode_time_s`: of a step that decodes these and no more."""

    max_step_s: float
    costs: StepCost
    decode_time_s: Callable[[Sequence[Request]], float]


class Budget(NamedTuple):
    """What a step has left for prompts: `num_tokens` at most, within `seconds`, but `num_owed` tokens at any rate."""

    num_tokens: int
    seconds: float
    num_owed: int

    def part(self, share: float) -> Budget:
        """A share of it, rounded up; no time where none is left, or where it is not bounded."""
        seconds = self.seconds * share if 0.0 < self.seconds < math.inf else 0.0
        return Budget(math.ceil(self.num_tokens * share), seconds, math.ceil(self.num_owed * share))

    def plus(self, other: Budget) -> Budget:
        """Both together."""
        return Budget(self.num_tokens + other.num_tokens, self.seconds + other.seconds, self.num_owed + other.num_owed)

    def minus(self, other: Budget) -> Budget:
        """What is left without `other`; nobody owes what has been given."""
        num_owed = max(0, self.num_owed - other.num_owed)
        return Budget(self.num_tokens - other.num_tokens, self.seconds - other.seconds, num_owed)


@dataclass(frozen=True, slots=True)
class Chunked:
    """Decode rows first, then prompts in pieces, as many tokens as fit (Sarathi-Serve, arXiv:2403.02310).

    With a `bound`, prompts get no more than it leaves while anybody decodes, but at least `MIN_CHUNK` tokens. A prompt
    that is longer than a step yields to shorter ones of the same `urgency` (smaller is more urgent), so that questions
    do not wait for a document to be read; `LONG_SHARE` of what prompts get is kept for the first such prompt.
    """

    max_num_batched_tokens: int
    bound: StepBound | None = None
    urgency: Urgency = URGENCIES["fcfs"]

    def room(self, running: Sequence[Request]) -> int:
        decoding, prompts = _parted(running)
        num_tokens = self.max_num_batched_tokens - len(decoding)
        short = [remaining(request) for request in prompts if remaining(request) <= num_tokens]
        return num_tokens - sum(short) - (math.ceil(num_tokens * LONG_SHARE) if len(short) < len(prompts) else 0)

    def shares(self, running: Sequence[Request]) -> list[Share]:
        decoding, prompts = _parted(running)
        decoding = decoding[: self.max_num_batched_tokens]
        num_tokens = self.max_num_batched_tokens - len(decoding)
        shares = [(request, 1) for request in decoding]
        if prompts and num_tokens:
            shares += self._split(prompts, self._budget(num_tokens, decoding))
        return shares

    def _budget(self, num_tokens: int, decoding: Sequence[Request]) -> Budget:
        if self.bound is None or not decoding:
            return Budget(num_tokens, math.inf, MIN_CHUNK)
        return Budget(num_tokens, self.bound.max_step_s - self.bound.decode_time_s(decoding), MIN_CHUNK)

    def _split(self, prompts: Sequence[Request], budget: Budget) -> list[Share]:
        order = sorted(prompts, key=lambda request: (self.urgency(request), remaining(request) > budget.num_tokens))
        num_ahead = next((i for i, request in enumerate(order) if remaining(request) > budget.num_tokens), len(order))
        kept = budget.part(LONG_SHARE) if num_ahead < len(order) else Budget(0, 0.0, 0)
        ahead, left = self._fill(order[:num_ahead], budget.minus(kept))
        behind, _ = self._fill(order[num_ahead:], left.plus(kept))
        return ahead + behind

    def _fill(self, prompts: Sequence[Request], budget: Budget) -> tuple[list[Share], Budget]:
        """In order, each as much as is left; and what is left then."""
        shares: list[Share] = []
        for request in prompts:
            num_affordable = max(budget.num_owed, self._chunk_tokens(request, budget.seconds))
            size = min(remaining(request), budget.num_tokens, num_affordable)
            if size > 0:
                shares.append((request, size))
                budget = budget.minus(Budget(size, self._chunk_time_s(request, size), size))
        return shares, budget

    def _chunk_tokens(self, request: Request, seconds: float) -> int:
        if self.bound is None or seconds == math.inf:
            return remaining(request)
        return self.bound.costs.chunk_tokens(seconds, request.num_computed_tokens)

    def _chunk_time_s(self, request: Request, num_tokens: int) -> float:
        return 0.0 if self.bound is None else self.bound.costs.chunk_time_s(num_tokens, request.num_computed_tokens)


@dataclass(frozen=True, slots=True)
class Stock:
    """Whole prompts alone while there are any, else all decode rows: the baseline. A prompt too long runs by itself."""

    max_num_batched_tokens: int

    def room(self, running: Sequence[Request]) -> int:
        return self.max_num_batched_tokens - sum(remaining(request) for request in running if is_prompt(request))

    def shares(self, running: Sequence[Request]) -> list[Share]:
        prompts = [request for request in running if is_prompt(request)]
        shares: list[Share] = []
        left = self.max_num_batched_tokens
        for request in prompts:
            left -= remaining(request)
            if left < 0 and shares:
                break
            shares.append((request, remaining(request)))
        return shares or [(request, remaining(request)) for request in running if remaining(request)]


def remaining(request: Request) -> int:
    """Tokens still to compute before the next one can be sampled; 0 once a step in flight samples the last one."""
    return request.num_due_tokens - request.num_computed_tokens


def is_prompt(request: Request) -> bool:
    """Not merely one sampled token behind: a prompt, or a request that is computed again after it gave way."""
    return request.is_prefill or remaining(request) > 1


def _parted(running: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Those that decode, and those with prompts, in their order."""
    decoding, prompts = [], []
    for request in running:
        if is_prompt(request):
            prompts.append(request)
        elif remaining(request):
            decoding.append(request)
    return decoding, prompts
