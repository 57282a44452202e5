"""How many times one figure is another, with the interval of that ratio.

By MOVER, the method of variance estimates recovery, on the logarithmic scale (Zou & Donner, "Construction of confidence
limits about effect measures", Statistics in Medicine 27, 2008). Of two separate samples, a, [la, ua] over b, [lb, ub]:

    log lower = log(a/b) - sqrt(log²(a/la) + log²(ub/b))      log upper = log(a/b) + sqrt(log²(ua/a) + log²(b/lb))

Samples of the same requests are correlated, which only makes the interval wide. It holds what varies from request to
request inside each sample, and nothing of what varies between two repeats of the same thing.
"""

from __future__ import annotations

import math
from typing import Protocol


class Bounded(Protocol):
    """A figure and the bounds of its 95 % interval, None where there is no such bound."""

    @property
    def value(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def ratio(above: Bounded, below: Bounded) -> float | None:
    """`above` over `below`; None where one has no value or is not positive."""
    return above.value / below.value if _positive(above.value) and _positive(below.value) else None  # type: ignore[operator]


def bounds(above: Bounded, below: Bounded) -> tuple[float | None, float | None]:
    """The 95 % bounds of `above` over `below`; None for a side that a missing, or not positive, bound leaves open."""
    value = ratio(above, below)
    if value is None:
        return None, None
    down = _distance(_log_ratio(above.value, above.low), _log_ratio(below.high, below.value))
    up = _distance(_log_ratio(above.high, above.value), _log_ratio(below.value, below.low))
    return None if down is None else value * math.exp(-down), None if up is None else value * math.exp(up)


def _positive(value: float | None) -> bool:
    return value is not None and value > 0


def _log_ratio(above: float | None, below: float | None) -> float | None:
    return math.log(above / below) if above and below and above > 0 and below > 0 else None


def _distance(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else math.hypot(one, other)
