"""Few combinations of many factors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

Combination = tuple[Any, ...]


def pairwise(factors: Mapping[str, tuple[Any, ...]]) -> Iterator[Combination]:
    """Combinations, a value of each factor, in which every pair of values of every two factors occurs."""
    combinations = list(itertools.product(*factors.values()))
    missing = set().union(*(pairs(combination) for combination in combinations))
    while missing:
        best = max(combinations, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        yield best


def pairs(combination: Combination) -> set[Any]:
    return set(itertools.combinations(enumerate(combination), 2))
