"""Queries and requests made before they are due: making one takes up to milliseconds, which no send may wait for."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator

from p99lab.probe.answers import Chunk
from p99lab.probe.workload import ClosedLoad, Load, OpenLoad, Query

LOW_WATER = 32  # queries; below, more are made while nothing is due
MAX_QUERIES = 10_000
MAX_BYTES = 256 << 20  # of prompts
NUM_READY = 8  # requests; each holds its body

Answer = AsyncGenerator[Chunk, None]


class Ahead:
    """The queries of a run in their order, each with its request. All that a finite load can need are made at first,
    within bounds, and the first requests; more are made in moments without a send, and at the last moment only where
    there are none.

    Args:
        send: makes a request, which goes out when its first chunk is asked for.
    """

    def __init__(self, queries: Iterator[Query], load: Load, send: Callable[[Query], Answer]) -> None:
        concurrency = load.concurrency if isinstance(load, ClosedLoad) else 1
        self._queries = queries
        self._send = send
        self._low = max(LOW_WATER, 2 * concurrency)
        self._expected = min(MAX_QUERIES, _num_expected(load) + self._low)
        self._made: deque[Query] = deque()
        self._num_bytes = 0
        self._ready: deque[tuple[Query, Answer]] = deque()  # they come before those that are only made
        self._cost_s = 0.0  # of making a query or a request, of late
        self._exhausted = False
        self._wanted = asyncio.Event()

    async def make_first(self) -> None:
        """All that can be needed, within bounds; other tasks get their turns."""
        while not self._exhausted and len(self._made) < self._expected and self._num_bytes < MAX_BYTES:
            self._make_query()
            await asyncio.sleep(0)
        while self._lacks_requests():
            self._make_request()
            await asyncio.sleep(0)
        self._note_level()

    def take(self) -> tuple[Query, Answer] | None:
        """The next one, None after the last."""
        if not self._ready:
            if not self._made:
                self._make_query()
            if self._made:
                self._make_request()
        taken = self._ready.popleft() if self._ready else None
        self._note_level()
        return taken

    async def keep_filled(self, time_left: Callable[[], float]) -> None:
        """Make more whenever few are left and nothing is due; ends when there are no more to make.

        Args:
            time_left: seconds until the next send that is known of, infinite where none is.
        """
        while self._made or not self._exhausted:
            await self._wanted.wait()
            left_s = time_left()
            if left_s > 2 * self._cost_s:
                make_one = self._make_request if self._lacks_requests() else self._make_query
                make_one()
                self._note_level()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(max(left_s, 0.0005))

    def _lacks_requests(self) -> bool:
        return bool(self._made) and len(self._ready) < NUM_READY

    def _lacks_queries(self) -> bool:
        return not self._exhausted and len(self._made) < self._low and self._num_bytes < MAX_BYTES

    def _note_level(self) -> None:
        if self._lacks_requests() or self._lacks_queries():
            self._wanted.set()
        else:
            self._wanted.clear()

    def _make_query(self) -> None:
        began_s = time.perf_counter()
        query = next(self._queries, None)
        if query is None:
            self._exhausted = True
            return
        self._note_cost(began_s)
        self._made.append(query)
        self._num_bytes += _size(query)

    def _make_request(self) -> None:
        began_s = time.perf_counter()
        query = self._made.popleft()
        self._num_bytes -= _size(query)
        self._ready.append((query, self._send(query)))
        self._note_cost(began_s)

    def _note_cost(self, began_s: float) -> None:
        self._cost_s = max(0.8 * self._cost_s, time.perf_counter() - began_s)


def _num_expected(load: Load) -> int:
    """How many queries a load sends, all phases but the cooldown; a guess where the target decides it."""
    if load.num_requests is not None:
        concurrency = load.concurrency if isinstance(load, ClosedLoad) else 1
        return load.num_warmup_requests(concurrency) + load.num_requests
    if isinstance(load, OpenLoad) and load.duration_s is not None:
        return math.ceil(max(load.rate, load.rate_end or 0.0) * load.duration_s)
    return 8 * load.concurrency if isinstance(load, ClosedLoad) else MAX_QUERIES


def _size(query: Query) -> int:
    ids = query.prompt.token_ids
    return len(query.prompt.text) + (0 if ids is None else ids.nbytes)
