"""The engine: one model, one page pool, one scheduler, and the step that ties them together."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.config import EngineConfig, GroupingConfig, SchedulerConfig
from p99lab.engine.events import Completion, OutputText, TokenEvent, Usage
from p99lab.engine.kv_pool import KVPool, affordable_pages
from p99lab.engine.model import LlamaModel
from p99lab.engine.model_store import load
from p99lab.engine.plan import Logprobs, StepPlan
from p99lab.engine.request import FinishReason, IntArray, Request, SamplingParams, Share, Status
from p99lab.engine.runner import ModelRunner
from p99lab.engine.scheduler import Change, Scheduler
from p99lab.engine.stats import EngineStats, StepTimes
from p99lab.engine.stepping import StepLoop
from p99lab.errors import BadParameterError

Prompt = str | Sequence[dict[str, str]] | Sequence[int] | IntArray  # text, chat messages, or token ids
OnEvent = Callable[[TokenEvent], None]


@dataclass(frozen=True, slots=True)
class Live:
    """A request between `add` and its last event."""

    request: Request
    text: OutputText
    on_event: OnEvent | None


class Engine:
    """`with Engine(EngineConfig(model="smollm2-135m")) as engine: engine.generate(["…"])`.

    Any number of engines may live in one process. Calls from several threads are serialised; `stats` never waits.

    Args:
        config: what to load and how to schedule.
        clock: seconds; every time the engine reports is on it.

    Raises:
        ModelError: the model cannot be found or read.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        dtype, device = getattr(torch, config.model.dtype), torch.device(config.model.device)
        weights, self.tokenizer = load(config.model)
        self.geometry = weights.geometry
        page_size = config.cache.page_size
        num_pages = config.cache.num_pages or affordable_pages(self.geometry, page_size, dtype, device)
        pool = KVPool.allocate(self.geometry, num_pages, page_size, dtype, device)
        self.config = config
        self.clock = clock
        self._tree = PrefixTree(PagePool(num_pages, page_size), enabled=config.cache.prefix_cache)
        self._scheduler = self._new_scheduler()
        self._runner = ModelRunner(LlamaModel(weights), pool, ReferenceAttention(pool), config.seed)
        self._step_times = StepTimes()
        self._live: dict[str, Live] = {}
        self._undelivered: list[TokenEvent] = []  # of requests that ended outside a step
        self._num_added = 0
        self._lock = threading.RLock()
        self._loop_lock = threading.Lock()
        self._loop: StepLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the step loop; open streams end with an error. Closing twice is fine."""
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def encode(self, prompt: Prompt) -> IntArray:
        """Token ids of a prompt, [num_prompt_tokens] int32."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        messages = [entry for entry in prompt if isinstance(entry, dict)] if isinstance(prompt, (list, tuple)) else []
        if messages:
            return self.tokenizer.chat(messages)
        return np.asarray(prompt, np.int32)

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        arrival_s: float | None = None,
        on_event: OnEvent | None = None,
    ) -> str:
        """Queue a request; `step` does the work. Returns its id.

        Args:
            priority: smaller is more urgent (policy `priority`).
            deadline_s: on the engine's clock (policy `deadline`).
            arrival_s: when the request was meant to arrive, if earlier than now.
            on_event: called with each of the request's events, in the thread that steps.

        Raises:
            BadParameterError: an empty prompt, ids outside the vocabulary, an id in use, or more tokens than the model
                or the page pool can hold.
        """
        sampling = sampling or SamplingParams()
        token_ids = self.encode(prompt)
        self._check_prompt(token_ids, sampling)
        with self._lock:
            request = Request.create(
                self._num_added,
                token_ids,
                sampling,
                self.clock() if arrival_s is None else arrival_s,
                self.config.cache.page_size,
                request_id,
                priority,
                deadline_s,
            )
            self._scheduler.add(request)
            self._num_added += 1
            text = OutputText(self.tokenizer.detokenizer(), sampling.stop)
            self._live[request.request_id] = Live(request, text, on_event)
            return request.request_id

    def step(self) -> list[TokenEvent]:
        """Run one step for all requests that fit into it. Returns its events; none when there is no work."""
        with self._lock:
            events, self._undelivered = self._undelivered, []
            plan = self._scheduler.schedule(self.clock())
            if plan is not None:
                began_s = self.clock()
                self._book_host_time(began_s)
                result = self._runner.execute(plan)
                ended_s = self.clock()
                self._book_step(plan, ended_s)
                changes = self._scheduler.update(result)
                events += [self._event(change) for change in changes]
                self._step_times.add(plan.num_tokens, began_s, ended_s)
            if not self.has_work:
                self._scheduler.check()
            return events

    def cancel(self, request_id: str) -> bool:
        """End a request at any moment; its pages are free before the next step. False: no such request."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None:
                return False
            held_pages = live.request.status is Status.RUNNING
            self._scheduler.finish(live.request, FinishReason.CANCELLED)
            live.request.timeline.book(Share.SCHEDULING if held_pages else Share.QUEUE, self.clock())
            self._undelivered.append(self._ending(live, None, "", None, FinishReason.CANCELLED))
            return True

    def quiesce(self) -> None:
        """Cancel whatever is left, also what clients have asked for but the step loop has not taken in yet."""
        if self._loop is not None:
            self._loop.wait_for_inbox()
        with self._lock:
            for request_id in list(self._live):
                self.cancel(request_id)
            self._undelivered.clear()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run a batch to its end, in the caller's thread. One completion per prompt, in their order.

        Raises:
            BadParameterError: as `add`; then none of the batch has run.
        """
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        completions: list[Completion] = []
        with self._lock:
            try:
                for prompt, params in zip(prompts, each, strict=True):
                    completion = Completion("")
                    completion.request_id = self.add(prompt, params, on_event=completion.add)
                    completions.append(completion)
                while any(completion.finish_reason is None for completion in completions):
                    self.step()
            finally:
                for completion in completions:
                    self.cancel(completion.request_id)
        return completions

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        arrival_s: float | None = None,
    ) -> AsyncGenerator[TokenEvent, None]:
        """A request's events as they come, for asyncio clients; the engine steps in a thread of its own.

        Arguments and errors as `add`. Leaving the iteration early cancels the request.
        """
        arrival_s = self.clock() if arrival_s is None else arrival_s
        with self._loop_lock:  # not the engine's lock: that one is held through every step
            loop = self._loop = self._loop or StepLoop(self)
        token_ids = self.encode(prompt)

        def add(on_event: OnEvent) -> str:
            return self.add(
                token_ids,
                sampling,
                request_id=request_id,
                priority=priority,
                deadline_s=deadline_s,
                arrival_s=arrival_s,
                on_event=on_event,
            )

        async for event in loop.stream(add):
            yield event

    def stats(self) -> EngineStats:
        """Counters since the start, pages by state, and step times."""
        return EngineStats.of(self._scheduler, self._tree.pool, self._step_times)

    def forget_except(self, prefixes: Sequence[IntArray]) -> None:
        """Evict all cached pages but those of `prefixes`: the cache as if only these had been primed."""
        with self._lock:
            self._tree.forget_except(prefixes)

    def reconfigure(
        self,
        scheduler: SchedulerConfig | None = None,
        grouping: GroupingConfig | None = None,
        prefix_cache: bool | None = None,
    ) -> None:
        """Schedule differently from now on, over the same weights, pool and cached pages. Counters begin anew.

        Raises:
            RuntimeError: requests are waiting or running.
        """
        with self._lock:
            if self.has_work:
                raise RuntimeError("an engine can only be reconfigured when it has no requests")
            parts = self.config.model_dump()
            if scheduler is not None:
                parts["scheduler"] = scheduler.model_dump()
            if grouping is not None:
                parts["grouping"] = grouping.model_dump()
            if prefix_cache is not None:
                parts["cache"]["prefix_cache"] = prefix_cache
                self._tree.enabled = prefix_cache
            self.config = EngineConfig.parse(parts)
            self._scheduler = self._new_scheduler()
            self._step_times = StepTimes()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.config.scheduler, self.config.grouping, self._tree, self.tokenizer.eos_ids)

    def _check_prompt(self, token_ids: IntArray, sampling: SamplingParams) -> None:
        if token_ids.ndim != 1 or len(token_ids) == 0:
            raise BadParameterError("a prompt needs at least one token")
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= self.geometry.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise BadParameterError(f"token id {wrong} is outside the vocabulary of {self.geometry.vocab_size}")
        num_tokens, limit = len(token_ids) + sampling.max_tokens, self.geometry.max_position_embeddings
        if num_tokens > limit:
            raise BadParameterError(
                f"{len(token_ids)} prompt tokens and {sampling.max_tokens} to generate exceed the model's {limit}"
            )

    def _book_host_time(self, now_s: float) -> None:
        turn = self._scheduler.turn
        for request in turn.preempted:
            request.timeline.book(Share.SCHEDULING, now_s)
            request.timeline.num_preemptions += 1
        for request in turn.running:
            timeline = request.timeline
            timeline.book(Share.QUEUE if request in turn.admitted else Share.SCHEDULING, now_s)
            if timeline.admitted_s is None:
                timeline.admitted_s = now_s

    def _book_step(self, plan: StepPlan, now_s: float) -> None:
        scheduled = {row.request_id for row in plan.rows}
        for request in self._scheduler.turn.running:
            if request.request_id not in scheduled:
                share = Share.STALLED
            else:
                share = Share.PREFILL if request.is_prefill else Share.DECODE
            request.timeline.book(share, now_s)

    def _event(self, change: Change) -> TokenEvent:
        """Turn a sampled token into an event, ending the request where a stop string is complete."""
        request = change.request
        live = self._live[request.request_id]
        now_s = self.clock()
        if request.timeline.first_token_s is None and change.token_id is not None:
            request.timeline.first_token_s = now_s
        hidden = request.finish_reason is FinishReason.STOP  # an end-of-sequence or stop id is no text
        text = "" if hidden or change.token_id is None else live.text.push(change.token_id)
        if live.text.stopped:
            self._scheduler.finish(request, FinishReason.STOP)
        reason = FinishReason.STOP if live.text.stopped else request.finish_reason
        if reason is not None:
            request.timeline.book(Share.SCHEDULING, now_s)
            return self._ending(live, change.token_id, text + live.text.flush(), change.logprobs, reason)
        event = TokenEvent(request.request_id, change.token_id, text, now_s, change.logprobs)
        if live.on_event is not None:
            live.on_event(event)
        return event

    def _ending(
        self, live: Live, token_id: int | None, text: str, logprobs: Logprobs | None, reason: FinishReason
    ) -> TokenEvent:
        """A request's last event, with its bill."""
        request = live.request
        timeline = request.timeline
        timeline.finished_s = timeline.accounted_s
        usage = Usage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens, timeline)
        event = TokenEvent(request.request_id, token_id, text, timeline.finished_s, logprobs, reason, usage)
        del self._live[request.request_id]
        if live.on_event is not None:
            live.on_event(event)
        return event
