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
    """Keys that the tokens of several requests see, or those of one; and which of them the step has."""

    num_keys: int
    num_tokens: int = 0
    decodes: bool = True  # one token of each request at most
    seconds: float = 0.0

    def with_more(self, num_tokens: int) -> Level:
        """The level that these keys are with more tokens of one request."""
        return Level(self.num_tokens + num_tokens, self.num_keys, self.decodes and num_tokens == 1)


@dataclass(slots=True)
class Reader:
    """A request that may be in the step. `keys`: all that its tokens see of what is computed before the step."""

    keys: Sequence[SharedKeys]
    num_tokens: int = 0

    @property
    def widest(self) -> SharedKeys | None:
        """Whose tiles cost most; None: there is nothing before it."""
        return max(self.keys, key=lambda keys: keys.num_keys, default=None)


class StepPrice:
    """A step's predicted time, in which requests are only added.

    Counted as if the step had work enough for all of the device. A request that is added twice is counted as if its
    tokens had come at once.
    """

    def __init__(self, costs: StepCost) -> None:
        self._costs = costs
        self._num_tokens = 0
        self._attention_s = 0.0

    @property
    def seconds(self) -> float:
        return self._attention_s + self._costs.rest_s(self._num_tokens)

    def added_s(self, reader: Reader, num_tokens: int) -> float:
        """By how much so many more tokens of a request lengthen the step."""
        costs = self._costs
        keys_s = sum(costs.level_s(keys.with_more(num_tokens)) - keys.seconds for keys in reader.keys)
        rest_s = costs.rest_s(self._num_tokens + num_tokens) - costs.rest_s(self._num_tokens)
        return keys_s + rest_s + self._causal_s(reader, num_tokens)

    def add(self, reader: Reader, num_tokens: int) -> float:
        """Enter them; by how much they have lengthened the step."""
        before_s = self.seconds
        self._num_tokens += num_tokens
        self._attention_s += self._causal_s(reader, num_tokens)
        reader.num_tokens += num_tokens
        for keys in reader.keys:
            level = keys.with_more(num_tokens)
            seconds = self._costs.level_s(level)
            self._attention_s += seconds - keys.seconds
            keys.num_tokens, keys.decodes, keys.seconds = level.num_tokens, level.decodes, seconds
        return self.seconds - before_s

    def _causal_s(self, reader: Reader, num_tokens: int) -> float:
        return self._costs.causal_s(reader.num_tokens + num_tokens) - self._costs.causal_s(reader.num_tokens)

    def tokens_within(self, reader: Reader, seconds: float, num_left: int) -> int:
        """The most of a request's `num_left` tokens that lengthen the step by no more.

        All of them, or such that the last tile is full: what fills less than half of one waits, because the next step
        likely has a tile of decode rows for it, and everybody else's tokens come sooner.
        """
        if seconds < 0 or num_left == 0:
            return 0
        tile, open_tokens = self._costs.tile_tokens, self.open_tokens(reader)
        num_over = (num_left - open_tokens) % tile
        if 2 * num_over < tile and open_tokens + tile <= num_left:
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
        """Those of them that cost no attention, because the tile is computed anyway. Decode rows alone compute none."""
        keys = reader.widest
        return 0 if keys is None or keys.decodes else self.open_tokens(reader)
