"""What a step costs while it is put together: each request's tokens are priced beside those that are in it already.

A kernel computes whole tiles, so the first token of one costs as much as all of them: on an H200 32 tokens of requests
that share a document take the time of one. Whoever puts a step together asks here how many tokens of a prompt end on a
whole tile within a time, and how many are as good as free because their tile is paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p99lab.engine.costs import Level, StepCost


@dataclass(slots=True)
class SharedKeys:
    """Keys that the tokens of several requests see, or those of one; and which of these tokens the step has."""

    num_keys: int
    num_tokens: int = 0
    decodes: bool = True  # one token of each request at most
    seconds: float = 0.0


@dataclass(slots=True)
class Reader:
    """A request that may be in the step. `keys`: all that its tokens see of what is computed before the step."""

    keys: Sequence[SharedKeys]
    num_tokens: int = 0

    @property
    def widest(self) -> SharedKeys | None:
        """Whose tiles cost most; None: there is nothing before it."""
        return max(self.keys, key=lambda keys: keys.num_keys, default=None)

    def level(self, keys: SharedKeys, num_tokens: int) -> Level:
        """What `keys` are with so many more tokens of this request."""
        decodes = keys.decodes and self.num_tokens + num_tokens == 1
        return Level(keys.num_tokens + num_tokens, keys.num_keys, decodes)


class StepPrice:
    """A step's predicted time (`seconds`), in which requests are only added.

    Counted as if the step had work enough for all of the device, in items that begin and end in no time, and one row
    sampled. A request that is added twice is counted as if its tokens had come at once.
    """

    def __init__(self, costs: StepCost) -> None:
        self.seconds = costs.rest_s(0) + costs.launches_s
        self._costs = costs
        self._num_tokens = 0

    @property
    def tile_tokens(self) -> int:
        """Tokens that fill a tile."""
        return self._costs.tile_tokens

    def added_s(self, reader: Reader, num_tokens: int) -> float:
        """By how much so many more tokens of a request lengthen the step."""
        costs = self._costs
        keys_s = sum(costs.level_s(reader.level(keys, num_tokens)) - keys.seconds for keys in reader.keys)
        rest_s = costs.rest_s(self._num_tokens + num_tokens) - costs.rest_s(self._num_tokens)
        causal_s = costs.causal_s(reader.num_tokens + num_tokens) - costs.causal_s(reader.num_tokens)
        return keys_s + rest_s + causal_s

    def add(self, reader: Reader, num_tokens: int) -> float:
        """Enter them; by how much they have lengthened the step."""
        added_s = self.added_s(reader, num_tokens)
        for keys in reader.keys:
            level = reader.level(keys, num_tokens)
            keys.num_tokens, keys.decodes, keys.seconds = level.num_tokens, level.decodes, self._costs.level_s(level)
        reader.num_tokens += num_tokens
        self._num_tokens += num_tokens
        self.seconds += added_s
        return added_s

    def tokens_within(self, reader: Reader, seconds: float, num_left: int) -> int:
        """How many of a request's `num_left` tokens lengthen the step by no more than `seconds`: the most that do.

        All of them, or such that the last tile is full. What would fill less than half of a tile over keys that others
        in the step see too waits, unless it is all there is: the next step likely has a tile of decode rows for it, and
        everybody else's tokens come sooner.
        """
        if seconds < 0 or num_left == 0:
            return 0
        tile, open_tokens = self._costs.tile_tokens, self.open_tokens(reader)
        num_over = (num_left - open_tokens) % tile
        if 2 * num_over < tile and open_tokens + tile <= num_left and self._has_company(reader):
            num_left -= num_over
        if self.added_s(reader, num_left) <= seconds:
            return num_left
        low, high = 0, (num_left - open_tokens - 1) // tile + 1  # tiles beyond the open one: affordable, too many
        if high <= 0 or self.added_s(reader, open_tokens) > seconds:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            if self.added_s(reader, open_tokens + middle * tile) <= seconds:
                low = middle
            else:
                high = middle
        return open_tokens + low * tile

    def to_tile_end(self, reader: Reader, num_tokens: int) -> int:
        """So many tokens, and those that fill the last tile that they need."""
        return num_tokens + (self.open_tokens(reader) - num_tokens) % self._costs.tile_tokens

    def open_tokens(self, reader: Reader) -> int:
        """Tokens that the last tile over the request's longest keys has room for, beside some that are there."""
        keys = reader.widest
        return 0 if keys is None else -keys.num_tokens % self._costs.tile_tokens

    def free_tokens(self, reader: Reader) -> int:
        """Those of them that cost no attention over these keys, because a prompt has paid for the tile."""
        keys = reader.widest
        return 0 if keys is None or keys.decodes else self.open_tokens(reader)

    def _has_company(self, reader: Reader) -> bool:
        """Whether tokens of others over the request's longest keys are in the step."""
        keys = reader.widest
        return keys is not None and keys.num_tokens > reader.num_tokens


class Unpriced:
    """A step in which tokens take no time, of any number: who puts it together counts nothing else."""

    tile_tokens = 1

    def added_s(self, reader: Reader, num_tokens: int) -> float:
        return 0.0

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


Price = StepPrice | Unpriced
