"""Notebook 01's clients: in the engine's process, or in one of their own over HTTP. Same queries, same token ids."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from p99lab.lab.parameters import Headline01
from p99lab.probe.client_process import ClientJob, ClientProcess
from p99lab.probe.command import NO_KEY
from p99lab.probe.documents import Document
from p99lab.probe.load import Run, drive
from p99lab.probe.targets import InProcessTarget, TargetSpec
from p99lab.probe.workload import Load, Workload, queries

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of the endless queries about some documents that is sent; `workload` draws the questions."""

    workload: Workload
    first: int
    num_queries: int | None  # None: as many as the load takes


class Clients(Protocol):
    """They send one load after another to an engine that is primed already."""

    def drive(self, load: Load, stretch: Stretch) -> Run: ...


@dataclass(frozen=True, slots=True)
class ClientsHere:
    """No transport: what clients do is inside the figures. Queries are made before the load begins."""

    target: InProcessTarget
    documents: tuple[Document, ...]

    def drive(self, load: Load, stretch: Stretch) -> Run:
        endless = queries(stretch.workload, self.documents, load, self.target.tokenize, stretch.first)
        if stretch.num_queries is None:
            return in_a_loop_of_its_own(drive(self.target, load, endless))
        sent = list(itertools.islice(endless, stretch.num_queries))
        return in_a_loop_of_its_own(drive(self.target, load, iter(sent)))


@dataclass(frozen=True, slots=True)
class ClientsThere:
    """A process of their own, which makes the same documents and sends their token ids."""

    process: ClientProcess
    endpoint: TargetSpec
    workload: Workload
    tokenizer: str | None

    def drive(self, load: Load, stretch: Stretch) -> Run:
        job = ClientJob(
            target=self.endpoint,
            workload=self.workload,
            load=load,
            tokenizer=self.tokenizer,
            asked=stretch.workload,
            first_query=stretch.first,
            num_queries=stretch.num_queries,
        )
        return self.process.run(job)


@contextlib.contextmanager
def clients(
    parameters: Headline01, engine: Engine, workload: Workload, documents: tuple[Document, ...]
) -> Iterator[Clients]:
    """The clients that `parameters.transport` asks for; what was started for them is gone on leaving."""
    if parameters.transport == "in-process":
        yield ClientsHere(InProcessTarget(engine, parameters.model), documents)
        return
    from p99lab.serving.background import serve_in_thread

    tokenizer = parameters.model if parameters.random_tokens is None else None
    with serve_in_thread(engine, model="engine") as url, ClientProcess() as process:
        endpoint = TargetSpec(url=url, model="engine", api_key_env=NO_KEY)
        yield ClientsThere(process, endpoint, workload, tokenizer)


def in_a_loop_of_its_own(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in another thread: a notebook's own thread is inside an event loop already.

    An interrupt cancels the coroutine, waits until it has tidied up, and goes on.
    """
    begun: Future[Callable[[], Any]] = Future()

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # asyncio.run made one
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="p99lab-clients") as executor:
        try:
            return executor.submit(asyncio.run, cancellable()).result()
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # its loop is closed: it has just ended
                begun.result()()
            raise
