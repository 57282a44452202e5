"""How a step is put together from the requests that hold pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from p99lab.engine.config import SchedulerConfig
from p99lab.engine.costs import StepCost
from p99lab.engine.policy import URGENCIES, Urgency
from p99lab.engine.request import Request
from p99lab.errors import BadParameterError

LONG_SHARE = 1 / 8  # of what a step has for prompts, kept for the most urgent one that no step can hold whole
MIN_CHUNK = 64  # tokens: what prompts get of a step even if decoding alone takes longer than the bound
NUM_ROUNDS = 4  # in which the time of a step is given out

ScheduledTokens = tuple[Request, int]
"""A request, and how many of its tokens a step computes."""


class Composition(Protocol):
    """Puts steps together from the requests that hold pages (most urgent first)."""

    def room(self, running: Sequence[Request]) -> int:
        """Prompt tokens that a step could still take if one more request were admitted."""
        ...

    def shares(self, running: Sequence[Request]) -> list[ScheduledTokens]:
        """Who computes how many tokens in this step; at least one share when anybody has tokens left to compute."""
        ...


@dataclass(frozen=True, slots=True)
class StepBound:
    """How long a step may take while requests decode. `step_time_s`: predicted, of a step that computes these."""

    max_step_s: float
    costs: StepCost
    step_time_s: Callable[[Sequence[ScheduledTokens]], float]


class Prompt(NamedTuple):
    """What a step has not been given yet of a prompt: `num_left` tokens from position `start` on."""

    request: Request
    start: int
    num_left: int


class Budget(NamedTuple):
    """What a step has left for prompts: `num_tokens` at most, within `seconds`, but `num_owed` tokens at any rate."""

    num_tokens: int
    seconds: float
    num_owed: int

    def part(self, share: float) -> Budget:
        """`share` of the tokens, rounded up, and of the time left; 0 s if unbounded: then tokens decide."""
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

    def shares(self, running: Sequence[Request]) -> list[ScheduledTokens]:
        decoding, prompts = _parted(running)
        rows = [(request, 1) for request in decoding[: self.max_num_batched_tokens]]
        num_tokens = self.max_num_batched_tokens - len(rows)
        if not prompts or not num_tokens:
            return rows
        if self.bound is None or not rows:
            return rows + self._split(_parts(prompts, {}), Budget(num_tokens, math.inf, MIN_CHUNK))
        return rows + self._bounded(rows, prompts, num_tokens, self.bound)

    def _bounded(
        self, rows: list[ScheduledTokens], prompts: Sequence[Request], num_tokens: int, bound: StepBound
    ) -> list[ScheduledTokens]:
        """Chunks of prompts beside decode rows.

        A chunk is priced as if all its computing came on top, though much of it passes while memory is read for the
        decode rows. So what the step as a whole leaves of the bound is given out again.
        """
        chunks: dict[Request, int] = {}
        for number in range(NUM_ROUNDS):
            num_left, parts = num_tokens - sum(chunks.values()), _parts(prompts, chunks)
            if not num_left or not parts:
                break
            seconds = bound.max_step_s - bound.step_time_s([*rows, *chunks.items()])
            more = self._split(parts, Budget(num_left, seconds, 0 if number else MIN_CHUNK))
            for request, size in more:
                chunks[request] = chunks.get(request, 0) + size
            if not more:
                break
        return list(chunks.items())

    def _split(self, prompts: Sequence[Prompt], budget: Budget) -> list[ScheduledTokens]:
        order = sorted(prompts, key=lambda one: (self.urgency(one.request), one.num_left > budget.num_tokens))
        num_ahead = next((i for i, one in enumerate(order) if one.num_left > budget.num_tokens), len(order))
        kept = budget.part(LONG_SHARE) if num_ahead < len(order) else Budget(0, 0.0, 0)
        ahead, left = self._fill(order[:num_ahead], budget.minus(kept))
        behind, _ = self._fill(order[num_ahead:], left.plus(kept))
        return ahead + behind

    def _fill(self, prompts: Sequence[Prompt], budget: Budget) -> tuple[list[ScheduledTokens], Budget]:
        """In order, each as much as is left; and what is left then."""
        chunks: list[ScheduledTokens] = []
        for one in prompts:
            num_affordable = max(budget.num_owed, self._chunk_tokens(one, budget.seconds))
            size = min(one.num_left, budget.num_tokens, num_affordable)
            if size > 0:
                chunks.append((one.request, size))
                budget = budget.minus(Budget(size, self._chunk_time_s(one, size), size))
        return chunks, budget

    def _chunk_tokens(self, prompt: Prompt, seconds: float) -> int:
        if self.bound is None or seconds == math.inf:
            return prompt.num_left
        return self.bound.costs.chunk_tokens(seconds, prompt.start)

    def _chunk_time_s(self, prompt: Prompt, num_tokens: int) -> float:
        return 0.0 if self.bound is None else self.bound.costs.chunk_time_s(num_tokens, prompt.start)


@dataclass(frozen=True, slots=True)
class Stock:
    """Whole prompts alone while there are any, else all decode rows: the baseline. A prompt too long runs by itself."""

    max_num_batched_tokens: int

    def room(self, running: Sequence[Request]) -> int:
        return self.max_num_batched_tokens - sum(remaining(request) for request in running if is_prompt(request))

    def shares(self, running: Sequence[Request]) -> list[ScheduledTokens]:
        prompts = [request for request in running if is_prompt(request)]
        shares: list[ScheduledTokens] = []
        left = self.max_num_batched_tokens
        for request in prompts:
            left -= remaining(request)
            if left < 0 and shares:
                break
            shares.append((request, remaining(request)))
        return shares or [(request, remaining(request)) for request in running if remaining(request)]


def compose(
    config: SchedulerConfig,
    costs: StepCost | None,
    step_time_s: Callable[[Sequence[ScheduledTokens], StepCost], float],
) -> Composition:
    """The composition that `config` asks for.

    Args:
        step_time_s: predicted, of a step that computes these tokens.

    Raises:
        BadParameterError: a bound on steps whose times nobody has measured (`costs` None).
    """
    if config.composition == "stock":
        return Stock(config.max_num_batched_tokens)
    bound = None
    if config.max_step_s is not None:
        if costs is None:
            raise BadParameterError("max_step_s: this device's step times have not been measured")
        bound = StepBound(config.max_step_s, costs, lambda shares: step_time_s(shares, costs))
    return Chunked(config.max_num_batched_tokens, bound, URGENCIES[config.policy])


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


def _parts(prompts: Iterable[Request], given: Mapping[Request, int]) -> list[Prompt]:
    """What is left of prompts of which a step has so many tokens already."""
    parts = (
        Prompt(one, one.num_computed_tokens + given.get(one, 0), remaining(one) - given.get(one, 0)) for one in prompts
    )
    return [part for part in parts if part.num_left]
