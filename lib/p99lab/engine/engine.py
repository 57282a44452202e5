"""The engine: one model, one page pool, one scheduler, and the step that ties them together."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Self

import torch

from p99lab.caches.pages import PagePool
from p99lab.caches.prefix_tree import PrefixTree
from p99lab.engine.backends import make_runner
from p99lab.engine.config import AttentionConfig, EngineConfig, GraphsConfig, GroupingConfig, SchedulerConfig
from p99lab.engine.costs import StepCost, device_costs
from p99lab.engine.device_memory import allocate_pool, open_device, pool_pages, require_reserved
from p99lab.engine.events import Completion, TokenEvent
from p99lab.engine.interrupts import uninterrupted
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.lifetime import Lifetime
from p99lab.engine.model_store import load
from p99lab.engine.output_text import NoText, OutputText
from p99lab.engine.outputs import LiveRequests, OnEvent, Outbox
from p99lab.engine.pace import Pace
from p99lab.engine.pipeline import Pipeline
from p99lab.engine.prompts import Prompt as Prompt
from p99lab.engine.prompts import check_limits, encode
from p99lab.engine.reconfiguring import changed
from p99lab.engine.request import FinishReason, IntArray, Request, SamplingParams
from p99lab.engine.runner import Runner
from p99lab.engine.scheduler import Scheduler
from p99lab.engine.stats import EngineStats
from p99lab.engine.stepping import StepLoop
from p99lab.engine.turns import Turns
from p99lab.engine.weights import Weights
from p99lab.errors import BadParameterError, EngineClosedError, EngineFailedError


class Engine:
    """`with Engine(EngineConfig(model="smollm2-135m")) as engine: engine.generate(["…"])`.

    Any number of engines may live in one process. Calls from several threads take turns, a step each; `stats` never
    waits. Ctrl-C takes effect between steps.

    After `close`, every call but `stats` raises EngineClosedError. A step that raises leaves accounts that nobody can
    vouch for: it ends every request with FinishReason.ERROR, and every later call raises EngineFailedError.

    Args:
        config: what to load and how to schedule.
        clock: seconds; every time the engine reports is on it.
        new_runner: makes what executes the plans instead of `make_runner`, to measure the engine around it.

    Raises:
        ModelError: the model cannot be found or read.
        BadParameterError: the device cannot be used, or has no room for the page pool.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        new_runner: Callable[[EngineConfig, Weights, KVPool, StepCost | None], Runner] = make_runner,
    ) -> None:
        dtype, device = getattr(torch, config.model.dtype), open_device(config.model.device)
        weights, self.tokenizer = load(config.model)
        self.geometry = weights.geometry
        page_size = config.cache.page_size
        self._reserved = config.scheduler  # what memory is reserved for
        num_pages = pool_pages(config, self.geometry, device)
        pool = allocate_pool(self.geometry, num_pages, config.cache, dtype, device)
        self.config = config
        self.clock = clock
        self._tree = PrefixTree(PagePool(num_pages, page_size), enabled=config.cache.prefix_cache)
        costs = device_costs("cpu" if device.type == "cpu" else torch.cuda.get_device_name(device))
        self._costs = None if costs is None else StepCost(costs, self.geometry, page_size, dtype.itemsize)
        self._outbox = Outbox()
        self._requests = LiveRequests(self._outbox, clock)
        self._pipeline = self._new_pipeline(config)
        self._runner: Runner | None = new_runner(config, weights, pool, self._costs)
        self._num_added = 0
        self._lifetime = Lifetime()
        self._lock = threading.RLock()  # held through every step
        self._turns = Turns(self._lock)
        self._loop = StepLoop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up model and pool, after the step in hand. Live requests end with an error. Closing twice is fine.

        Raises:
            AccountingError: pages or requests do not add up.
        """
        if self._lifetime.is_forked:
            return  # locks and thread are those of the process that this one was forked from
        self._lifetime.close()
        self._loop.stop()
        with self._lock:
            with uninterrupted():
                self._end_all()
            self._deliver()
            if not self._lifetime.has_failed:
                self._pipeline.scheduler.check()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to return."""
        return self.has_requests or self._outbox.has_unclaimed

    @property
    def has_requests(self) -> bool:
        """Whether `advance` has something to compute or to take in."""
        return bool(self._requests) or self._pipeline.has_steps

    @property
    def failure(self) -> EngineFailedError | EngineClosedError | None:
        """What every call but `stats` raises; None while the engine can be used. Never waits for a step.

        EngineFailedError: a step has failed; the error's note is the step's traceback. EngineClosedError: the engine is
        closed, or belongs to the process that this one was forked from.
        """
        return self._lifetime.end

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
            arrival_s = self.clock() if arrival_s is None else arrival_s
            page_size = self.config.cache.page_size
            request = Request.create(
                self._num_added, token_ids, sampling, arrival_s, page_size, request_id, priority, deadline_s
            )
            self._pipeline.scheduler.add(request)
            self._num_added += 1
            text = OutputText(self.tokenizer.detokenizer(), sampling.stop) if detokenize else NoText()
            self._requests.add(request, text, on_event)
            return request.request_id

    def step(self) -> list[TokenEvent]:
        """Run one step for all requests that fit into it; nothing is run when there is no work.

        With overlap the step goes on running, and the one launched by the call before is taken in.

        Returns:
            The events since the last call of requests without `on_event`.
        """
        with self._lock:
            self.advance()
            return self._outbox.take_unclaimed()

    def advance(self) -> None:
        """`step`, but events without `on_event` are left for whoever calls `step` next."""
        with self._lock:
            try:
                with uninterrupted():
                    runner = self._usable_runner()
                    with self._fail_on_error():
                        self._pipeline.advance(runner.launch)
            finally:
                self._deliver()

    @property
    def spare_s(self) -> float:
        """For how many seconds the next step need not be planned: a request that is added meanwhile will be in it."""
        return self._pipeline.spare_s

    @property
    def is_awaited(self) -> bool:
        """Whether another thread wants a turn, so that whoever steps should let it have one."""
        return self._turns.is_awaited

    def fail(self, error: BaseException) -> None:
        """End every request for a reason outside a step; later calls give it, unless they raise for another already."""
        with self._lock:
            if self.failure is None:
                with uninterrupted():
                    self._fail(error)
            self._deliver()

    def cancel(self, request_id: str) -> bool:
        """End a request at any moment; its pages are free before the next step, or once a step that runs has ended.

        False: no such request.
        """
        with self._turns.turn():
            with uninterrupted():
                request = self._requests.get(request_id)
                if request is not None:
                    self._requests.abort(request, FinishReason.CANCELLED, self._pipeline.running)
                    self._pipeline.scheduler.finish(request, FinishReason.CANCELLED)
            self._deliver()
            return request is not None

    def quiesce(self) -> None:
        """Cancel whatever is left, also what clients have asked for but the step loop has not taken in yet.

        Raises:
            AccountingError: pages or requests do not add up then.
        """
        self._usable_runner()
        self._loop.wait_for_inbox()
        with self._lock:
            for request in self._requests:
                self.cancel(request.request_id)
            self._settle()
            self._outbox.take_unclaimed()
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
                if not self._requests:
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

        async with aclosing(self._loop.stream(add)) as events:
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
        self._loop.submit(command)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Have `listener` called after every step, cancellation, reconfiguration and end, behind its events.

        It is called in the thread that has done it, must not raise, and must not wait for another that uses the engine.
        """
        with self._lock:
            self._outbox.listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._outbox.listeners.remove(listener)

    def stats(self) -> EngineStats:
        """Counters since the start, pages by state, and step times."""
        pipeline = self._pipeline  # once: another thread may reconfigure
        return EngineStats.of(pipeline.scheduler, self._tree.pool, pipeline.step_times)

    def check(self) -> None:
        """Prove that pages and requests add up. Its cost grows with the cache, so it is not part of a step.

        Raises:
            AccountingError: they do not.
        """
        with self._lock:
            self._usable_runner()
            self._pipeline.scheduler.check()

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
                bound on steps whose times nobody has measured, or on a GPU steps of more tokens or requests than memory
                was reserved for at the start; nothing has changed.
        """
        with self._lock, uninterrupted():
            runner = self._usable_runner()
            self._settle()  # callbacks may bring new requests
            if self._requests:
                raise RuntimeError("an engine can only be reconfigured when it has no requests")
            config = changed(self.config, scheduler, grouping, prefix_cache, attention, graphs)
            require_reserved(config, self.geometry, self._reserved)
            pipeline = self._new_pipeline(config)
            if attention is not None or graphs is not None:
                runner.reconfigure(attention, graphs)
            self.config = config
            self._tree.enabled = config.cache.prefix_cache
            self._pipeline = pipeline
            self._deliver()

    def _new_pipeline(self, config: EngineConfig) -> Pipeline:
        scheduler = Scheduler(config.scheduler, config.grouping, self._tree, self.tokenizer.eos_ids, self._costs)
        return Pipeline(scheduler, self._requests, config.scheduler.overlap, Pace(self._costs), self.clock)

    def _usable_runner(self) -> Runner:
        """The runner of an engine that can still be used.

        Raises:
            EngineFailedError, EngineClosedError: it cannot, see `failure`.
        """
        runner = self._runner  # read first: by the time it is gone there is a failure
        if (failure := self.failure) is not None:
            raise failure
        assert runner is not None
        return runner

    def _settle(self) -> None:
        """Take in what is in flight, so that requests that have ended hold no pages."""
        while self._pipeline.has_steps:
            try:
                with uninterrupted(), self._fail_on_error():
                    self._pipeline.take_in()
            finally:
                self._deliver()

    @contextmanager
    def _fail_on_error(self) -> Iterator[None]:
        """Whatever raises in here leaves accounts that nobody can vouch for."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._lifetime.fail(error)
        self._end_all()

    def _end_all(self) -> None:
        """The end of the engine: all its requests end with an error, and its memory is given up."""
        running = self._pipeline.running
        self._pipeline.abandon()
        for request in self._requests:
            self._requests.abort(request, FinishReason.ERROR, running)
        self._runner = None

    def _deliver(self) -> None:
        self._outbox.deliver(self.cancel)
