"""The driver: sends a load's queries to a target and records what each client sees.

When a request counts as sent (`send_s`), and what is the client's lateness:

- Open load, over connections: when the transport has taken the request's first byte. Each request has a connection of
  its own, begun `CONNECT_AHEAD_S` before the intended arrival, so that it is there by then, as in a client's pool.
  Where it is not, `send_s` is when the client had come to the arrival and could only wait for it. Lateness, `send_s -
  intended_s`, is thus all that passes in the client; the time that network and server take to connect is left out of it
  and is in every latency, also in those from send (it is `first_byte_s - send_s`). A connection that the client began
  less than `CONNECT_LATEST_S` ahead excuses nothing: then `send_s` is the first byte's time, whatever was waited for.
- Closed load: when the client begins, before it connects. A server that is slow to connect or to accept has that in its
  latency, and the client's own work up to the first byte besides.
- In process: when the request is submitted.

From its first byte to its last (`last_byte_s`) a request is under way. That takes as long as its body is large, as the
server is slow to read, and as bodies that came before it still have to be written: no lateness, but in every latency.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from p99lab.probe.ahead import Ahead, Answer
from p99lab.probe.records import Outcome, Phase, RequestRecord
from p99lab.probe.targets import Chunk, Outgoing, RequestError, Served, Target
from p99lab.probe.workload import ClosedLoad, Load, Query, with_end

Clock = Callable[[], float]

CONNECT_AHEAD_S = 0.05
CONNECT_LATEST_S = 0.01  # ten times what connecting takes on one machine


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, given after each request. `latest` is the record just made."""

    elapsed_s: float
    num_measured: int
    num_failed: int
    num_in_flight: int
    latest: RequestRecord


@dataclass(frozen=True, slots=True)
class Run:
    """All records of a run in the order of their queries, and the target's counters before and after.

    `began_unix_s`: when the clock of the records stood at 0.
    """

    records: tuple[RequestRecord, ...]
    counters_before: dict[str, int]
    counters_after: dict[str, int]
    began_unix_s: float = 0.0

    @property
    def num_cancelled(self) -> int:
        """Requests still under way when the last measured one had ended; they are among the records."""
        return sum(record.outcome is Outcome.CANCELLED for record in self.records)


async def drive(
    target: Target,
    load: Load,
    queries: Iterator[Query],
    *,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Clock = time.perf_counter,
    spin_s: float = 0.002,
    hold_s: float = 0.0003,
) -> Run:
    """Run the load to its end.

    Queries are made beforehand as far as memory allows, and the next few requests, so that no send waits for one
    (`Ahead`). Warm-up requests are followed by measured ones without a pause, and the load is kept up
    (`Phase.COOLDOWN`) until the last measured request has ended: otherwise the last ones would be answered by an idle
    target. What is then still in flight is cancelled, and recorded as such. Cancelling this call closes every stream
    before it returns.

    Args:
        clock: seconds, must advance as the event loop's sleeps do.
        spin_s: an open load stops sleeping this long before an arrival and polls, because timers of an event loop are
            a millisecond coarse.
        hold_s: this long before an arrival, `spin_s` at most, nothing else is begun: tokens of all streams come at
            once, 10 to 20 us each, and the send would wait for the last. They are timed that much later, if they come.
    """
    load = with_end(load)
    ahead = Ahead(queries, load, target.send)
    await ahead.make_first()
    before = await target.counters()
    connects_ahead = target.transport == "http" and not isinstance(load, ClosedLoad)
    lead_s = CONNECT_AHEAD_S if connects_ahead else 0.0
    sending = _Sending(load, ahead, on_progress, clock, lead_s, spin_s, min(hold_s, spin_s))
    try:
        await sending.run()
    except BaseExceptionGroup as group:
        raise _first(group) from None  # the fault itself; what it cancelled adds nothing
    records = tuple(sorted(sending.records, key=lambda record: record.index))
    return Run(records, before, await target.counters(), sending.began_unix_s)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(slots=True)
class _Exchange:
    """One query: when it was begun and sent, what arrived of its answer, and when."""

    query: Query
    answer: Answer
    phase: Phase
    client: int | None
    intended_s: float | None = None
    begun_s: float = math.inf
    send_s: float | None = None
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    times_s: list[float] = field(default_factory=list)
    served: Served = field(default_factory=Served)

    def add(self, chunk: Chunk, now_s: float) -> None:
        self.times_s.extend([now_s] * chunk.num_tokens)
        self.served = chunk.served or self.served


@dataclass(frozen=True, slots=True)
class _End:
    outcome: Outcome
    error: str | None = None
    detail: str | None = None


@dataclass(slots=True)
class _Sending:
    """One run in progress."""

    load: Load
    ahead: Ahead
    on_progress: Callable[[Progress], None] | None
    clock: Clock
    lead_s: float  # before the clock of the records stands at 0, the time of a first arrival
    spin_s: float
    hold_s: float
    records: list[RequestRecord] = field(default_factory=list)
    origin_s: float = 0.0
    began_unix_s: float = 0.0
    next_s: float = math.inf  # the arrival of an open load that is waited for
    held: list[tuple[float, int, _Exchange, Outgoing]] = field(default_factory=list)  # a heap, the next to go first
    num_taken: int = 0
    num_in_flight: int = 0
    measured_in_flight: int = 0
    num_measured: int = 0
    num_failed: int = 0
    window_closed: bool = False  # no further query will be measured
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        self.began_unix_s, self.origin_s = time.time() + self.lead_s, self.clock() + self.lead_s
        async with asyncio.TaskGroup() as group:
            if isinstance(self.load, ClosedLoad):
                clients = range(self.load.concurrency)
                tasks = [group.create_task(self.client(self.load, number)) for number in clients]
            else:
                tasks = [group.create_task(self.arrivals())]
            if self.load.duration_s is not None:
                tasks.append(group.create_task(self.close_at(self.load.duration_s)))
            tasks.append(group.create_task(self.ahead.keep_filled(lambda: self.due_s - self.now_s())))
            await self.finished.wait()
            for task in tasks:
                task.cancel()

    def now_s(self) -> float:
        return self.clock() - self.origin_s

    async def client(self, load: ClosedLoad, number: int) -> None:
        while (taken := self.take()) is not None:
            exchange = _Exchange(*taken, self.begin(taken[0], self.now_s()), number)
            if isinstance(exchange.answer, Outgoing):
                exchange.answer.prepare(self.now_s, hold=False)
            self.sent(exchange)
            await self.follow(exchange)
            await asyncio.sleep(load.think_time_s)  # even 0 lets the others run, should a target never wait

    async def arrivals(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.arrival(group))

    async def arrival(self, group: asyncio.TaskGroup) -> None:
        """One query, sent by the task that waited for its time: another task would be late by what runs before it."""
        if (taken := self.take()) is None:
            return
        query, answer = taken
        intended_s = query.intended_s if query.intended_s is not None else self.now_s()
        phase = self.begin(query, intended_s)  # before its time: the run must not end while it is owed
        exchange = _Exchange(query, answer, phase, None, intended_s)
        self.next_s = intended_s
        if isinstance(answer, Outgoing):
            await asyncio.sleep(max(0.0, intended_s - CONNECT_AHEAD_S - self.now_s()))
            answer.prepare(self.now_s, hold=True)
            heapq.heappush(self.held, (intended_s, self.num_taken, exchange, answer))
            group.create_task(self.follow(exchange))
            group.create_task(self.arrival(group))
            await self.sleep_until(intended_s)
        else:
            await self.sleep_until(intended_s)
            group.create_task(self.arrival(group))  # begins after this one is sent
            self.sent(exchange)
            await self.follow(exchange)

    @property
    def due_s(self) -> float:
        """The next arrival of an open load that is known of."""
        return self.held[0][0] if self.held else self.next_s

    def let_go(self) -> None:
        """Send all that is due, in order. Any task does it for any other, whose turn may come later."""
        while self.held and self.held[0][0] <= self.now_s():
            *_, exchange, outgoing = heapq.heappop(self.held)
            outgoing.release()
            self.sent(exchange)

    def sent(self, exchange: _Exchange) -> None:
        exchange.send_s = self.now_s()
        exchange.sent.set()
        self.num_in_flight += 1

    async def close_at(self, duration_s: float) -> None:
        await self.sleep_until(duration_s)
        self.close_window()

    async def sleep_until(self, at_s: float) -> None:
        while (left_s := at_s - self.now_s()) > 0:
            self.let_go()
            if left_s > self.hold_s:
                await asyncio.sleep(max(0.0, left_s - self.spin_s))
        self.let_go()

    def take(self) -> tuple[Query, Answer] | None:
        """The next query and its request; None when there is nothing left to send for."""
        taken = None if self.finished.is_set() else self.ahead.take()
        if taken is None:
            self.close_window()
        else:
            self.num_taken += 1
        return taken

    def begin(self, query: Query, at_s: float) -> Phase:
        """The phase of the query just taken, to be sent at `at_s`; a measured one is owed from here on."""
        phase = Phase.COOLDOWN if self.window_closed else self.phase_at(self.num_taken - 1, at_s)
        if phase is Phase.MEASURED:
            self.measured_in_flight += 1
        load = self.load
        if phase is Phase.COOLDOWN or (load.num_requests is not None and self.num_taken >= self.num_counted):
            self.close_window()
        return phase

    def phase_at(self, order: int, at_s: float) -> Phase:
        load = self.load
        if load.duration_s is not None and at_s >= load.duration_s:
            return Phase.COOLDOWN
        if load.num_requests is not None:
            return Phase.WARMUP if order < self.num_counted - load.num_requests else Phase.MEASURED
        assert load.duration_s is not None  # a load has one of the two
        return Phase.WARMUP if at_s < load.warmup_share * load.duration_s else Phase.MEASURED

    @property
    def num_counted(self) -> int:
        """Requests of warm-up and measurement together, where they are counted."""
        concurrency = self.load.concurrency if isinstance(self.load, ClosedLoad) else 1
        return self.load.num_warmup_requests(concurrency) + (self.load.num_requests or 0)

    def close_window(self) -> None:
        self.window_closed = True
        self.finish_if_done()

    def finish_if_done(self) -> None:
        if self.window_closed and self.measured_in_flight == 0:
            self.finished.set()

    async def follow(self, exchange: _Exchange) -> None:
        """One query to its end, and its record, also when this is cancelled; none where it was not sent."""
        end = _End(Outcome.CANCELLED)
        exchange.begun_s = self.now_s()
        try:
            end = await self.answered(exchange)
            await exchange.sent.wait()  # what fails before its time counts from then
        finally:
            if exchange.send_s is not None:
                self.num_in_flight -= 1
                self.keep(_record(exchange, exchange.send_s, self.now_s(), end))

    async def answered(self, exchange: _Exchange) -> _End:
        """How an answer ended."""
        load, now = self.load, asyncio.get_running_loop().time
        early_s = 0.0 if exchange.intended_s is None else max(0.0, exchange.intended_s - self.now_s())
        begins_at = now() + early_s
        ends_at, idle_s = begins_at + load.timeout_s, load.idle_timeout_s
        try:
            async with (
                asyncio.timeout_at(ends_at if idle_s is None else min(ends_at, begins_at + idle_s)) as limit,
                aclosing(exchange.answer) as chunks,
            ):
                async for chunk in chunks:
                    exchange.add(chunk, self.now_s())
                    self.let_go()
                    if idle_s is not None:
                        limit.reschedule(min(ends_at, now() + idle_s))
        except TimeoutError:
            whole = idle_s is None or limit.when() == ends_at
            return _End(Outcome.TIMEOUT, f"no end after {load.timeout_s:g} s" if whole else f"nothing for {idle_s:g} s")
        except RequestError as failure:
            return _End(failure.outcome, failure.kind, failure.detail)
        return _End(Outcome.OK) if exchange.times_s else _End(Outcome.ERROR, "empty answer")

    def keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        if record.phase is Phase.MEASURED:
            self.measured_in_flight -= 1
            self.num_measured += 1
            self.num_failed += record.outcome is not Outcome.OK
        if self.on_progress is not None:
            self.on_progress(Progress(record.end_s, self.num_measured, self.num_failed, self.num_in_flight, record))
        self.finish_if_done()


def _record(exchange: _Exchange, send_s: float, end_s: float, end: _End) -> RequestRecord:
    query, served, timeline = exchange.query, exchange.served, exchange.served.timeline
    outgoing = exchange.answer if isinstance(exchange.answer, Outgoing) else None
    first_byte_s = outgoing.first_byte_s if outgoing else None
    intended_s = exchange.intended_s
    if intended_s is not None and first_byte_s is not None and exchange.begun_s > intended_s - CONNECT_LATEST_S:
        send_s = max(send_s, first_byte_s)
    num_prompt_tokens = served.num_prompt_tokens if served.num_prompt_tokens is not None else query.prompt.num_tokens
    document_share = query.num_document_tokens / max(1, query.prompt.num_tokens)  # lengths may be estimates
    return RequestRecord(
        index=query.index,
        phase=exchange.phase,
        document=query.document,
        client=exchange.client,
        intended_s=query.intended_s,
        send_s=send_s,
        first_token_s=exchange.times_s[0] if exchange.times_s else None,
        end_s=end_s,
        token_times_s=tuple(exchange.times_s),
        outcome=end.outcome,
        error=end.error,
        error_detail=end.detail,
        max_tokens=query.max_tokens,
        num_prompt_tokens=num_prompt_tokens,
        num_prompt_tokens_sent=None if query.prompt.token_ids is None else query.prompt.num_tokens,
        num_document_tokens=round(document_share * num_prompt_tokens),
        num_cached_tokens=served.num_cached_tokens,
        num_output_tokens=served.num_output_tokens if served.num_output_tokens is not None else len(exchange.times_s),
        prompt_digest=query.prompt.digest,
        queue_s=timeline.queue_s if timeline else None,
        prefill_s=timeline.prefill_s if timeline else None,
        decode_s=timeline.decode_s if timeline else None,
        stalled_s=timeline.stalled_s if timeline else None,
        scheduling_s=timeline.scheduling_s if timeline else None,
        num_preemptions=timeline.num_preemptions if timeline else None,
        first_byte_s=first_byte_s,
        last_byte_s=outgoing.last_byte_s if outgoing else None,
    )
