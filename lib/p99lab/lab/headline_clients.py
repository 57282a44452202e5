"""Notebook 01's clients: in the engine's process, or in one of their own over HTTP. Same queries, same token ids.

A peer gets the clients that we get over HTTP: the same process, the same transport, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from p99lab.errors import ModelError
from p99lab.lab.parameters import Headline01
from p99lab.lab.run_folder import ENVIRONMENT_VARIABLE
from p99lab.lab.vllm_server import MODEL as PEER_MODEL
from p99lab.lab.vllm_server import VllmSpec, vllm_server
from p99lab.probe.client_process import ClientJob, ClientProcess
from p99lab.probe.command import NO_KEY
from p99lab.probe.documents import Document, Tokenize
from p99lab.probe.load import Run, drive
from p99lab.probe.openai_target import TargetSpec
from p99lab.probe.targets import InProcessTarget
from p99lab.probe.tokenizer import load_tokenize
from p99lab.probe.workload import ClosedLoad, Load, Workload, make_documents, queries

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine

T = TypeVar("T")
OUR_MODEL = "engine"  # its name to clients
PEER_LOG = "vllm.log"
MAX_GATEWAYS = 4
CORES_A_GATEWAY = 4


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of the endless queries about some documents that is sent; `workload` draws the questions."""

    workload: Workload
    first: int
    num_queries: int | None  # None: as many as the load takes


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks about. `tokenizer`: whose ids the documents' text became; None: they are random ids."""

    workload: Workload
    documents: tuple[Document, ...]
    tokenizer: str | None
    tokenize: Tokenize | None

    @classmethod
    def of(cls, parameters: Headline01) -> Asked:
        """The documents that a run's parameters describe.

        Raises:
            ModelError: their tokenizer is not on this machine, and no random ids may stand for text.
        """
        tokenizer, tokenize = _tokenizer(parameters)
        documents, questions, answers = parameters.lengths
        workload = Workload(
            num_documents=parameters.num_documents,
            document_tokens=documents,
            question_tokens=questions,
            answer_tokens=answers,
            vocab_size=None if tokenizer else parameters.random_tokens,
            seed=parameters.seed,
        )
        return cls(workload, make_documents(workload, tokenize), tokenizer, tokenize)

    @property
    def source(self) -> str:
        """What the ids are, in words."""
        if self.tokenizer is not None:
            return f"text of the Python standard library, tokenised by {self.tokenizer}"
        return f"seeded random ids below {self.workload.vocab_size}"


def _tokenizer(parameters: Headline01) -> tuple[str | None, Tokenize | None]:
    """The one that is wanted; none where random ids are, or may stand for it."""
    name = parameters.tokenizer
    if name is None and parameters.random_tokens is None:
        name = parameters.model
    if name is None:
        return None, None
    try:
        return name, load_tokenize(name)
    except ModelError:
        if parameters.random_tokens is None:
            raise
        return None, None


class Clients(Protocol):
    """They send one load after another to a target that is primed already."""

    def drive(self, load: Load, stretch: Stretch) -> Run: ...


@dataclass(frozen=True, slots=True)
class ClientsHere:
    """No transport: what clients do is inside the figures. Queries are made before the load begins."""

    target: InProcessTarget
    asked: Asked

    def drive(self, load: Load, stretch: Stretch) -> Run:
        endless = queries(stretch.workload, self.asked.documents, load, self.asked.tokenize, stretch.first)
        if stretch.num_queries is None:
            return in_a_loop_of_its_own(drive(self.target, load, endless))
        sent = list(itertools.islice(endless, stretch.num_queries))
        return in_a_loop_of_its_own(drive(self.target, load, iter(sent)))


@dataclass(frozen=True, slots=True)
class ClientsThere:
    """A process of their own, which makes the same documents and sends their token ids."""

    process: ClientProcess
    endpoint: TargetSpec
    asked: Asked

    def drive(self, load: Load, stretch: Stretch) -> Run:
        return self.process.run(self._job(load, stretch))

    def prime(self) -> None:
        """Send each document once, and one question."""
        load = ClosedLoad(num_requests=1, concurrency=1, warmup_share=0.0, cache="mixed")
        others = self.asked.workload.model_copy(update={"seed": self.asked.workload.seed + 1})
        self.process.run(self._job(load, Stretch(others, 0, None)).model_copy(update={"prime": True}))

    def _job(self, load: Load, stretch: Stretch) -> ClientJob:
        return ClientJob(
            target=self.endpoint,
            workload=self.asked.workload,
            load=load,
            tokenizer=self.asked.tokenizer,
            asked=stretch.workload,
            first_query=stretch.first,
            num_queries=stretch.num_queries,
        )


@contextlib.contextmanager
def clients(parameters: Headline01, engine: Engine, asked: Asked) -> Iterator[Clients]:
    """The clients that `parameters.transport` asks for; what was started for them is gone on leaving.

    Raises:
        ServerProcessError: a gateway has ended by itself; the clients, who would wait for it, are ended at once.
    """
    if parameters.transport == "in-process":
        yield ClientsHere(InProcessTarget(engine, parameters.model), asked)
        return
    with ClientProcess() as process, served(engine, on_loss=process.kill) as url:
        yield ClientsThere(process, endpoint(url, OUR_MODEL), asked)


@contextlib.contextmanager
def peer_clients(spec: VllmSpec, asked: Asked) -> Iterator[ClientsThere]:
    """Clients of a peer that has just been started; within a run its log is kept in the run's folder.

    Raises:
        PeerError: it cannot be started.
    """
    folder = os.environ.get(ENVIRONMENT_VARIABLE)
    log = None if folder is None else Path(folder) / PEER_LOG
    with vllm_server(spec, log=log) as url, ClientProcess() as process:
        yield ClientsThere(process, endpoint(url, PEER_MODEL), asked)


@contextlib.contextmanager
def served(engine: Engine, on_loss: Callable[[], object] | None = None) -> Iterator[str]:
    """An engine of this process behind gateways in processes of their own; yields the URL.

    Args:
        on_loss: see `serve_from_process`.
    """
    from p99lab.serving.gateways import serve_from_process

    num_gateways = min(MAX_GATEWAYS, max(1, (os.cpu_count() or 1) // CORES_A_GATEWAY))
    with serve_from_process(engine, model=OUR_MODEL, num_gateways=num_gateways, on_loss=on_loss) as url:
        yield url


def endpoint(url: str, model: str) -> TargetSpec:
    """A server on the loopback that wants no key."""
    return TargetSpec(url=url, model=model, api_key_env=NO_KEY)


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
