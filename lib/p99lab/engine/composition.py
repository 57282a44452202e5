"""How a step is put together from the requests that hold pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from p99lab.engine.config import SchedulerConfig
from p99lab.engine.costs import StepCost
from p99lab.engine.filling import Budget, Filling, Portion
from p99lab.engine.policy import URGENCIES, Urgency
from p99lab.engine.request import Request
from p99lab.engine.step_price import Price, Reader, StepPrice, Unpriced
from p99lab.errors import BadParameterError

LEAST_LONG = 128  # tokens: what is left of a prompt that has no more is a question's, whatever it takes
LONG_SHARE = 1 / 8  # of what a step has for prompts, kept for the most urgent one that no step can hold whole
MIN_CHUNK = 64  # tokens that the first prompt gets of a step whose bound leaves no time for any of it
MIN_LONG_CHUNK = math.ceil(MIN_CHUNK * LONG_SHARE)  # and those of the first long one, with shorter ones before it
FEW_TILES = 5  # of questions, beyond what rides on tiles of decode rows: with no more, a long prompt goes before them
QUIET_SHARE = 0.75  # of the bound on a step that a step has while nothing much waits
BACKLOG = 1024  # tokens of prompts: when as many wait, a step has all of it

ScheduledTokens = tuple[Request, int]
"""A request, and how many of its tokens a step computes."""


class Composition(Protocol):
    """Puts steps together from the requests that hold pages (most urgent first)."""

    def room(self, running: Sequence[Request]) -> int:
        """Prompt tokens that a step could still take if one more request were admitted."""
        ...

    def step_tokens(self, running: Sequence[Request]) -> float:
        """Prompt tokens that a step holds: of prompts with more to compute only the first in order is given work."""
        ...

    def shares(self, running: Sequence[Request]) -> list[ScheduledTokens]:
        """Who computes how many tokens in this step; at least one share when anybody has tokens left to compute."""
        ...


@dataclass(frozen=True, slots=True)
class StepBound:
    """How long a step may take while requests decode: `max_step_s`, and less while little waits.

    Long steps do more a second, short ones serve those who decode. So the queue decides.

    `readers`: of the running requests, in their order, each with the keys that it sees, shared with others where a step
    would share them.
    """

    max_step_s: float
    costs: StepCost
    readers: Callable[[Sequence[Request]], Sequence[Reader]]

    def step_s(self, num_waiting_tokens: int) -> float:
        """Seconds of a step while so many tokens of prompts wait."""
        return self.max_step_s * (QUIET_SHARE + (1.0 - QUIET_SHARE) * min(1.0, num_waiting_tokens / BACKLOG))


@dataclass(frozen=True, slots=True)
class Chunked:
    """Decode rows first, then prompts in pieces, as many tokens as fit (Sarathi-Serve, arXiv:2403.02310).

    With a `bound`, prompts get no more than it leaves while anybody decodes. The most urgent first fill the tiles of
    decode rows on their document, which cost less than tiles of their own, with half of the tokens at most, and while
    that leaves time for a tile of the first in order. Then pieces end where a tile does, and what is left of tiles that
    are paid for goes to whoever can use it: such tokens cost their products alone, by which a step may exceed the
    bound. Where no tile of the first in order fits, it gets `MIN_CHUNK` tokens and the rest of their tile all the same:
    it would wait for ever behind others whose tiles cost less.

    A prompt that is longer than a step yields to shorter ones of the same `urgency` (smaller is more urgent), so that
    questions do not wait for a document to be read. `LONG_SHARE` of what is left after the tiles of decode rows is kept
    for the first such prompt; it gets that share of `MIN_CHUNK`, and the rest of their tile, all the same. While
    questions on all their documents ride on decode rows' tiles, and few tokens of questions are left, it gets all the
    time that a tile for the first question leaves.
    """

    max_num_batched_tokens: int
    bound: StepBound | None = None
    urgency: Urgency = URGENCIES["fcfs"]

    def room(self, running: Sequence[Request]) -> int:
        decoding, prompts = _parted(running)
        num_tokens = self.max_num_batched_tokens - len(decoding)
        short = [remaining(request) for request in prompts if remaining(request) <= num_tokens]
        return num_tokens - sum(short) - (math.ceil(num_tokens * LONG_SHARE) if len(short) < len(prompts) else 0)

    def step_tokens(self, running: Sequence[Request]) -> float:
        decoding, _ = _parted(running)
        return max(0, self.max_num_batched_tokens - len(decoding))

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
            readers, seconds = readers[len(rows) :], bound.step_s(sum(map(remaining, waiting))) - price.seconds
        prompts = [
            Portion(request, reader, remaining(request)) for request, reader in zip(waiting, readers, strict=True)
        ]
        self._fill(Filling(price, Budget(num_tokens, seconds)), prompts)
        return rows + [(prompt.request, prompt.num_given) for prompt in prompts if prompt.num_given]

    def _fill(self, step: Filling, prompts: Sequence[Portion]) -> None:
        """Tokens of a step that has its decode rows to prompts (the most urgent first)."""
        ahead, behind = self._lined_up(step, prompts)
        order = [*ahead, *behind]
        _ride(step, self._most_urgent(prompts), order[0])
        if not ahead or not behind:
            step.fill_some(order[0], MIN_CHUNK)
            step.fill(order[1:])
        elif self._all_ride(ahead, behind[0], step.price):
            _fill_long_first(step, ahead, behind)
        else:
            _fill_short_first(step, ahead, behind)
        step.fill_up(prompts)

    def _lined_up(self, step: Filling, prompts: Sequence[Portion]) -> tuple[list[Portion], list[Portion]]:
        """In the order in which they are given tokens: prompts ahead of the first long one, and those from there on.

        Of equal urgency the long ones come last. So short ones that are less urgent than a long one are behind it.
        """
        is_long = {prompt.request: _is_long(prompt, step) for prompt in prompts}
        order = sorted(prompts, key=lambda prompt: (self.urgency(prompt.request), is_long[prompt.request]))
        num_ahead = next((i for i, prompt in enumerate(order) if is_long[prompt.request]), len(order))
        return order[:num_ahead], order[num_ahead:]

    def _most_urgent(self, prompts: Sequence[Portion]) -> Sequence[Portion]:
        """Those as urgent as the first one."""
        urgencies = [self.urgency(prompt.request) for prompt in prompts]
        return prompts[: urgencies.count(urgencies[0])]

    def _all_ride(self, ahead: Sequence[Portion], long: Portion, price: Price) -> bool:
        """Whether questions can do with tiles of decode rows for a while, for the good of the long prompt behind them.

        Asked when those tiles are filled.
        """
        if self.urgency(ahead[0].request) < self.urgency(long.request):
            return False
        num_left = sum(prompt.num_left for prompt in ahead)
        ridden = {id(prompt.reader.widest) for prompt in ahead if prompt.num_given}
        return num_left <= FEW_TILES * price.tile_tokens and all(id(prompt.reader.widest) in ridden for prompt in ahead)


def _is_long(prompt: Portion, step: Filling) -> bool:
    """Whether a step cannot hold what is left of it. Near its end a document would else take all of many steps."""
    num_left, (num_tokens, seconds) = prompt.num_left, step.budget
    if num_left > num_tokens:
        return True
    return num_left > LEAST_LONG and step.price.added_s(prompt.reader, num_left) > max(seconds, 0.0)


def _ride(step: Filling, prompts: Sequence[Portion], first: Portion) -> None:
    """Tiles of decode rows: with half of the tokens, and the time that a tile of the first in order leaves."""
    price = step.price
    tile_s = price.added_s(first.reader, price.to_tile_end(first.reader, 1))
    with step.without(Budget(math.ceil(step.budget.num_tokens / 2), tile_s)):
        step.fill(prompts, price.open_tokens)


def _fill_short_first(step: Filling, ahead: Sequence[Portion], behind: Sequence[Portion]) -> None:
    """In order, with a share kept for the long prompt that is first of those behind."""
    kept = step.budget.part(LONG_SHARE)
    with step.without(kept):
        step.fill_some(ahead[0], MIN_CHUNK)
        step.fill(ahead[1:])
    if kept.num_tokens:
        step.fill_some(behind[0], MIN_LONG_CHUNK)
    step.fill(behind[1:])


def _fill_long_first(step: Filling, ahead: Sequence[Portion], behind: Sequence[Portion]) -> None:
    """A tile for the first of all, then the long prompt that is first of those behind, then in order."""
    kept = step.budget.part(LONG_SHARE)
    with step.without(Budget(kept.num_tokens, 0.0)):
        step.fill_tiles(ahead[0], 1)
    step.fill_some(behind[0], MIN_LONG_CHUNK)
    step.fill([*ahead, *behind])


@dataclass(frozen=True, slots=True)
class Stock:
    """Whole prompts alone while there are any, else all decode rows: the baseline. A prompt too long runs by itself."""

    max_num_batched_tokens: int

    def room(self, running: Sequence[Request]) -> int:
        return self.max_num_batched_tokens - sum(remaining(request) for request in running if is_prompt(request))

    def step_tokens(self, running: Sequence[Request]) -> float:
        return math.inf

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
