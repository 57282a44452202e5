"""A step while it is filled with prompts: what each has been given of it, and what is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from p99lab.engine.request import Request
from p99lab.engine.step_price import Price, Reader


@dataclass(slots=True)
class Portion:
    """A prompt, what a step has been given of it, and what has not been computed after that."""

    request: Request
    reader: Reader
    num_left: int
    num_given: int = 0


class Budget(NamedTuple):
    """What a step has left for prompts: `num_tokens` at most, within `seconds`."""

    num_tokens: int
    seconds: float

    def part(self, share: float) -> Budget:
        """`share` of the tokens, rounded up, and of the time (0 s if unbounded: tokens decide)."""
        seconds = self.seconds * share if 0.0 < self.seconds < math.inf else 0.0
        return Budget(math.ceil(self.num_tokens * share), seconds)

    def plus(self, other: Budget) -> Budget:
        """Both together."""
        return Budget(self.num_tokens + other.num_tokens, self.seconds + other.seconds)

    def minus(self, other: Budget) -> Budget:
        """What is left without `other`."""
        return Budget(self.num_tokens - other.num_tokens, self.seconds - other.seconds)


@dataclass(slots=True)
class Filling:
    """Prompts enter while the budget lasts, or beyond its time where that is said."""

    price: Price
    budget: Budget

    @contextmanager
    def without(self, kept: Budget) -> Iterator[None]:
        """In here, `kept` cannot be spent."""
        self.budget = self.budget.minus(kept)
        yield
        self.budget = self.budget.plus(kept)

    def fill(self, prompts: Iterable[Portion], most: Callable[[Reader], int] | None = None) -> None:
        """In order, each as much as is left, and no more than `most`."""
        for prompt in prompts:
            size = min(prompt.num_left, self.budget.num_tokens)
            if most is not None:
                size = min(size, most(prompt.reader))
            self._enter(prompt, self.price.tokens_within(prompt.reader, self.budget.seconds, size))

    def fill_some(self, prompt: Portion, least: int) -> None:
        """As much as is left, or `least` tokens and the rest of their tile, if it would have none, in any time."""
        self.fill([prompt])
        if not prompt.num_given:
            self.fill_tiles(prompt, least)

    def fill_tiles(self, prompt: Portion, num_tokens: int) -> None:
        """So many tokens and the rest of their tile, in any time."""
        self._enter(
            prompt, min(prompt.num_left, self.budget.num_tokens, self.price.to_tile_end(prompt.reader, num_tokens))
        )

    def fill_up(self, prompts: Iterable[Portion]) -> None:
        """Tiles that are paid for, in any time: their tokens cost the products alone."""
        for prompt in prompts:
            num_tokens = self.price.free_tokens(prompt.reader)
            self._enter(prompt, min(num_tokens, prompt.num_left, self.budget.num_tokens))

    def _enter(self, prompt: Portion, size: int) -> None:
        if size:
            prompt.num_given += size
            prompt.num_left -= size
            self.budget = self.budget.minus(Budget(size, self.price.add(prompt.reader, size)))
