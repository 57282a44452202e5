from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p99lab.errors import BadParameterError
from p99lab.probe.ahead import NUM_READY
from p99lab.probe.documents import Passage
from p99lab.probe.load import CONNECT_AHEAD_S, drive
from p99lab.probe.records import Outcome, Phase, from_table, read_parquet, to_table, write_parquet
from p99lab.probe.stats import attribution, e2e, measured, queue_time, tpot, ttft
from p99lab.probe.targets import Chunk, RequestError
from p99lab.probe.workload import ClosedLoad, OpenLoad, Query

pytestmark = pytest.mark.light


def query(index: int, max_tokens: int = 1, intended_s: float | None = None) -> Query:
    return Query(index, 0, Passage.of("", [1, 2]), 1, max_tokens, True, intended_s)


def test_a_closed_load_is_kept_up_to_the_last_measured_request(fake_target: Any, drive_virtually: Any) -> None:
    load = ClosedLoad(concurrency=4, num_requests=20, warmup_share=0.2)
    _, run = drive_virtually(lambda: fake_target(slots=4), load)
    phases = [record.phase for record in run.records]
    assert phases.count(Phase.WARMUP) == 4
    assert phases.count(Phase.MEASURED) == 20
    assert phases == sorted(phases, key=[Phase.WARMUP, Phase.MEASURED, Phase.COOLDOWN].index)
    assert all(record.outcome is Outcome.CANCELLED for record in run.records if record.phase is Phase.COOLDOWN)
    assert all(record.intended_s is None and record.start_s == record.send_s for record in run.records)
    ends = sorted(record.end_s for record in run.records if record.client == 0)
    sends = sorted(record.send_s for record in run.records if record.client == 0)
    assert ends[:-1] == pytest.approx(sends[1:])  # a client sends when it has its answer, warm-up or not


def test_one_client_and_one_request_send_exactly_one(fake_target: Any, drive_virtually: Any) -> None:
    target, run = drive_virtually(fake_target, ClosedLoad(concurrency=1, num_requests=1, warmup_share=0))
    assert target.num_sent == len(run.records) == 1
    (record,) = run.records
    assert (ttft(record), e2e(record)) == (pytest.approx(0.1), pytest.approx(0.13))
    assert tpot(record) == pytest.approx(0.01)
    assert np.diff(record.token_times_s) == pytest.approx([0.01] * 3)
    assert record.num_output_tokens == 4


def test_a_duration_limits_sending_and_its_first_share_is_warmup(fake_target: Any, drive_virtually: Any) -> None:
    load = ClosedLoad(concurrency=2, duration_s=10.0, warmup_share=0.25)
    _, run = drive_virtually(fake_target, load)
    by_phase = {phase: [r.send_s for r in run.records if r.phase is phase] for phase in Phase}
    assert max(by_phase[Phase.WARMUP]) < 2.5 <= min(by_phase[Phase.MEASURED])
    assert max(by_phase[Phase.MEASURED]) < 10.0
    assert max(r.end_s for r in measured(run.records)) == pytest.approx(10.0, abs=0.14)


def test_think_time_is_waited_for(fake_target: Any, drive_virtually: Any) -> None:
    load = ClosedLoad(concurrency=1, num_requests=3, warmup_share=0, think_time_s=1.0)
    _, run = drive_virtually(fake_target, load)
    assert [r.send_s for r in run.records] == pytest.approx([0.0, 1.13, 2.26])


def test_an_open_load_sends_at_its_times_whatever_the_target_does(fake_target: Any, drive_virtually: Any) -> None:
    load = OpenLoad(rate=10, arrivals="constant", num_requests=20, warmup_share=0, cache="mixed")
    _, run = drive_virtually(lambda: fake_target(slots=1, plan=lambda query: (1.0, 0.0)), load)
    first = measured(run.records)
    assert [r.intended_s for r in first] == pytest.approx(np.arange(1, 21) / 10)
    assert [r.send_s for r in first] == pytest.approx(np.arange(1, 21) / 10)
    assert [ttft(r) for r in first] == pytest.approx(1.0 + 0.9 * np.arange(20))
    assert [queue_time(r) for r in first] == pytest.approx(0.9 * np.arange(20))
    assert any(r.phase is Phase.COOLDOWN for r in run.records)  # arrivals go on until the last measured one has ended


def test_requests_are_ready_before_their_time(fake_target: Any, virtual: Any) -> None:
    ready_s: list[float] = []

    class Noting(fake_target):  # type: ignore[misc]
        def send(self, query: Query) -> AsyncGenerator[Chunk, None]:
            ready_s.append(asyncio.get_running_loop().time())
            return super().send(query)  # type: ignore[no-any-return]

    async def main() -> Any:
        load, clock = OpenLoad(rate=1, num_requests=20, warmup_share=0), asyncio.get_running_loop().time
        due = (query(i, intended_s=float(i + 1)) for i in range(60))
        return await drive(Noting(), load, due, clock=clock, spin_s=0.0)

    sent_s = [record.send_s for record in virtual(main).records]
    assert sent_s[:20] == pytest.approx(range(1, 21))
    assert ready_s[: NUM_READY + 1] == [0.0] * (NUM_READY + 1)  # the first is taken, to be sent at its time
    later = ready_s[NUM_READY + 1 :]
    assert later == pytest.approx(sent_s[: len(later)])  # one is made when another is sent


def test_all_queries_of_a_finite_load_are_made_before_the_first_is_sent(fake_target: Any, virtual: Any) -> None:
    async def main() -> Any:
        target, already_sent = fake_target(), []

        def counted() -> Any:
            for i in range(1000):
                already_sent.append(target.num_sent)
                yield query(i, intended_s=float(i))

        load, clock = OpenLoad(rate=1, num_requests=6, warmup_share=0.5), asyncio.get_running_loop().time
        await drive(target, load, counted(), clock=clock, spin_s=0.0)
        return already_sent

    assert virtual(main)[: 6 + 3] == [0] * 9


@pytest.mark.parametrize("rate", [10.0, 200.0])
def test_an_endless_load_makes_its_queries_ahead(fake_target: Any, virtual: Any, rate: float) -> None:
    """Made at first are as many as the load can need; a closed loop's number is unknown, so it is kept ahead of."""

    async def main() -> Any:
        target, lead = fake_target(plan=lambda query: (1 / rate, 0.0)), []

        def counted() -> Any:
            for i in range(100_000):
                lead.append(i - target.num_sent)
                yield query(i)

        clock = asyncio.get_running_loop().time
        await drive(target, ClosedLoad(concurrency=4, duration_s=5.0), counted(), clock=clock, spin_s=0.0)
        return target.num_sent, lead

    num_sent, lead = virtual(main)
    assert num_sent > 4 * 5 * rate * 0.5
    assert min(lead[32:]) >= 16


def test_without_a_moment_to_spare_queries_are_made_when_they_are_due(fake_target: Any, virtual: Any) -> None:
    async def main() -> Any:
        clock = asyncio.get_running_loop().time
        late = (query(i, intended_s=0.0) for i in range(200))
        load = OpenLoad(rate=1, num_requests=5, warmup_share=0)
        return await drive(fake_target(), load, late, clock=clock, spin_s=0.0)

    assert len(measured(virtual(main).records)) == 5


def test_what_fails_while_queries_are_made_ends_the_run(fake_target: Any, virtual: Any) -> None:
    def broken() -> Any:
        yield query(0)
        raise BadParameterError("the sources are used up")

    async def main() -> Any:
        await drive(fake_target(), ClosedLoad(num_requests=5), broken())

    with pytest.raises(BadParameterError, match="used up"):
        virtual(main)


def test_a_late_send_counts_from_the_intended_arrival(fake_target: Any, virtual: Any) -> None:
    late = (Query(i, 0, Passage.of("", [1, 2]), 1, 2, True, intended_s=-5.0) for i in range(1))

    async def main() -> Any:
        clock = asyncio.get_running_loop().time
        return await drive(fake_target(), OpenLoad(rate=1, num_requests=1, warmup_share=0), late, clock=clock)

    (record,) = virtual(main).records
    assert record.send_s == 0.0
    assert ttft(record) == pytest.approx(5.1)
    assert queue_time(record) == pytest.approx(5.0)


def test_a_stall_shows_in_the_tail_of_an_open_load(fake_target: Any, drive_virtually: Any) -> None:
    def stall(query: Query) -> tuple[float, float]:
        return (2.0 if query.index == 50 else 0.01, 0.0)

    load = OpenLoad(rate=40, arrivals="constant", num_requests=400, warmup_share=0)
    _, run = drive_virtually(lambda: fake_target(slots=1, plan=stall), load)
    slow = [ttft(r) for r in measured(run.records) if ttft(r) > 0.5]
    assert len(slow) > 50  # a closed loop of one client would show one


@pytest.mark.parametrize(
    ("error", "outcome", "kind"),
    [
        (RequestError(Outcome.ERROR, "http 429"), Outcome.ERROR, "http 429"),
        (RequestError(Outcome.CUT, "connection lost"), Outcome.CUT, "connection lost"),
    ],
)
def test_failures_are_counted_and_the_run_goes_on(
    fake_target: Any, drive_virtually: Any, error: Exception, outcome: Outcome, kind: str
) -> None:
    def fail(query: Query) -> Exception | None:
        return error if query.index % 3 == 0 else None

    _, run = drive_virtually(lambda: fake_target(fail=fail), ClosedLoad(concurrency=2, num_requests=12, warmup_share=0))
    failed = [r for r in measured(run.records) if r.outcome is not Outcome.OK]
    assert len(failed) == 4
    assert {(r.outcome, r.error) for r in failed} == {(outcome, kind)}
    assert all(math.isinf(ttft(r)) and math.isinf(e2e(r)) for r in failed)


def test_a_stalled_request_times_out_and_is_closed(fake_target: Any, drive_virtually: Any) -> None:
    def never(query: Query) -> tuple[float, float]:
        return (1e9 if query.index == 1 else 0.1, 0.0)

    load = ClosedLoad(concurrency=1, num_requests=3, warmup_share=0, timeout_s=5.0)
    target, run = drive_virtually(lambda: fake_target(plan=never), load)
    assert [r.outcome for r in run.records] == [Outcome.OK, Outcome.TIMEOUT, Outcome.OK]
    assert run.records[1].end_s - run.records[1].send_s == pytest.approx(5.0)
    assert target.num_closed_early == 1


@pytest.mark.parametrize(
    ("plan", "outcomes"),
    [
        ((0.5, 0.5), [Outcome.OK]),  # as slow as it may be
        ((1.5, 0.1), [Outcome.TIMEOUT]),
        ((0.1, 1.5), [Outcome.TIMEOUT]),
    ],
)
def test_an_answer_that_stops_coming_is_given_up(
    fake_target: Any, drive_virtually: Any, plan: tuple[float, float], outcomes: list[Outcome]
) -> None:
    load = ClosedLoad(concurrency=1, num_requests=1, warmup_share=0, idle_timeout_s=1.0)
    target, run = drive_virtually(lambda: fake_target(plan=lambda query: plan), load)
    assert [r.outcome for r in run.records] == outcomes
    if outcomes == [Outcome.TIMEOUT]:
        (record,) = run.records
        assert record.error == "nothing for 1 s"
        assert record.end_s == pytest.approx((record.token_times_s or (0.0,))[-1] + 1.0)
        assert target.num_closed_early == 1


def test_requests_in_flight_at_the_end_are_counted_as_cancelled(fake_target: Any, drive_virtually: Any) -> None:
    load = OpenLoad(rate=20, arrivals="constant", num_requests=10, warmup_share=0)
    target, run = drive_virtually(lambda: fake_target(plan=lambda query: (1.0, 0.0)), load)
    assert run.num_cancelled == target.num_closed_early == target.num_sent - len(measured(run.records)) > 5
    cancelled = [r for r in run.records if r.outcome is Outcome.CANCELLED]
    assert {r.phase for r in cancelled} == {Phase.COOLDOWN}


def test_a_fault_of_the_target_ends_the_run(fake_target: Any, drive_virtually: Any) -> None:
    def broken(query: Query) -> Exception | None:
        return ZeroDivisionError("a bug") if query.index == 5 else None

    with pytest.raises(ZeroDivisionError, match="a bug"):
        drive_virtually(lambda: fake_target(fail=broken), ClosedLoad(concurrency=2, num_requests=12))


@pytest.mark.parametrize("load", [ClosedLoad(concurrency=3, num_requests=1000), OpenLoad(rate=50, num_requests=1000)])
def test_cancelling_a_run_closes_every_stream(fake_target: Any, virtual: Any, drive_virtually: Any, load: Any) -> None:
    async def main() -> Any:
        clock, target = asyncio.get_running_loop().time, fake_target()
        endless = (Query(i, 0, Passage.of("", [1, 2]), 1, 4, True, i / 50) for i in range(10_000))
        running = asyncio.create_task(drive(target, load, endless, clock=clock, spin_s=0.0))
        await asyncio.sleep(1.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return target, len(asyncio.all_tasks())

    target, num_tasks = virtual(main)
    assert 3 <= target.num_closed_early <= 8
    assert num_tasks == 1


def test_a_finite_sequence_ends_the_run(fake_target: Any, virtual: Any) -> None:
    async def main() -> Any:
        five = (Query(i, 0, Passage.of("", [1, 2]), 1, 4, True) for i in range(5))
        load = ClosedLoad(concurrency=2, num_requests=100, warmup_share=0)
        return await drive(fake_target(), load, five, clock=asyncio.get_running_loop().time)

    assert len(virtual(main).records) == 5


def test_progress_counts_up(fake_target: Any, drive_virtually: Any) -> None:
    seen: list[Any] = []
    load = ClosedLoad(concurrency=2, num_requests=10, warmup_share=0)
    drive_virtually(fake_target, load, on_progress=seen.append)
    assert [p.num_measured for p in seen if p.latest.phase is Phase.MEASURED] == list(range(1, 11))
    assert all(p.num_failed == 0 and p.num_in_flight <= 2 for p in seen)


def test_shares_of_a_request_sum_to_its_time(fake_target: Any, drive_virtually: Any) -> None:
    load = OpenLoad(rate=20, num_requests=50, warmup_share=0)
    _, run = drive_virtually(lambda: fake_target(slots=2), load)
    for record in measured(run.records):
        shares = attribution(record)
        assert shares is not None
        assert sum(shares.values()) == pytest.approx(e2e(record))
        assert shares["prefill"] == pytest.approx(0.1)


def test_records_survive_arrow_and_parquet(fake_target: Any, drive_virtually: Any, tmp_path: Path) -> None:
    def fail(query: Query) -> Exception | None:
        return RequestError(Outcome.CUT, "connection lost") if query.index == 2 else None

    _, run = drive_virtually(lambda: fake_target(fail=fail), OpenLoad(rate=5, num_requests=8))
    records = list(run.records)
    assert from_table(to_table(records)) == records
    assert from_table(to_table([])) == []
    write_parquet(records, tmp_path / "r.parquet", arm="stock")
    assert read_parquet(tmp_path / "r.parquet") == records
    assert to_table(records, arm="stock", run="1").column_names[:3] == ["arm", "run", "index"]


def test_prompts_of_two_runs_are_the_same(fake_target: Any, drive_virtually: Any) -> None:
    _, closed = drive_virtually(fake_target, ClosedLoad(concurrency=3, num_requests=10, warmup_share=0))
    _, opened = drive_virtually(fake_target, OpenLoad(rate=9, num_requests=10, warmup_share=0))
    assert [r.prompt_digest for r in islice(closed.records, 10)] == [
        r.prompt_digest for r in islice(opened.records, 10)
    ]


def test_the_real_clock_sends_near_the_intended_time(fake_target: Any) -> None:
    async def main() -> Any:
        few = (Query(i, 0, Passage.of("", [1, 2]), 1, 1, True, 0.02 * (i + 1)) for i in range(5))
        load = OpenLoad(rate=50, num_requests=5, warmup_share=0)
        return await drive(fake_target(plan=lambda query: (0.001, 0.0)), load, few)

    run = asyncio.run(main())
    assert [r.outcome for r in run.records] == [Outcome.OK] * 5
    assert all(r.send_s >= r.intended_s for r in run.records)


def test_nothing_else_is_begun_right_before_an_arrival(fake_target: Any) -> None:
    async def main() -> tuple[Any, list[float]]:
        turns_unix_s: list[float] = []

        async def others() -> None:
            while True:
                turns_unix_s.append(time.time())
                await asyncio.sleep(0)

        few = (Query(i, 0, Passage.of("", [1, 2]), 1, 1, True, 0.1 + i) for i in range(2))
        load, turning = OpenLoad(rate=10, num_requests=1, warmup_share=0), asyncio.create_task(others())
        run = await drive(fake_target(plan=lambda query: (0.0, 0.0)), load, few, spin_s=0.05, hold_s=0.03)
        turning.cancel()
        return run, turns_unix_s

    run, turns_unix_s = asyncio.run(main())
    before_s = [run.began_unix_s + 0.1 - at_s for at_s in turns_unix_s]
    assert sum(0.001 < left_s < 0.028 for left_s in before_s) <= 1  # which was begun before, on a busy machine
    assert any(0.031 < left_s < 0.1 for left_s in before_s)


# --- over connections -----------------------------------------------------------------------------------------------


class Connecting(AsyncGenerator[Chunk, None]):
    """A request that has its connection after `connect_s`, and its one token 0.1 s after its first byte."""

    def __init__(self, connect_s: float) -> None:
        self.connect_s = connect_s
        self.connected, self.held, self.released = False, False, asyncio.Event()
        self.first_byte_s: float | None = None
        self.last_byte_s: float | None = None
        self.chunks = self.answer()

    def prepare(self, now: Callable[[], float], *, hold: bool) -> None:
        self.now, self.held = now, hold

    def release(self) -> None:
        self.held = False
        self.released.set()
        if self.connected:
            self.write()

    def write(self) -> None:
        self.first_byte_s = self.last_byte_s = self.now()

    async def answer(self) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(self.connect_s)
        self.connected = True
        if self.held:
            await self.released.wait()
        else:
            self.write()
        await asyncio.sleep(0.1)
        yield Chunk()

    async def asend(self, value: None) -> Chunk:
        return await self.chunks.asend(value)

    async def athrow(self, kind: Any, value: Any = None, traceback: Any = None) -> Chunk:
        return await self.chunks.athrow(kind, value, traceback)

    async def aclose(self) -> None:
        await self.chunks.aclose()


@pytest.fixture
def drive_connecting(fake_target: Any, virtual: Any) -> Callable[..., tuple[Any, list[Connecting]]]:
    """Drive queries that are due at some times against a target that connects in `connect_s`, on a virtual clock."""

    def run(load: Any, due_s: list[float | None], connect_s: float) -> tuple[Any, list[Connecting]]:
        made: list[Connecting] = []

        class Wired(fake_target):  # type: ignore[misc]
            def send(self, query: Query) -> Connecting:
                made.append(Connecting(connect_s))
                return made[-1]

        async def main() -> Any:
            loop, queries = asyncio.get_running_loop(), (query(i, intended_s=at_s) for i, at_s in enumerate(due_s))
            # A timer that ends a rounding error too soon would be set again for ever.
            return await drive(
                Wired(transport="http"), load, queries, clock=lambda: loop.time() * (1 + 1e-9), spin_s=0.0
            )

        return virtual(main), made

    return run


OPEN = OpenLoad(rate=1, num_requests=100, warmup_share=0)


def test_a_closed_load_counts_from_before_it_connects(drive_connecting: Any) -> None:
    run, _ = drive_connecting(ClosedLoad(concurrency=1, num_requests=2, warmup_share=0), [None, None], 0.3)
    assert [r.send_s for r in run.records] == pytest.approx([0.0, 0.4])
    assert [r.first_byte_s for r in run.records] == pytest.approx([0.3, 0.7])
    assert [ttft(r) for r in run.records] == pytest.approx([0.4, 0.4])


def test_an_open_load_connects_ahead(drive_connecting: Any) -> None:
    run, _ = drive_connecting(OPEN, [0.0, 1.0, 1.01, 1.01], 0.9 * CONNECT_AHEAD_S)
    assert [r.send_s for r in run.records] == pytest.approx([0.0, 1.0, 1.01, 1.01], abs=1e-6)
    assert [r.first_byte_s for r in run.records] == [r.send_s for r in run.records]
    assert [ttft(r) for r in run.records] == pytest.approx([0.1] * 4)


def test_connecting_for_long_is_latency_and_no_lateness(drive_connecting: Any) -> None:
    run, _ = drive_connecting(OPEN, [1.0, 1.1], 0.3)
    assert [r.send_s for r in run.records] == pytest.approx([1.0, 1.1])
    assert [r.first_byte_s - r.send_s for r in run.records] == pytest.approx([0.3 - CONNECT_AHEAD_S] * 2)
    assert [ttft(r) for r in run.records] == pytest.approx([0.4 - CONNECT_AHEAD_S] * 2)


def test_a_connection_that_the_client_began_too_late_is_lateness(drive_connecting: Any) -> None:
    """The second's arrival is known when the first's connection is begun."""
    run, _ = drive_connecting(OPEN, [1.0, 0.955, 2.0], 0.3)
    assert [r.send_s for r in run.records] == pytest.approx([1.0, 1.25, 2.0])


def test_what_was_only_connected_for_is_not_recorded(drive_connecting: Any) -> None:
    load = OpenLoad(rate=1, num_requests=5, warmup_share=0)
    run, made = drive_connecting(load, [0.5 + 0.02 * i for i in range(100)], 0.01)
    assert len(measured(run.records)) == 5
    begun = [request for request in made if request.connected]
    assert [request.first_byte_s is not None for request in begun].count(True) == len(run.records)
    assert len(begun) > len(run.records)
    assert all(request.chunks.ag_frame is None for request in begun)  # closed


@pytest.mark.parametrize("idle_timeout_s", [None, 0.2])
def test_a_timeout_begins_when_the_request_is_due(drive_connecting: Any, idle_timeout_s: float | None) -> None:
    load = OpenLoad(rate=1, num_requests=1, warmup_share=0, timeout_s=0.2, idle_timeout_s=idle_timeout_s)
    run, _ = drive_connecting(load, [1.0], 9.0)
    (record,) = run.records
    assert (record.outcome, record.first_byte_s, record.end_s) == (Outcome.TIMEOUT, None, pytest.approx(1.2))
