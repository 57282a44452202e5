"""One probe, from options to a result: open the target, prime it, drive the load, summarise.

Clients of a server run in a process of their own; those of an engine in this process share it, and the result says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from p99lab.engine.model_store import resolve
from p99lab.errors import BadParameterError
from p99lab.probe.client_process import ClientJob, ClientProcess
from p99lab.probe.documents import Document
from p99lab.probe.load import Clock, Progress, Run, drive
from p99lab.probe.openai_target import TargetSpec
from p99lab.probe.options import DEFAULT_MODEL, ProbeOptions
from p99lab.probe.records import RequestRecord
from p99lab.probe.stats import Summary, measured, summarise
from p99lab.probe.targets import InProcessTarget, Target, shared_interpreter
from p99lab.probe.workload import TraceLoad, digest, make_documents, needs_documents, queries

OnProgress = Callable[[Progress], None]
Transport = Literal["in-process", "http"]
NO_KEY = "P99LAB_NO_KEY"  # a server of ours asks for none, and a key for others is none of its business


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was asked, what happened, and the figures."""

    options: ProbeOptions
    target: str
    transport: Transport
    workload_digest: str
    run: Run
    summary: Summary

    @property
    def clients(self) -> str:
        return "in the engine's process" if self.transport == "in-process" else "in a process of their own"

    @property
    def used(self) -> list[RequestRecord]:
        """The measured requests that the figures cover."""
        window = self.summary.steady_window
        return measured(self.run.records)[window.first : window.last + 1]

    @property
    def seconds(self) -> float:
        """From the start of the run to its last record."""
        return max((record.end_s for record in self.run.records), default=0.0)

    @property
    def prompt_tokens(self) -> dict[str, int | None]:
        """Shortest and longest prompt sent, as the target counts tokens, or as estimated where it does not."""
        lengths = [record.num_prompt_tokens for record in self.run.records]
        return {"min": min(lengths, default=None), "max": max(lengths, default=None)}

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `--output-format json`: the target and the summary first, what was asked last."""
        return {
            "target": {"name": self.target, "transport": self.transport, "clients": self.clients},
            **self.summary.as_dict(),
            "prompt_tokens": self.prompt_tokens,
            "began_unix_s": self.run.began_unix_s,
            "workload_digest": self.workload_digest,
            "options": self.options.model_dump(mode="json"),
        }


class Session(Protocol):
    """An open target; `measure` brings its cache to the declared state, drives one load to its end, and summarises.

    All options of a session ask for the same documents: they may differ in load and repetition only.
    """

    async def measure(self, options: ProbeOptions, on_progress: OnProgress | None = None) -> ProbeResult: ...


@dataclass(frozen=True, slots=True)
class SessionHere:
    """Clients in this process. `clock` and `spin_s` are those of `load.drive`."""

    target: Target
    documents: Sequence[Document]
    clock: Clock = time.perf_counter
    spin_s: float = 0.002

    async def measure(self, options: ProbeOptions, on_progress: OnProgress | None = None) -> ProbeResult:
        """
        Raises:
            TargetError: priming failed.
        """
        load, target = options.load_spec, self.target
        if options.primes:
            await target.prime(self.documents)
        sent = queries(options.asked, self.documents, load, target.tokenize)
        run = await drive(target, load, sent, on_progress=on_progress, clock=self.clock, spin_s=self.spin_s)
        of_what = digest(options.workload, self.documents)
        return ProbeResult(options, target.name, target.transport, of_what, run, summarise(run, load))


@dataclass(frozen=True, slots=True)
class SessionThere:
    """Clients in a process of their own, which sends to an endpoint. `label`: instead of the endpoint's name."""

    clients: ClientProcess
    endpoint: TargetSpec
    tokenizer: str | None
    label: str | None = None

    async def measure(self, options: ProbeOptions, on_progress: OnProgress | None = None) -> ProbeResult:
        """
        Raises:
            TargetError: the endpoint cannot be reached, or priming failed.
            ClientProcessError: the clients were killed.
        """
        job = ClientJob(
            target=self.endpoint,
            workload=options.workload,
            load=options.load_spec,
            tokenizer=self.tokenizer,
            asked=options.asked,
            prime=options.primes,
        )
        run = await self.clients.run_async(job, on_progress)
        summary = summarise(run, job.load)
        return ProbeResult(options, self.label or run.target, "http", run.workload_digest, run, summary)


def probe(options: ProbeOptions, on_progress: OnProgress | None = None) -> ProbeResult:
    """Run one probe to its end, in the caller's thread.

    Raises:
        BadParameterError: options that do not fit together or the target.
        TargetError: the target cannot be reached.
        ModelError: the engine's model cannot be used.
    """
    return asyncio.run(probe_async(options, on_progress))


async def probe_async(options: ProbeOptions, on_progress: OnProgress | None = None) -> ProbeResult:
    """`probe`, inside a running event loop (a notebook's)."""
    load, _ = options.load_spec, options.workload  # a parameter that does not fit is found before a model is loaded
    if isinstance(load, TraceLoad):
        load.rows()  # and a file that cannot be read
    async with opened(options) as session:
        return await session.measure(options, on_progress)


@asynccontextmanager
async def opened(options: ProbeOptions) -> AsyncIterator[Session]:
    """A session with the options' target; what was started for it is stopped at the end."""
    model = options.model or DEFAULT_MODEL
    if options.target == "in-process":
        with shared_interpreter(), _engine(model) as engine:
            target = InProcessTarget(engine, model)
            documents = make_documents(options.workload, target.tokenize) if needs_documents(options.load_spec) else ()
            yield SessionHere(target, documents)
    elif options.target == "serve":
        with _server(model) as url, ClientProcess() as clients:
            spec = TargetSpec(url=url, endpoint=options.endpoint, api_key_env=NO_KEY)
            tokenizer = options.tokenizer or (model if options.random_tokens is None else None)
            yield SessionThere(clients, spec, tokenizer, f"p99lab serve ({model}, {options.endpoint})")
    else:
        url, key = options.target, options.api_key_env
        with ClientProcess() as clients:
            spec = TargetSpec(url=url, model=options.model, endpoint=options.endpoint, api_key_env=key)
            yield SessionThere(clients, spec, options.tokenizer)


@contextmanager
def _server(model: str) -> Iterator[str]:
    """The engine behind `p99lab serve` in a process of its own; its URL."""
    resolve(model)  # a model that does not exist is this process's error, not a server's that did not come up
    with _extras("engine", "serve"):
        import fastapi  # noqa: F401
        import torch  # noqa: F401

        from p99lab.serving.process import server_process
    with server_process([model]) as url:
        yield url


def _engine(model: str) -> Any:
    with _extras("engine"):
        from p99lab.engine.engine import Engine
    from p99lab.engine.config import EngineConfig

    return Engine(EngineConfig.parse({"model": model}))


@contextmanager
def _extras(*names: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        wanted = ",".join(names)
        raise BadParameterError(
            f"this target needs the engine ({error.name} is missing): install the extras '{wanted}' "
            f"(in a checkout: pip install '.[{wanted}]'), or give the URL of an endpoint with --target"
        ) from None
