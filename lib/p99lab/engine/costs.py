"""What a step should take: device time predicted from a step's rows and groups, in plain numbers.

Attention is counted as the planner lays it out. Tokens that see the same run of keys are a *level*; the query heads of
a key head are folded into its rows, rows are cut into tiles, keys into segments, and each (tile, segment, key head) is
an item that one of the device's processors works off. The fullest processor decides (`dealing`), unless memory does.
The more processors are busy in the mean, the slower each: the clock follows the power. Levels of few decode rows have a
kernel of their own, which memory alone binds.

Rates and times are measured or fitted to whole steps, see each device. A GPU nobody has measured has no costs, and what
would ask for them falls back on thresholds; any CPU is taken for the two cores below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from p99lab.engine.dealing import Dealt, fullest_processor
from p99lab.engine.geometry import Geometry
from p99lab.engine.plan import PrefixGroup, Row


class Level(NamedTuple):
    """Query tokens and keys that meet without a causal mask. `decodes`: the tokens are one-token rows, all of them."""

    num_tokens: int
    num_keys: int
    decodes: bool = False


SEGMENT_STEP = 192  # keys: a segment is whole key tiles of the kernels, whichever of 64, 96 or 192 they use
SEGMENT_COUNTS = (*range(1, 17), 20, 24, 32)  # into how many the longest level may be cut

GOOD_ENOUGH = 1.02  # a cut that may be faster by no more than this is not tried
CUTS_REMEMBERED = 8
CLOCK_EXPONENT = 1 / 3  # by which the clock falls with the processors that are busy: power grows with its cube
MOST_DEALT = 1024  # items that are dealt one by one; of more all processors count as full: up to 6 % too little

PRODUCTS_PER_LAYER = 4  # queries, keys and values; output; gate and up; down


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Rates and fixed times of one device.

    `weight_bytes_per_s`: reached by matrix products of few tokens. `attention_flops_per_s`: all processors at work;
    `processor_flops_per_s`: one of few. A tile is computed whole, however few of its `tile_rows` rows exist.
    `product_s`: a matrix product that multiplying binds takes so much more than its rate says, to fill the device and
    to empty it. `beside_bytes_per_s`: computing takes longer by what is read beside it at this rate. `decode_rows`: a
    level of decode rows with no more than so many folded rows is only read (0: there is no kernel for it). `item_s`:
    filling and draining the pipeline of one item. `call_s`: one call of a backend that calls once a level. `launch_s`:
    an attention kernel of a layer. `token_s`: a token's way through everything that is neither product nor attention,
    all layers. `step_s`: what a step takes besides.
    """

    memory_bytes_per_s: float
    weight_bytes_per_s: float
    matmul_flops_per_s: float
    attention_flops_per_s: float
    processor_flops_per_s: float
    num_processors: int
    tile_rows: int
    item_s: float = 0.0
    call_s: float = 0.0
    launch_s: float = 0.0
    product_s: float = 0.0
    token_s: float = 0.0
    step_s: float = 0.0
    beside_bytes_per_s: float = inf
    decode_rows: int = 0


H200 = DeviceCosts(
    memory_bytes_per_s=4.45e12,
    weight_bytes_per_s=3.7e12,
    matmul_flops_per_s=744e12,
    attention_flops_per_s=640e12,
    processor_flops_per_s=6.7e12,
    num_processors=132,
    tile_rows=128,
    item_s=8e-6,
    launch_s=20e-6,
    product_s=7e-6,
    token_s=6e-6,
    step_s=0.25e-3,
    beside_bytes_per_s=30e12,
    decode_rows=64,
)
"""FlashInfer's FA3 over folded rows and the project's decode kernel, bf16, head dimension 128; measured 2026-11-30.

FA3's part is fitted to 140 launches of 1 to 12 tiles over 30 000 to 130 816 keys, cut in 14 ways, its rate to whole
steps; products are fitted to steps without attention (`docs/log.md`, "Slots").
"""

TWO_CORES = DeviceCosts(
    memory_bytes_per_s=12e9,
    weight_bytes_per_s=12e9,
    matmul_flops_per_s=170e9,
    attention_flops_per_s=100e9,
    processor_flops_per_s=100e9,
    num_processors=1,
    tile_rows=1,
    call_s=80e-6,
    step_s=1e-3,
)
"""The reference backend in fp32 on two Zen 4 cores; measured 2026-11-29."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A layer's levels that are computed, as (keys, tiles, query tokens), the longest first."""

    spans: tuple[tuple[int, int, int], ...]
    num_read_keys: int


class _Cut(NamedTuple):
    """A layer's levels in segments of so many keys. `pieces`: of one head, (keys, items), the longest first."""

    segment: int
    pieces: list[tuple[int, int]]
    num_partials: int


def device_costs(device_name: str) -> DeviceCosts | None:
    """What has been measured of a device, by `torch.cuda.get_device_name` or "cpu"; None: nothing."""
    if device_name == "cpu":
        return TWO_CORES
    return H200 if "H200" in device_name else None


class StepCost:
    """Predicts device time for one model on one device.

    It remembers how the latest steps are best cut: whoever asks about one step asks the same instance, in one thread.
    """

    def __init__(self, device: DeviceCosts, geometry: Geometry, page_size: int, bytes_per_element: int = 2) -> None:
        self._device = device
        self._page_size = page_size
        self._num_layers = geometry.num_layers
        self._num_kv_heads = geometry.num_kv_heads
        self._gqa_ratio = geometry.num_q_heads // geometry.num_kv_heads
        num_head_weights = geometry.vocab_size * geometry.hidden_size
        num_embeddings = num_head_weights * (1 if geometry.tie_word_embeddings else 2)
        self._num_body_weights = geometry.num_parameters - num_embeddings
        self._num_head_weights = num_head_weights
        self._bytes_per_element = bytes_per_element
        key_bytes = 2 * geometry.kv_size * bytes_per_element
        self._read_key_s = key_bytes / device.memory_bytes_per_s
        self._beside_key_s = key_bytes / device.beside_bytes_per_s
        partial_bytes = geometry.num_q_heads * (geometry.head_dim * bytes_per_element + 4)
        self._partial_s = 2 * partial_bytes / device.memory_bytes_per_s  # of a token's result from one level, to merge
        self._pair_flops = 4 * geometry.q_size  # a query token meets a key
        tile_flops = 4 * device.tile_rows * geometry.head_dim
        self._tile_key_s = tile_flops / device.processor_flops_per_s  # an item's, for each of its keys
        self._even_key_s = tile_flops / device.attention_flops_per_s  # the same shared by all processors
        self._segments: dict[_Work, int] = {}  # the best for each, the latest last

    def step_time_s(self, rows: Sequence[Row], groups: Sequence[PrefixGroup]) -> float:
        """Seconds of a step that attends as `groups` says."""
        num_tokens = sum(len(row.token_ids) for row in rows)
        attention_s = self.attention_of_s(rows, groups) + self._causal_s(rows)
        return (
            self._device.step_s
            + num_tokens * self._device.token_s
            + self._products_s(num_tokens, sum(row.samples for row in rows))
            + self._num_layers * attention_s
        )

    @property
    def tile_tokens(self) -> int:
        """Tokens that fill a tile, at least one."""
        return max(1, self._device.tile_rows // self._gqa_ratio)

    @property
    def launches_s(self) -> float:
        """Seconds of all layers' attention kernels, but for what they do: those that compute, and those that read."""
        return 2 * self._num_layers * self._device.launch_s

    def rest_s(self, num_tokens: int) -> float:
        """Seconds of all but attention in a step of so many tokens, one of which samples."""
        return self._device.step_s + num_tokens * self._device.token_s + self._products_s(num_tokens, 1)

    def level_s(self, level: Level) -> float:
        """Seconds of all layers' attention over a level beside others that leave no processor idle."""
        if not level.num_tokens or not level.num_keys:
            return 0.0
        return self._num_layers * (self._even_s([level]) + self._device.call_s)

    def causal_s(self, num_tokens: int) -> float:
        """Seconds of all layers in which so many tokens of a row see each other, in a step that does so anyway."""
        if num_tokens < 2:
            return 0.0
        return self._num_layers * self._triangle_s(num_tokens)

    def attention_s(self, levels: Sequence[Level], segment: int | None = None) -> float:
        """Seconds of one layer's attention over `levels`, cut into segments of that many keys (None: the best)."""
        if not any(level.num_keys for level in levels):
            return 0.0
        computed, read = self._by_kind(levels)
        computed_s = 0.0
        work = self._work(computed)
        if work.spans:
            computed_s = self._cut_s(work, _cut(work, self._best_segment(work) if segment is None else segment))
        read_s = self._even_s(read)
        num_launches = (computed_s > 0) + (read_s > 0)
        return num_launches * self._device.launch_s + len(levels) * self._device.call_s + computed_s + read_s

    def attention_of_s(self, rows: Sequence[Row], groups: Sequence[PrefixGroup]) -> float:
        """Seconds of one layer's attention as `groups` says, without what rows see of their own new tokens."""
        return self.attention_s(levels_of(rows, groups, self._page_size))

    def groups_cost(self, rows: Sequence[Row], groups: Sequence[PrefixGroup]) -> bool:
        """Whether attention is slower as `groups` says than with no groups at all."""
        grouped_s, apart = self.attention_of_s(rows, groups), levels_of(rows, (), self._page_size)
        computed, read = self._by_kind(apart)
        if grouped_s <= self._even_s(computed) + self._even_s(read):  # no need to know how they would be cut
            return False
        return grouped_s > self.attention_s(apart)

    def group_pays(self, num_keys: int, readers: Sequence[int]) -> bool:
        """Whether keys are read faster in a level of their own than by each of `readers` (tokens) beside its others.

        Counted for a device that is busy: a level's own items and the merging of its results against the time saved.
        """
        num_tokens = sum(readers)
        own_s = self._num_items(num_tokens) * self._device.item_s / self._device.num_processors + self._device.call_s
        apart_s = self._reading_s(num_tokens, num_keys) + own_s + num_tokens * self._partial_s
        return apart_s < sum(self._reading_s(reader, num_keys) for reader in readers)

    def segment_tokens(self, levels: Sequence[tuple[int, int]]) -> int:
        """Keys of a segment that make attention fastest over (query tokens, keys); what has no more keys is not cut.

        A multiple of 192, no less than the longest level where cutting gains nothing.
        """
        work = self._work([Level(*level) for level in levels])
        return self._best_segment(work) if work.spans else SEGMENT_STEP

    def _by_kind(self, levels: Sequence[Level]) -> tuple[list[Level], list[Level]]:
        """Those that are computed in tiles, and those that are only read."""
        computed: list[Level] = []
        read: list[Level] = []
        for level in levels:
            (read if self._is_read_only(level) else computed).append(level)
        return computed, read

    def _is_read_only(self, level: Level) -> bool:
        return level.decodes and level.num_tokens * self._gqa_ratio <= self._device.decode_rows

    def _even_s(self, levels: Sequence[Level]) -> float:
        """Seconds of one layer with every processor busy, without overhead; levels of one kind."""
        num_read_keys = sum(level.num_keys for level in levels)
        read_s = num_read_keys * self._read_key_s
        if all(self._is_read_only(level) for level in levels):
            return read_s
        num_item_keys = sum(self._num_items(level.num_tokens) * level.num_keys for level in levels)
        return max(num_item_keys * self._even_key_s + num_read_keys * self._beside_key_s, read_s)

    def _work(self, levels: Sequence[Level]) -> _Work:
        spans: dict[int, tuple[int, int]] = {}
        for level in (level for level in levels if level.num_tokens and level.num_keys):
            tiles, tokens = spans.get(level.num_keys, (0, 0))
            spans[level.num_keys] = tiles + self._num_tiles(level.num_tokens), tokens + level.num_tokens
        longest_first = tuple((num_keys, *spans[num_keys]) for num_keys in sorted(spans, reverse=True))
        return _Work(longest_first, sum(level.num_keys for level in levels))

    def _best_segment(self, work: _Work) -> int:
        """Of a step it is asked for several times: by who groups its rows, who predicts its time, and who cuts it."""
        segment = self._segments.pop(work, None) or self._find_segment(work)
        self._segments[work] = segment
        if len(self._segments) > CUTS_REMEMBERED:
            del self._segments[next(iter(self._segments))]
        return segment

    def _find_segment(self, work: _Work) -> int:
        """None at all, then the most promising first, until no other should be faster by more than `GOOD_ENOUGH`."""
        longest = work.spans[0][0]
        cuts = [_cut(work, segment) for segment in {_rounded(-(-longest // count)) for count in SEGMENT_COUNTS}]
        best = _rounded(longest)
        best_s = self._cut_s(work, _cut(work, best))
        for least_s, cut in sorted((self._least_cut_s(work, cut), cut) for cut in cuts):
            if least_s * GOOD_ENOUGH >= best_s:
                break
            cut_s = self._cut_s(work, cut)
            if cut_s < best_s:
                best, best_s = cut.segment, cut_s
        return best

    def _cut_s(self, work: _Work, cut: _Cut) -> float:
        """A layer's time, the merging of the segments' results included."""
        num_items = self._num_kv_heads * sum(count for _, count in cut.pieces)
        if num_items > MOST_DEALT:
            return self._least_cut_s(work, cut)
        fullest = fullest_processor(cut.pieces, self._num_kv_heads, self._device.num_processors)
        return self._processor_s(work, cut, fullest)

    def _least_cut_s(self, work: _Work, cut: _Cut) -> float:
        """About the least that it takes: some processor has its share of all keys, and of the shortest pieces."""
        num_processors, num_heads = self._device.num_processors, self._num_kv_heads
        num_rounds = -(-num_heads * sum(count for _, count in cut.pieces) // num_processors)
        share = num_heads * sum(keys * count for keys, count in cut.pieces) / num_processors
        num_keys = max(share, cut.pieces[0][0], num_rounds * cut.pieces[-1][0])
        return self._processor_s(work, cut, Dealt(num_keys, num_rounds))

    def _processor_s(self, work: _Work, cut: _Cut, fullest: Dealt) -> float:
        """A layer's time if that is its fullest processor."""
        device = self._device
        num_busy = self._num_kv_heads * sum(keys * count for keys, count in cut.pieces) / fullest.num_keys
        all_busy_key_s = self._even_key_s * device.num_processors
        key_s: float = max(self._tile_key_s, all_busy_key_s * (num_busy / device.num_processors) ** CLOCK_EXPONENT)
        computed_s = fullest.num_keys * key_s + fullest.num_items * device.item_s
        computed_s += work.num_read_keys * self._beside_key_s
        return max(computed_s, work.num_read_keys * self._read_key_s) + cut.num_partials * self._partial_s

    def _reading_s(self, num_tokens: int, num_keys: int) -> float:
        return max(self._num_items(num_tokens) * num_keys * self._even_key_s, num_keys * self._read_key_s)

    def _num_items(self, num_tokens: int) -> int:
        return self._num_tiles(num_tokens) * self._num_kv_heads

    def _num_tiles(self, num_tokens: int) -> int:
        return -(-num_tokens * self._gqa_ratio // self._device.tile_rows)

    def _causal_s(self, rows: Sequence[Row]) -> float:
        """What rows of several tokens see of their own new tokens."""
        device = self._device
        chunks = [len(row.token_ids) for row in rows if len(row.token_ids) > 1]
        if not chunks:
            return 0.0
        flops_s = sum(map(self._triangle_s, chunks))
        num_items = sum(map(self._num_items, chunks))
        return flops_s + max(1.0, num_items / device.num_processors) * device.item_s

    def _triangle_s(self, num_tokens: int) -> float:
        """One layer's products of so many tokens with those before each."""
        return num_tokens**2 / 2 * self._pair_flops / self._device.attention_flops_per_s

    def _products_s(self, num_tokens: int, num_samples: int) -> float:
        """All layers' products of so many tokens, and the output head's."""
        body_s = self._product_s(self._num_body_weights, PRODUCTS_PER_LAYER * self._num_layers, num_tokens)
        return body_s + self._product_s(self._num_head_weights, 1, num_samples)

    def _product_s(self, num_weights: int, num_products: int, num_tokens: int) -> float:
        """One pass over weights in so many products; nothing for no tokens."""
        if not num_tokens:
            return 0.0
        device = self._device
        read_s = num_weights * self._bytes_per_element / device.weight_bytes_per_s
        multiplied_s = 2 * num_weights * num_tokens / device.matmul_flops_per_s
        return max(read_s, multiplied_s + num_products * device.product_s)


def levels_of(rows: Sequence[Row], groups: Sequence[PrefixGroup], page_size: int) -> list[Level]:
    """A step's levels: one a group, and one for what each row alone sees of earlier tokens.

    A row of one token sees its own key with those; what longer rows see of themselves is causal and no level.
    """
    shared = [0] * len(rows)
    levels = []
    for group in groups:
        num_keys, lengths = group.num_pages * page_size, [len(rows[i].token_ids) for i in group.rows]
        levels.append(Level(sum(lengths), num_keys, max(lengths) == 1))
        for i in group.rows:
            shared[i] += num_keys
    for row, num_shared in zip(rows, shared, strict=True):
        num_keys = row.num_computed_tokens + (len(row.token_ids) == 1) - num_shared
        if num_keys:
            levels.append(Level(len(row.token_ids), num_keys, len(row.token_ids) == 1))
    return levels


def _cut(work: _Work, segment: int) -> _Cut:
    counts: dict[int, int] = {}
    num_partials = 0
    for num_keys, tiles, tokens in work.spans:
        whole, rest = divmod(num_keys, segment)
        if whole:
            counts[segment] = counts.get(segment, 0) + whole * tiles
        if rest:
            counts[rest] = counts.get(rest, 0) + tiles
        num_partials += (whole + (rest > 0)) * tokens
    return _Cut(segment, sorted(counts.items(), reverse=True), num_partials)


def _rounded(num_keys: int) -> int:
    return -(-num_keys // SEGMENT_STEP) * SEGMENT_STEP
