"""Clients in a process of their own, so that neither a server nor a notebook makes them wait.

Executed as a module (`python -m p99lab.probe.client_process`) it *is* that process. It takes jobs from its standard
input and answers on its standard output, in frames of a letter, a length and so many bytes. It lives no longer than its
parent: when the pipe of jobs is closed, or it gets another parent, it ends. (The kernel's parent-death signal would
come when the *thread* ends that started it, and a notebook's runs have threads of their own.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any, BinaryIO, Protocol, Self

import orjson
import pyarrow as pa
from pydantic import Field

from p99lab.errors import BadParameterError, ModelError, P99labError
from p99lab.probe.documents import Document, Tokenize
from p99lab.probe.load import Progress, Run, drive
from p99lab.probe.openai_target import OpenAITarget, TargetSpec
from p99lab.probe.records import RequestRecord, from_row, from_table, to_table
from p99lab.probe.targets import TargetError
from p99lab.probe.tokenizer import load_tokenize
from p99lab.probe.workload import AnyLoad, Workload, digest, make_documents, needs_documents, queries, with_end
from p99lab.serving.heap import keep_freed_memory
from p99lab.strict import StrictModel

OnProgress = Callable[[Progress], None]

PROGRESS_EVERY_S = 0.1
CLOSE_TIMEOUT_S = 5.0
_ORPHAN_CHECK_S = 1.0
_HEADER = struct.Struct(">cQ")
_JOB, _PROGRESS, _RESULT, _ERROR, _FAULT = b"J", b"P", b"R", b"E", b"F"
_ERRORS = (P99labError, BadParameterError, ModelError, TargetError)


class ClientProcessError(P99labError):
    """The clients' process ended before its run did: nothing of the run is left."""


class ClientJob(StrictModel):
    """One run, in plain values.

    `tokenizer`: see `load_tokenize`. `asked`: draws questions and arrivals instead of the workload, whose documents
    stay. `first_query` and `num_queries` are the stretch of the endless queries that is sent; its arrivals begin at the
    start of the run. `prime`: each document is sent once before the load.
    """

    target: TargetSpec
    workload: Workload
    load: AnyLoad
    tokenizer: str | None = None
    asked: Workload | None = None
    first_query: int = Field(0, ge=0)
    num_queries: int | None = Field(None, ge=1)
    prime: bool = False


@dataclass(frozen=True, slots=True)
class ClientRun(Run):
    """A run, and what the clients' process knows besides: `target` as it names itself, the digest of what was asked
    about, and the documents' lengths."""

    target: str = ""
    workload_digest: str = ""
    document_tokens: tuple[int, ...] = ()


class ClientProcess:
    """A process that makes documents and queries, opens and primes the target, and drives loads, one after the other.

    A context manager; it starts on entering and is gone on leaving, as it is when its parent ends, however that ends.
    It has the environment and the working directory of its parent's at that time. One run at a time.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "p99lab.probe.client_process", str(os.getpid())]
        # A group of its own: a terminal's Ctrl-C is the parent's to handle.
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._running().pid

    def run(self, job: ClientJob, on_progress: OnProgress | None = None) -> ClientRun:
        """Run the job to its end. Times in its records are seconds of the child's clock after the run's start.

        Interrupted (Ctrl-C), it ends the process, and with it every request.

        Args:
            on_progress: called in this thread, ten times a second at most; the token times of `latest` are left out.

        Raises:
            BadParameterError: a job that does not fit together or the target.
            TargetError: the target cannot be reached, or failed while it was primed.
            ModelError: the tokenizer cannot be used.
            ClientProcessError: the process was killed.
        """
        child = self._running()
        try:
            kind, payload = self._exchange(child, job, on_progress)
        except BaseException:
            self.kill()
            raise
        if kind == _RESULT:
            return _read_result(payload)
        if kind == _ERROR:
            raise _read_error(payload)
        raise RuntimeError(f"in the clients' process:\n{payload.decode()}")

    async def run_async(self, job: ClientJob, on_progress: OnProgress | None = None) -> ClientRun:
        """`run`, inside a running event loop (a notebook's), in which `on_progress` is called too. Cancelled, it ends
        the process."""
        loop = asyncio.get_running_loop()
        tell = None if on_progress is None else lambda progress: _call_soon(loop, on_progress, progress)
        try:
            return await asyncio.to_thread(self.run, job, tell)
        except asyncio.CancelledError:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process at once."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def close(self) -> None:
        """Let the process end, and make it end if it does not."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(BrokenPipeError):
            _pipe(child.stdin).close()
        try:
            child.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        _pipe(child.stdout).close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise RuntimeError("enter the clients' process before using it")
        if self._child.poll() is not None:
            raise ClientProcessError(_how_it_ended(self._child))
        return self._child

    def _exchange(
        self, child: subprocess.Popen[bytes], job: ClientJob, on_progress: OnProgress | None
    ) -> tuple[bytes, bytes]:
        """The frame that ends a run."""
        order = {"job": job.model_dump(mode="json"), "tell": on_progress is not None}
        with contextlib.suppress(BrokenPipeError):  # then there is nothing to read either
            _write_frame(_pipe(child.stdin), _JOB, orjson.dumps(order))
        while (frame := _read_frame(_pipe(child.stdout))) is not None:
            if frame[0] != _PROGRESS:
                return frame
            if on_progress is not None:
                on_progress(_read_progress(frame[1]))
        child.wait()
        raise ClientProcessError(_how_it_ended(child))


def _how_it_ended(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the clients' process {how}"


def _call_soon(loop: asyncio.AbstractEventLoop, on_progress: OnProgress, progress: Progress) -> None:
    loop.call_soon_threadsafe(on_progress, progress)


# --- frames ---------------------------------------------------------------------------------------------------------


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def _pipe(stream: Any) -> Any:
    assert stream is not None  # both were asked for
    return stream


def _write_frame(stream: BinaryIO, kind: bytes, payload: bytes) -> None:
    stream.write(_HEADER.pack(kind, len(payload)) + payload)
    stream.flush()


def _read_frame(stream: _Readable) -> tuple[bytes, bytes] | None:
    """None at the end of the stream, also within a frame."""
    header = _read_exactly(stream, _HEADER.size)
    if header is None:
        return None
    kind, size = _HEADER.unpack(header)
    payload = _read_exactly(stream, size)
    return None if payload is None else (kind, payload)


def _read_exactly(stream: _Readable, size: int) -> bytes | None:
    whole = bytearray()
    while len(whole) < size:
        part = stream.read(size - len(whole))
        if not part:
            return None
        whole += part
    return bytes(whole)


def _write_result(run: ClientRun) -> bytes:
    """A line of JSON, then the records as an Arrow stream: floats stay exact."""
    told = {each.name: getattr(run, each.name) for each in fields(run) if each.name != "records"}
    table, sink = to_table(run.records), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    stream: bytes = sink.getvalue().to_pybytes()
    return orjson.dumps(told) + b"\n" + stream


def _read_result(payload: bytes) -> ClientRun:
    line, _, stream = payload.partition(b"\n")
    told = orjson.loads(line)
    told["document_tokens"] = tuple(told["document_tokens"])
    return ClientRun(records=tuple(from_table(pa.ipc.open_stream(stream).read_all())), **told)


def _write_progress(progress: Progress) -> bytes:
    return orjson.dumps(asdict(replace(progress, latest=replace(progress.latest, token_times_s=()))))


def _read_progress(payload: bytes) -> Progress:
    told = orjson.loads(payload)
    latest: RequestRecord = from_row(told.pop("latest"))
    return Progress(latest=latest, **told)


def _write_error(error: P99labError) -> bytes:
    return orjson.dumps({"kind": type(error).__name__, "exit_code": error.exit_code, "message": str(error)})


def _read_error(payload: bytes) -> P99labError:
    """An error of the same class; of `P99labError` with the same exit code where it is not one of the probe's."""
    told = orjson.loads(payload)
    known = {kind.__name__: kind for kind in _ERRORS}
    error = known.get(told["kind"], P99labError)(told["message"])
    error.exit_code = told["exit_code"]
    return error


# --- the child ------------------------------------------------------------------------------------------------------


class _Clients:
    """What the process keeps between jobs: the last documents and the last tokenizer."""

    def __init__(self, channel: BinaryIO) -> None:
        self._channel = channel
        self._tokenizer: tuple[str, Tokenize] | None = None
        self._documents: tuple[object, tuple[Document, ...]] | None = None

    async def serve(self, order: bytes) -> None:
        """Do one job; its result or its error is the last frame written."""
        try:
            told = orjson.loads(order)
            run = await self._run(ClientJob.parse(told["job"]), self._tell if told["tell"] else None)
            kind, payload = _RESULT, _write_result(run)
        except P99labError as error:
            kind, payload = _ERROR, _write_error(error)
        except Exception:  # a fault of ours: the parent raises it
            kind, payload = _FAULT, traceback.format_exc().encode()
        _write_frame(self._channel, kind, payload)

    async def _run(self, job: ClientJob, on_progress: OnProgress | None) -> ClientRun:
        tokenize, load = self._tokenize(job.tokenizer), with_end(job.load)
        target = OpenAITarget.of(job.target, tokenize)
        await target.open()
        try:
            documents = self._make_documents(job, tokenize)
            if job.prime:
                await target.prime(documents)
            asked = queries(job.asked or job.workload, documents, load, tokenize, job.first_query)
            with _without_collections():
                told = None if on_progress is None else _now_and_then(on_progress)
                run = await drive(target, load, islice(asked, job.num_queries), on_progress=told)
        finally:
            await target.close()
        return ClientRun(
            run.records,
            run.counters_before,
            run.counters_after,
            run.began_unix_s,
            target.name,
            digest(job.workload, documents),
            tuple(document.passage.num_tokens for document in documents),
        )

    def _tokenize(self, name: str | None) -> Tokenize | None:
        if name is None:
            return None
        if self._tokenizer is None or self._tokenizer[0] != name:
            self._tokenizer = (name, load_tokenize(name))
        return self._tokenizer[1]

    def _make_documents(self, job: ClientJob, tokenize: Tokenize | None) -> tuple[Document, ...]:
        if not needs_documents(job.load):
            return ()
        wanted = (job.workload, job.tokenizer)
        if self._documents is None or self._documents[0] != wanted:
            self._documents = (wanted, make_documents(job.workload, tokenize))
        return self._documents[1]

    def _tell(self, progress: Progress) -> None:
        """Skipped rather than waited for, should the parent not read: frames of progress are smaller than PIPE_BUF."""
        _, writable, _ = select.select([], [self._channel], [], 0)
        if writable:
            _write_frame(self._channel, _PROGRESS, _write_progress(progress))


def _now_and_then(on_progress: OnProgress) -> OnProgress:
    last_s = -PROGRESS_EVERY_S

    def tell(progress: Progress) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= PROGRESS_EVERY_S:
            last_s = now_s
            on_progress(progress)

    return tell


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage is collected within: a collection would stop every client for milliseconds. It is done afterwards."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        gc.collect()


def _take_orders(parent: int, orders: queue.SimpleQueue[bytes]) -> None:
    """Read jobs until the parent closes their pipe or is gone; then this process ends, whatever it does."""
    with os.fdopen(os.dup(0), "rb", buffering=0) as pipe:
        while os.getppid() == parent:
            if not select.select([pipe], [], [], _ORPHAN_CHECK_S)[0]:
                continue
            if (frame := _read_frame(pipe)) is None:
                break
            orders.put(frame[1])
    os._exit(0)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one: tokens of all streams come at once, and a send that falls due meanwhile waits."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    with os.fdopen(os.dup(1), "wb") as channel, asyncio.Runner(loop_factory=new_event_loop) as runner:
        os.dup2(2, 1)  # what a library prints must not get among the frames
        orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_take_orders, args=(int(sys.argv[1]), orders), daemon=True).start()
        clients = _Clients(channel)
        while True:
            runner.run(clients.serve(orders.get()))


if __name__ == "__main__":
    _main()
