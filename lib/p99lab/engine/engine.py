"""The engine: one model, one page pool, one scheduler, and the step that ties them together."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.backends import make_runner
from p99lab.engine.config import AttentionConfig, EngineConfig, GraphsConfig, GroupingConfig, SchedulerConfig
from p99lab.engine.costs import StepCost, device_costs
from p99lab.engine.events import Completion, NoText, OutputText, TokenEvent, Usage
from p99lab.engine.geometry import Geometry
from p99lab.engine.interrupts import uninterrupted
from p99lab.engine.kv_pool import KVPool, affordable_pages, page_bytes, step_bytes
from p99lab.engine.model_store import load
from p99lab.engine.plan import InFlight, StepPlan
from p99lab.engine.prompts import Prompt as Prompt
from p99lab.engine.prompts import check_limits, encode
from p99lab.engine.request import FinishReason, IntArray, Request, SamplingParams, Share
from p99lab.engine.runner import Runner
from p99lab.engine.scheduler import Change, Scheduler
from p99lab.engine.stats import EngineStats, StepTimes
from p99lab.engine.stepping import StepLoop
from p99lab.engine.timekeeping import book_end, book_launch, book_step
from p99lab.engine.weights import Weights
from p99lab.errors import BadParameterError, EngineClosedError, EngineFailedError

LOGGER = logging.getLogger(__name__)

OnEvent = Callable[[TokenEvent], None]


@dataclass(frozen=True, slots=True)
class Live:
    """A request between `add` and its last event."""

    request: Request
    text: OutputText | NoText
    on_event: OnEvent | None


@dataclass(frozen=True, slots=True)
class Underway:
    """A step in flight."""

    plan: StepPlan
    step: InFlight
    launched_s: float


class Engine:
    """`with Engine(EngineConfig(model="smollm2-135m")) as engine: engine.generate(["…"])`.

    Any number of engines may live in one process. Calls from several threads take turns, a step each; `stats` never
    waits. Ctrl-C takes effect between steps.

    After `close`, every call but `stats` raises EngineClosedError. A step that raises leaves accounts that nobody can
    vouch for: it ends every request with FinishReason.ERROR, and every later call raises EngineFailedError.

    Args:
        config: what to load and how to schedule.
        clock: seconds; every time the engine reports is on it.
        new_runner: makes what executes the plans; another than the model's measures the engine around it.

    Raises:
        ModelError: the model cannot be found or read.
        BadParameterError: the device cannot be used, or has no room for the page pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        new_runner: Callable[[EngineConfig, Weights, KVPool], Runner] = make_runner,
    ) -> None:
        dtype, device = getattr(torch, config.model.dtype), _device(config.model.device)
        weights, self.tokenizer = load(config.model)
        self.geometry = weights.geometry
        page_size = config.cache.page_size
        self._max_step_tokens = _max_step_tokens(config.scheduler, self.geometry)
        reserve_bytes = step_bytes(self.geometry, self._max_step_tokens, config.scheduler.max_num_seqs, dtype)
        num_pages = config.cache.num_pages or affordable_pages(self.geometry, page_size, dtype, device, reserve_bytes)
        pool = _pool(self.geometry, num_pages, page_size, dtype, device)
        self.config = config
        self.clock = clock
        self._tree = PrefixTree(PagePool(num_pages, page_size), enabled=config.cache.prefix_cache)
        costs = device_costs("cpu" if device.type == "cpu" else torch.cuda.get_device_name(device))
        self._costs = None if costs is None else StepCost(costs, self.geometry, page_size, dtype.itemsize)
        self._scheduler = self._new_scheduler(config)
        self._runner: Runner | None = new_runner(config, weights, pool)
        self._step_times = StepTimes()
        self._in_flight: deque[Underway] = deque()  # oldest first; between two calls at most one
        self._live: dict[str, Live] = {}
        self._events: list[TokenEvent] = []  # for the next `step`
        self._outbox: deque[tuple[OnEvent, TokenEvent]] = deque()
        self._listeners: list[Callable[[], None]] = []
        self._num_added = 0
        self._failure: traceback.TracebackException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # held through every step
        self._loop_lock = threading.Lock()  # of what clients may not wait a step for
        self._loop: StepLoop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up model and pool, after the step in hand. Live requests end with an error. Closing twice is fine.

        Raises:
            AccountingError: pages or requests do not add up.
        """
        if os.getpid() != self._pid:
            return  # locks and thread are those of the process that this one was forked from
        with self._loop_lock:  # a stream is submitted before the loop is told to stop, or not at all
            self._closed = True
            if self._loop is not None:
                self._loop.stop()
                self._loop = None
        with self._lock:
            with uninterrupted():
                self._end_all()
            self._deliver()
            if self._failure is None:
                self._scheduler.check()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to tell."""
        return bool(self.has_requests or self._events)

    @property
    def has_requests(self) -> bool:
        """Whether `advance` has something to compute or to take in."""
        return bool(self._live or self._in_flight)

    def encode(self, prompt: Prompt) -> IntArray:
        """Token ids of a prompt, [num_prompt_tokens] int32.

        Raises:
            BadParameterError: neither text nor messages nor ids, no tokens at all, or ids outside the vocabulary.
        """
        return encode(prompt, self.tokenizer, self.geometry.vocab_size)

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
        detokenize: bool = True,
    ) -> str:
        """Queue a request; `step` does the work. Returns its id.

        Args:
            priority: smaller is more urgent (policy `priority`).
            deadline_s: on the engine's clock (policy `deadline`).
            arrival_s: when the request was meant to arrive, if earlier than now.
            on_event: called with each of the request's events, in the thread that steps, cancels or closes; `step`
                returns those of requests that have none, to whoever steps. It may call the engine but must not wait
                for another thread that does. When it raises, that is logged and its request cancelled.
            detokenize: False: events have no text, and stop strings are not looked for.

        Raises:
            BadParameterError: a prompt as `encode` refuses it, an id in use, more tokens than the model or the page
                pool can hold, or more log-probabilities than the model has tokens.
            QueueFullError: `max_num_waiting` requests wait already; nothing has changed.
        """
        sampling = sampling or SamplingParams()
        token_ids = self.encode(prompt)
        check_limits(len(token_ids), sampling, self.geometry)
        with self._lock, uninterrupted():
            self._usable_runner()
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
            text = OutputText(self.tokenizer.detokenizer(), sampling.stop) if detokenize else NoText()
            self._live[request.request_id] = Live(request, text, on_event)
            return request.request_id

    def step(self) -> list[TokenEvent]:
        """Run one step for all requests that fit into it; nothing is run when there is no work.

        With overlap the step goes on running, and the one launched by the call before is taken in.

        Returns:
            The events since the last call of requests without `on_event`.
        """
        with self._lock:
            self.advance()
            events, self._events = self._events, []
            return events

    def advance(self) -> None:
        """`step`, but events without `on_event` are left for whoever calls `step` next."""
        with self._lock:
            try:
                with uninterrupted():
                    runner = self._usable_runner()
                    with self._vouched():
                        self._compute(runner)
            finally:
                self._deliver()

    def fail(self, error: BaseException) -> None:
        """Something outside a step has shown the accounts to be broken: every request ends, later calls say why."""
        with self._lock:
            with uninterrupted():
                self._fail(error)
            self._deliver()

    def cancel(self, request_id: str) -> bool:
        """End a request at any moment; its pages are free before the next step, or once a step that runs has ended.

        False: no such request.
        """
        with self._lock:
            with uninterrupted():
                live = self._live.get(request_id)
                if live is not None:
                    self._abort(live, FinishReason.CANCELLED)
                    self._scheduler.finish(live.request, FinishReason.CANCELLED)
            self._deliver()
            return live is not None

    def quiesce(self) -> None:
        """Cancel whatever is left, also what clients have asked for but the step loop has not taken in yet.

        Raises:
            AccountingError: pages or requests do not add up then.
        """
        with self._loop_lock:
            self._usable_runner()
            loop = self._loop
        if loop is not None:
            loop.wait_for_inbox()
        with self._lock:
            for request_id in list(self._live):
                self.cancel(request_id)
            self._settle()
            self._events.clear()
            self.check()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run a batch to its end, in the caller's thread. One completion per prompt, in their order.

        Raises:
            BadParameterError: as `add`, or not one sampling for each prompt; then none of the batch has run.
            QueueFullError: the batch is larger than what may wait; none of it has run.
        """
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        if isinstance(prompts, str):
            raise BadParameterError("generate takes a list of prompts, not a single text")
        if len(each) != len(prompts):
            raise BadParameterError(f"{len(prompts)} prompts with {len(each)} samplings: give one for each, or one")
        encoded = [self.encode(prompt) for prompt in prompts]
        completions: list[Completion] = []
        try:
            with self._lock, uninterrupted():
                for token_ids, params in zip(encoded, each, strict=True):
                    completion = Completion("")
                    completion.request_id = self.add(token_ids, params, on_event=completion.add)
                    completions.append(completion)
            while any(completion.finish_reason is None for completion in completions):
                self.advance()
        finally:
            for completion in completions:
                self.cancel(completion.request_id)
            with self._lock:
                if not self._live:
                    self._settle()
        if any(completion.finish_reason is FinishReason.ERROR for completion in completions):
            self._usable_runner()  # another thread's step has failed: says so
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
        token_ids = self.encode(prompt)

        def add(engine: Engine, on_event: OnEvent) -> str:
            return engine.add(
                token_ids,
                sampling,
                request_id=request_id,
                priority=priority,
                deadline_s=deadline_s,
                arrival_s=arrival_s,
                on_event=on_event,
            )

        with self._loop_lock:
            self._usable_runner()
            self._loop = self._loop or StepLoop(self)
            events = self._loop.stream(add)
        async with aclosing(events):
            async for event in events:
                if event.finish_reason is FinishReason.ERROR:
                    self._usable_runner()  # says why
                yield event

    def submit(self, command: Callable[[Engine], object]) -> None:
        """Have `command` applied in the thread that steps for `stream`, between two steps. Never waits for a step.

        What it raises fails the engine.

        Raises:
            EngineClosedError, EngineFailedError: as every call; the command is not applied then.
        """
        with self._loop_lock:
            self._usable_runner()
            self._loop = self._loop or StepLoop(self)
            self._loop.submit(command)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have `listener` called after every step, cancellation, reconfiguration and end, when `on_event` was told all.

        It is called in the thread that has done it, must not raise, and must not wait for another that uses the engine.
        """
        with self._lock:
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)

    def stats(self) -> EngineStats:
        """Counters since the start, pages by state, and step times."""
        return EngineStats.of(self._scheduler, self._tree.pool, self._step_times)

    def check(self) -> None:
        """Prove that pages and requests add up. Its cost grows with the cache, so it is not part of a step.

        Raises:
            AccountingError: they do not.
        """
        with self._lock:
            self._usable_runner()
            self._scheduler.check()

    def forget_except(self, prefixes: Sequence[IntArray]) -> None:
        """Evict all cached pages but those of `prefixes`: the cache as if only these had been primed."""
        with self._lock:
            self._usable_runner()
            self._settle()
            with uninterrupted():
                self._tree.forget_except(prefixes)

    def reconfigure(
        self,
        scheduler: SchedulerConfig | None = None,
        grouping: GroupingConfig | None = None,
        prefix_cache: bool | None = None,
        attention: AttentionConfig | None = None,
        graphs: GraphsConfig | None = None,
    ) -> None:
        """Work differently from now on, over the same weights, pool and cached pages. Counters begin anew.

        Raises:
            RuntimeError: requests are waiting or running.
            BadParameterError: an attention that cannot be used here, graphs that were not captured at the start, a
                bound on steps whose times nobody has measured, or on a GPU steps of more tokens than memory was
                reserved for at the start; nothing has changed.
        """
        with self._lock, uninterrupted():
            runner = self._usable_runner()
            if self._live:
                raise RuntimeError("an engine can only be reconfigured when it has no requests")
            self._settle()
            parts = self.config.model_dump()
            if scheduler is not None:
                parts["scheduler"] = scheduler.model_dump()
            if grouping is not None:
                parts["grouping"] = grouping.model_dump()
            if prefix_cache is not None:
                parts["cache"]["prefix_cache"] = prefix_cache
            if attention is not None:
                parts["attention"] = attention.model_dump()
            if graphs is not None:
                if graphs.max_num_tokens != self.config.graphs.max_num_tokens:
                    raise BadParameterError("graphs: 'max_num_tokens' is fixed when the engine starts")
                parts["graphs"] = graphs.model_dump()
            config = EngineConfig.parse(parts)
            self._require_reserve(config)
            new_scheduler = self._new_scheduler(config)
            if attention is not None or graphs is not None:
                runner.reconfigure(attention, graphs)
            self.config = config
            self._tree.enabled = config.cache.prefix_cache
            self._scheduler = new_scheduler
            self._step_times = StepTimes()
            self._deliver()

    def _require_reserve(self, config: EngineConfig) -> None:
        num_tokens = _max_step_tokens(config.scheduler, self.geometry)
        if config.model.device != "cpu" and num_tokens > self._max_step_tokens:
            reserved = f"memory is reserved for {self._max_step_tokens}, the most at the engine's start"
            raise BadParameterError(f"steps of up to {num_tokens} tokens: {reserved}")

    def _new_scheduler(self, config: EngineConfig) -> Scheduler:
        return Scheduler(config.scheduler, config.grouping, self._tree, self.tokenizer.eos_ids, self._costs)

    def _usable_runner(self) -> Runner:
        """The runner of an engine that can still be used.

        Raises:
            EngineFailedError: a step has failed; the error's note is the step's traceback.
            EngineClosedError: the engine is closed, or belongs to the process that this one was forked from.
        """
        if os.getpid() != self._pid:
            raise EngineClosedError("an engine does not survive a fork: make one in this process")
        if self._failure is not None:
            reason = "".join(self._failure.format_exception_only()).splitlines()[0]
            error = EngineFailedError(f"a step of this engine has failed, make a new one ({reason})")
            error.add_note("".join(self._failure.format()))
            raise error
        if self._closed or self._runner is None:
            raise EngineClosedError("the engine is closed")
        return self._runner

    def _compute(self, runner: Runner) -> None:
        """Launch the next step; then take in the oldest one in flight, unless it is that one and may overlap."""
        num_overlapping = int(self._launch(runner) and self.config.scheduler.overlap)
        if len(self._in_flight) > num_overlapping:
            self._take_in()

    def _launch(self, runner: Runner) -> bool:
        """False: there is nothing to launch, or not before a step in flight is taken in."""
        began_s = self.clock()
        plan = self._scheduler.schedule(began_s)
        planned_s = self.clock()
        self._step_times.schedule_s += planned_s - began_s
        if plan is None:
            return False
        if not self._in_flight:
            book_launch(self._scheduler.turn, planned_s)
        self._in_flight.append(Underway(plan, runner.launch(plan), planned_s))
        self._step_times.launch_s += self.clock() - planned_s
        return True

    def _take_in(self) -> None:
        """Wait for the oldest step in flight, and tell what it has sampled."""
        oldest = self._in_flight[0]
        began_s = self.clock()
        result = oldest.step.result()
        ended_s = self.clock()
        self._in_flight.popleft()
        next_admitted = self._scheduler.turn.admitted if self._in_flight else ()
        book_step(self._scheduler.running, oldest.plan, next_admitted, ended_s)
        for change in self._scheduler.update(result):
            self._tell(change)
        self._step_times.add(oldest.plan.num_tokens, oldest.launched_s, ended_s)
        self._step_times.device_s += result.device_s or 0.0
        self._step_times.wait_s += ended_s - began_s
        self._step_times.update_s += self.clock() - ended_s

    def _settle(self) -> None:
        """Take in what is in flight, so that requests that have ended hold no pages."""
        while self._in_flight:
            try:
                with uninterrupted(), self._vouched():
                    self._take_in()
            finally:
                self._deliver()

    @contextmanager
    def _vouched(self) -> Iterator[None]:
        """Whatever raises in here leaves accounts that nobody can vouch for."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._failure = traceback.TracebackException.from_exception(error)
        self._end_all()

    def _end_all(self) -> None:
        """The end of the engine: all its requests end with an error, and its memory is given up."""
        for underway in self._in_flight:
            with suppress(Exception):  # a device that has failed says so again
                underway.step.abandon()
        for live in [*self._live.values()]:
            self._abort(live, FinishReason.ERROR)
        self._in_flight.clear()
        self._runner = None

    def _deliver(self) -> None:
        """Call back with what has happened, in its order; callbacks may make more happen."""
        while self._outbox:
            on_event, event = self._outbox.popleft()
            try:
                on_event(event)
            except Exception:
                LOGGER.exception("on_event of '%s' has raised: the request is cancelled", event.request_id)
                self.cancel(event.request_id)
        for listener in self._listeners:
            listener()

    def _tell(self, change: Change) -> None:
        """Turn a sampled token into an event, ending the request where a stop string is complete."""
        request = change.request
        live = self._live[request.request_id]
        now_s = self.clock()
        if request.timeline.first_token_s is None:
            request.timeline.first_token_s = now_s
        hidden = request.finish_reason is FinishReason.STOP  # an end-of-sequence or stop id is no text
        text = "" if hidden else live.text.push(change.token_id)
        if live.text.stopped:
            self._scheduler.finish(request, FinishReason.STOP)
        reason = FinishReason.STOP if live.text.stopped else request.finish_reason
        event = TokenEvent(request.request_id, change.token_id, text, now_s, change.logprobs)
        if request.num_output_tokens == 1 and request.prompt_logprobs:
            event = replace(event, prompt_logprobs=tuple(request.prompt_logprobs))
        if reason is None:
            self._post(live, event)
        else:
            request.timeline.book(Share.SCHEDULING, now_s)
            self._end(live, replace(event, text=text + live.text.flush()), reason)

    def _abort(self, live: Live, reason: FinishReason) -> None:
        """Tell a request's end outside a step, to its client alone."""
        now_s = self.clock()
        book_end(live.request, self._in_flight[0].plan if self._in_flight else None, now_s)
        self._end(live, TokenEvent(live.request.request_id, None, "", now_s), reason)

    def _end(self, live: Live, event: TokenEvent, reason: FinishReason) -> None:
        """Post a request's last event, with its bill."""
        request = live.request
        timeline = request.timeline
        timeline.finished_s = timeline.accounted_s
        usage = Usage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens, timeline)
        del self._live[request.request_id]
        self._post(live, replace(event, time_s=timeline.finished_s, finish_reason=reason, usage=usage))

    def _post(self, live: Live, event: TokenEvent) -> None:
        if live.on_event is None:
            self._events.append(event)
        else:
            self._outbox.append((live.on_event, event))


def _max_step_tokens(config: SchedulerConfig, geometry: Geometry) -> int:
    """`stock` computes the longest prompt there can be in one step."""
    is_stock = config.composition == "stock"
    return max(config.max_num_batched_tokens, geometry.max_position_embeddings if is_stock else 0)


def _pool(geometry: Geometry, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    try:
        return KVPool.allocate(geometry, num_pages, page_size, dtype, device)
    except (MemoryError, torch.OutOfMemoryError):
        gib = num_pages * page_bytes(geometry, page_size, dtype) / 2**30
        raise BadParameterError(f"a pool of {num_pages} pages takes {gib:.1f} GiB, more than '{device}' has") from None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise BadParameterError(f"device '{name}' cannot be used: {str(error).splitlines()[0]}") from None
    return device
