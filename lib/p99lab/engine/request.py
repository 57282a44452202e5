"""A request: what was asked, how far it has come, and when each thing happened."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import numpy as np

from p99lab.caches.pages import IntArray as IntArray
from p99lab.errors import BadParameterError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    `temperature` 0 is greedy. `seed` fixes a request's random numbers, in any batch; on a GPU its tokens may
    still differ, because rounding depends on the batch. Without one the engine derives it from its own seed and the
    request's number. `logprobs` asks for that many top log-probabilities
    beside the chosen token's own (0: the chosen one alone; None: none). `prompt_logprobs` asks for the same of every
    prompt token, given those before it; such a prompt is computed whole, the prefix cache is not read for it.

    Raises:
        BadParameterError: a value out of range.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, ok in (
            ("max_tokens", self.max_tokens >= 1),
            ("temperature", 0.0 <= self.temperature < math.inf),
            ("top_k", 0 <= self.top_k < 2**31),
            ("top_p", 0.0 < self.top_p <= 1.0),
            ("min_p", 0.0 <= self.min_p <= 1.0),
            ("stop", isinstance(self.stop, tuple) and "" not in self.stop),
            ("logprobs", self.logprobs is None or self.logprobs >= 0),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= 0),
        ):
            if not ok:
                raise BadParameterError(f"{name}={getattr(self, name)!r} is out of range")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one position: of the token that stands there, and the `top` asked for as (id, logprob)."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop id or a stop string
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"
    ERROR = "error"  # the engine was closed, or a step failed


class TimeShare(enum.Enum):
    """The parts of a request's time; each value names its field of `Timeline`."""

    QUEUE = "queue_s"
    PREFILL = "prefill_s"
    DECODE = "decode_s"
    STALLED = "stalled_s"
    SCHEDULING = "scheduling_s"


@dataclass(slots=True)
class Timeline:
    """Where a request's time went, in seconds of the engine's clock.

    From arrival to the end every moment belongs to one of five shares, so that
    `queue_s + prefill_s + decode_s + stalled_s + scheduling_s == finished_s - arrival_s`:
    `queue_s` before the first step that computes it, or preempted and waiting again · `prefill_s` device steps that
    computed its prompt · `decode_s` device steps that computed its output · `stalled_s` device steps that ran without
    it later while it held pages · `scheduling_s` host time between steps while it held pages.
    """

    arrival_s: float
    accounted_s: float = field(init=False)  # everything up to here is booked
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stalled_s: float = 0.0
    scheduling_s: float = 0.0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.accounted_s = self.arrival_s

    def book(self, share: TimeShare, until_s: float) -> None:
        """Give the time since the last booking to `share`."""
        setattr(self, share.value, getattr(self, share.value) + until_s - self.accounted_s)
        self.accounted_s = until_s


@dataclass(slots=True, eq=False)
class Request:
    """One request. The scheduler is its only writer, except for `timeline`, which the engine keeps.

    The one invariant: a request is scheduled while `num_computed_tokens < num_due_tokens`; each step computes the next
    `num_scheduled_tokens` of them, and a step that reaches `num_due_tokens` samples one more. A step may be planned
    while the one before it runs: so `num_computed_tokens` counts what steps have been planned to compute, and a token
    that a planned step will sample leaves a placeholder, which is due to be computed like any other.

    `tokens` is an int32 buffer of capacity prompt + max_tokens; its first `num_tokens` entries are valid, and of
    those the first `num_prompt_tokens` were asked for; zeros stand for the placeholders behind them. `page_table` has
    room for every token of the buffer; its first `num_pages` entries are valid. `prompt_logprobs`, where asked for,
    grows to one entry for each prompt token; that of the first is None.
    """

    request_id: str
    number: int  # order of arrival in this engine, unique
    tokens: IntArray
    num_prompt_tokens: int
    sampling: SamplingParams
    timeline: Timeline
    priority: int = 0  # smaller is more urgent
    deadline_s: float | None = None  # on the engine's clock
    num_tokens: int = 0
    num_placeholders: int = 0
    num_due_tokens: int = 0  # to be computed: the known ones and the placeholders, but never the last that is sampled
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache when first admitted
    page_table: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    num_pages: int = 0
    last_epoch: int = 0  # of the latest step that touches its pages
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None

    @classmethod
    def create(
        cls,
        number: int,
        prompt_ids: IntArray,
        sampling: SamplingParams,
        arrival_s: float,
        page_size: int,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Request:
        """A waiting request over a copy of `prompt_ids` ([num_prompt_tokens] int32)."""
        num_prompt_tokens = len(prompt_ids)
        if num_prompt_tokens == 0:
            raise ValueError("a prompt needs at least one token")
        tokens = np.empty(num_prompt_tokens + sampling.max_tokens, np.int32)
        tokens[:num_prompt_tokens] = prompt_ids
        return cls(
            request_id=request_id if request_id is not None else f"request-{number}",
            number=number,
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            timeline=Timeline(arrival_s),
            priority=priority,
            deadline_s=deadline_s,
            num_tokens=num_prompt_tokens,
            num_due_tokens=num_prompt_tokens,
            page_table=np.empty(-(-len(tokens) // page_size), np.int32),
            prompt_logprobs=[] if sampling.prompt_logprobs is None else [None],
        )

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> IntArray:
        """The valid tokens, [num_tokens], a view."""
        return self.tokens[: self.num_tokens]

    @property
    def pages(self) -> IntArray:
        """The valid page table, [num_pages], a view."""
        return self.page_table[: self.num_pages]

    @property
    def is_prefill(self) -> bool:
        """Whether prompt tokens are left to schedule (after a preemption output tokens are computed as a prompt is)."""
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not all known yet."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """How many first tokens may come from the cache: all but the last, or those whose successors are scored."""
        return len(self.prompt_logprobs) - 1 if self.scores_prompt else self.num_tokens - 1

    def target_ids(self, start: int, stop: int) -> IntArray | None:
        """The prompt tokens that positions start … stop - 1 predict, as a copy; None where no scores are missing."""
        if not self.scores_prompt or start + 1 >= self.num_prompt_tokens:
            return None
        return self.tokens[start + 1 : min(stop + 1, self.num_prompt_tokens)].copy()

    def add_placeholder(self) -> None:
        """A step has been planned that will sample the next token."""
        self.tokens[self.num_tokens + self.num_placeholders] = 0
        self.num_placeholders += 1
        self.num_due_tokens = min(self.num_due_tokens + 1, len(self.tokens) - 1)

    def fill_placeholder(self, token_id: int) -> None:
        """The token of the first placeholder is known."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.num_placeholders -= 1
