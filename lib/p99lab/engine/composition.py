"""How a step is put together from the requests that hold pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from p99lab.engine.config import SchedulerConfig
from p99lab.engine.costs import StepCost
from p99lab.engine.policy import URGENCIES, Urgency
from p99lab.engine.request import Request
from p99lab.engine.step_price import Reader, StepPrice
from p99lab.errors import BadParameterError

LONG_SHARE = 1 / 8  # of what a step has for prompts, kept for the most urgent one that no step can hold whole
MIN_CHUNK = 64  # tokens: what prompts get of a step whose bound leaves nothing for them

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
    """How long a step may take while requests decode.

    `readers`: of the running requests, in their order, each with the keys that it sees, shared with others where a step
    would share them.
    """

    max_step_s: float
    costs: StepCost
    readers: Callable[[Sequence[Request]], Sequence[Reader]]


@dataclass(slots=True)
class Prompt:
    """A prompt, what a step has been given of it, and what has not been computed after that."""

    request: Request
    reader: Reader
    num_left: int
    num_given: int = 0


class Price(Protocol):
    """What a step costs while it is put together, see `StepPrice`."""

    def add(self, reader: Reader, num_tokens: int) -> float: ...
    def tokens_within(self, reader: Reader, seconds: float, num_left: int) -> int: ...
    def to_tile_end(self, reader: Reader, num_tokens: int) -> int: ...
    def open_tokens(self, reader: Reader) -> int: ...
    def free_tokens(self, reader: Reader) -> int: ...


class Unpriced:
    """Tokens alone count."""

    def add(self, reader: Reader, num_tokens: int) -> float:
        return 0.0

    def tokens_within(self, reader: Reader, seconds: float, num_left: int) -> int:
        return num_left

    def to_tile_end(self, reader: Reader, num_tokens: int) -> int:
        return num_tokens

    def open_tokens(self, reader: Reader) -> int:
        return 0

    def free_tokens(self, reader: Reader) -> int:
        return 0


class Budget(NamedTuple):
    """What a step has left for prompts: `num_tokens` at most, within `seconds`, but `num_owed` tokens at any rate."""

    num_tokens: int
    seconds: float
    num_owed: int = 0

    def part(self, share: float) -> Budget:
        """`share` of the tokens, rounded up, one of them owed, and of the time (0 s if unbounded: tokens decide)."""
        seconds = self.seconds * share if 0.0 < self.seconds < math.inf else 0.0
        return Budget(math.ceil(self.num_tokens * share), seconds, 1)

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

    With a `bound`, prompts get no more than it leaves while anybody decodes, or `MIN_CHUNK` tokens where that is
    nothing. The most urgent first fill the tiles of decode rows on their document, which cost less than tiles of their
    own. Then pieces end where a tile does, and what is left of tiles that are paid for goes to whoever can use it: such
    tokens cost their products alone, by which a step may exceed the bound.

    A prompt that is longer than a step yields to shorter ones of the same `urgency` (smaller is more urgent), so that
    questions do not wait for a document to be read; `LONG_SHARE` of what prompts get is kept for the first such prompt,
    and a tile at least.
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
        decoding, waiting = _parted(running)
        decoding = decoding[: self.max_num_batched_tokens]
        rows = [(request, 1) for request in decoding]
        num_tokens = self.max_num_batched_tokens - len(rows)
        if not waiting or not num_tokens:
            return rows
        bound = self.bound if rows else None
        if bound is None:
            price: Price = Unpriced()
            readers: Sequence[Reader] = [Reader(()) for _ in waiting]
            seconds = math.inf
        else:
            price = StepPrice(bound.costs)
            readers = bound.readers([*decoding, *waiting])
            for reader in readers[: len(rows)]:
                price.add(reader, 1)
            readers, seconds = readers[len(rows) :], bound.max_step_s - price.seconds
        prompts = [
            Prompt(request, reader, remaining(request)) for request, reader in zip(waiting, readers, strict=True)
        ]
        prompts.sort(key=lambda prompt: self.urgency(prompt.request))
        self._give(prompts, Budget(num_tokens, seconds), price)
        if not any(prompt.num_given for prompt in prompts):
            _fill(prompts, Budget(num_tokens, 0.0, MIN_CHUNK), price)
        return rows + [(prompt.request, prompt.num_given) for prompt in prompts if prompt.num_given]

    def _give(self, prompts: Sequence[Prompt], budget: Budget, price: Price) -> None:
        """Tokens to prompts (the most urgent first), in their order."""
        urgencies = [self.urgency(prompt.request) for prompt in prompts]
        budget = _fill(prompts[: urgencies.count(urgencies[0])], budget, price, price.open_tokens)
        order = sorted(prompts, key=lambda prompt: (self.urgency(prompt.request), prompt.num_left > budget.num_tokens))
        num_ahead = next((i for i, prompt in enumerate(order) if prompt.num_left > budget.num_tokens), len(order))
        kept = budget.part(LONG_SHARE) if num_ahead < len(order) else Budget(0, 0.0)
        budget = _fill(order[:num_ahead], budget.minus(kept), price)
        budget = _fill(order[num_ahead:], budget.plus(kept), price)
        _fill(prompts, Budget(budget.num_tokens, math.inf), price, price.free_tokens)


def _fill(
    prompts: Iterable[Prompt], budget: Budget, price: Price, most: Callable[[Reader], int] | None = None
) -> Budget:
    """In order, each as much as is left, and no more than `most`; what is left then."""
    for prompt in prompts:
        size = min(prompt.num_left, budget.num_tokens)
        if most is not None:
            size = min(size, most(prompt.reader))
        affordable = price.tokens_within(prompt.reader, budget.seconds, size)
        if affordable < budget.num_owed:
            affordable = price.to_tile_end(prompt.reader, budget.num_owed)
        size = min(size, affordable)
        if size > 0:
            budget = budget.minus(Budget(size, price.add(prompt.reader, size), size))
            prompt.num_given += size
            prompt.num_left -= size
    return budget


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
    config: SchedulerConfig, costs: StepCost | None, readers: Callable[[Sequence[Request]], Sequence[Reader]]
) -> Composition:
    """The composition that `config` asks for. `readers`: see `StepBound`.

    Raises:
        BadParameterError: a bound on steps whose times nobody has measured (`costs` None).
    """
    if config.composition == "stock":
        return Stock(config.max_num_batched_tokens)
    bound = None
    if config.max_step_s is not None:
        if costs is None:
            raise BadParameterError("max_step_s: this device's step times have not been measured")
        bound = StepBound(config.max_step_s, costs, readers)
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
