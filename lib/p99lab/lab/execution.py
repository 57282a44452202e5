"""Running a notebook's cells so that the record tells what happened: which cell ended how, and why the run stopped.

The cells run in nbclient; what is here instead of papermill's own bookkeeping marks a cell completed only after its
reply came, saves atomically and at a bounded cost, and ends in order on a time-out, a dead kernel or a signal.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from p99lab.errors import P99labError
from p99lab.lab.kernel import Kernel, run_kernel
from p99lab.lab.reserve import disk_reserve
from p99lab.lab.run_folder import RunFolder, UnwritableError
from p99lab.lab.watchdog import Limits, Watchdog, file_age_s

if TYPE_CHECKING:
    from jupyter_client.asynchronous.client import AsyncKernelClient
    from nbclient import NotebookClient
    from nbformat import NotebookNode

STACKS = "stacks.txt"

_CELL_FAILED = 10
_OUT_OF_GPU_MEMORY = re.compile(r"\b(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory")
_SAID_BY = r"(?:[\w.]*\.)?(?:OutOfMemoryError|AcceleratorError|RuntimeError)"  # torch's, newest first
_CAUSE_IN_TRACEBACK = re.compile(rf"^{_SAID_BY}: {_OUT_OF_GPU_MEMORY.pattern}", re.MULTILINE)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_START_TIMEOUT_S = 120.0
_INTERRUPT_GRACE_S = 3.0  # for a cell to come to rest, and its last output to arrive, after an interrupt
_OUTPUT_TIMEOUT_S = 30
_MIN_SAVE_INTERVAL_S = 5.0
_MAX_SAVE_SHARE = 0.05  # of the run's time


@dataclass(frozen=True)
class Ending:
    """How a run ended: a word, the exit code, and a reason of one line."""

    status: str
    exit_code: int
    reason: str = ""


COMPLETED = Ending("completed", 0)


class Observer(Protocol):
    """Told about each cell as it starts and ends; `number` counts code cells from 1."""

    def cell_started(self, number: int, total: int, heading: str) -> None: ...

    def cell_ended(self, number: int, total: int, status: str, seconds: float) -> None: ...


class StopSignal:
    """SIGTERM, SIGUSR1, SIGHUP and SIGINT, from `with` to its end, as a request to stop that a run can wait for.

    A SIGHUP that is ignored (`nohup`) stays so. Once one has come, what is written to a terminal goes nowhere: it would
    be an error, as the terminal is gone.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._wake: Callable[[], object] = lambda: None
        self._previous: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopSignal:
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *hang_up):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    async def wait(self) -> None:
        """Return once a signal has come, also one that came before."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(event.set)
        try:
            if self.received is None:
                await event.wait()
        finally:
            self._wake = lambda: None

    def ending(self) -> Ending:
        assert self.received is not None
        if self.received is signal.SIGINT:
            return Ending("interrupted", 130, "interrupted from the keyboard (SIGINT)")
        return Ending("pre-empted", 40, f"pre-empted by {self.received.name}")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _write_nowhere(self._terminals)
        self.received = self.received or signal.Signals(number)
        self._wake()


def _write_nowhere(descriptors: Sequence[int]) -> None:
    with open(os.devnull, "wb") as nowhere:
        for descriptor in descriptors:
            os.dup2(nowhere.fileno(), descriptor)


class Journal:
    """Keeps a notebook's metadata (papermill's keys) true while its cells run, and saves it now and then.

    Saving costs at most 5 % of the time, however large the outputs; `save` is given the whole notebook.
    """

    def __init__(self, notebook: NotebookNode, save: Callable[[NotebookNode], object], observer: Observer) -> None:
        self._notebook = notebook
        self._save = save
        self._observer = observer
        self._headings = _headings(notebook)
        self._numbers = {index: n for n, index in enumerate(filter(self.runs, range(len(notebook.cells))), start=1)}
        self._started_s: dict[int, float] = {}
        self._next_save_s = 0.0
        self.save_problems: list[str] = []
        self._reset()

    def runs(self, index: int) -> bool:
        """Whether the cell at `index` has code to run."""
        cell = self._notebook.cells[index]
        return bool(cell.cell_type == "code" and cell.source.strip())

    def where(self, index: int) -> str:
        """`cell 3 of 9 (Method)`."""
        heading = f" ({self._headings[index]})" if self._headings[index] else ""
        return f"cell {self._numbers[index]} of {len(self._numbers)}{heading}"

    def cell_started(self, index: int) -> None:
        self._started_s[index] = time.monotonic()
        self._mark(index, status="running", start_time=_now())
        self.save_if_due()
        self._observer.cell_started(self._numbers[index], len(self._numbers), self._headings[index])

    def cell_ended(self, index: int, status: str) -> None:
        seconds = time.monotonic() - self._started_s[index]
        self._mark(index, status=status, end_time=_now(), duration=seconds, exception=status != "completed")
        self._observer.cell_ended(self._numbers[index], len(self._numbers), status, seconds)

    def run_ended(self, ending: Ending, seconds: float) -> None:
        """Whatever has not run by now never will. This save is not optional: its error is the caller's."""
        last_words = {"pending": "not run", "running": "failed"}
        for index in self._numbers:
            status = self._notebook.cells[index].metadata.papermill["status"]
            self._mark(index, status=last_words.get(status, status))
        failed = ending.exit_code != 0
        self._notebook.metadata.papermill.update(end_time=_now(), duration=seconds, exception=failed)
        self._save(self._notebook)

    def cells(self) -> list[dict[str, Any]]:
        """One record per code cell: number, id, heading, status, start, seconds."""
        return [self._cell_record(index) for index in self._numbers]

    def save_if_due(self) -> None:
        """Save unless the last save was too recent for its cost; a full disk must not end the run."""
        started_s = time.monotonic()
        if started_s < self._next_save_s:
            return
        try:
            self._save(self._notebook)
        except UnwritableError as error:
            self.save_problems.append(f"{_now()}: {error}")
        ended_s = time.monotonic()
        self._next_save_s = ended_s + max(_MIN_SAVE_INTERVAL_S, (ended_s - started_s) / _MAX_SAVE_SHARE)

    def save_at_once(self) -> None:
        """`save_if_due`, however recent the last save."""
        self._next_save_s = 0.0
        self.save_if_due()

    def _reset(self) -> None:
        self._notebook.metadata.papermill.update(start_time=_now(), end_time=None, duration=None, exception=None)
        for index, cell in enumerate(self._notebook.cells):
            cell.metadata.papermill = {}
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
                status = "pending" if index in self._numbers else "empty"
                self._mark(index, status=status, start_time=None, end_time=None, duration=None, exception=None)

    def _mark(self, index: int, **changes: Any) -> None:
        self._notebook.cells[index].metadata.papermill.update(changes)

    def _cell_record(self, index: int) -> dict[str, Any]:
        cell = self._notebook.cells[index]
        marks = cell.metadata.papermill
        return {
            "number": self._numbers[index],
            "id": cell.get("id"),
            "heading": self._headings[index],
            "status": marks["status"],
            "started": marks["start_time"],
            "seconds": marks["duration"],
        }


@dataclass
class Execution:
    """Everything one execution needs; `ending` is set when `run` returns or raises."""

    run_dir: Path
    environment: Mapping[str, str]
    save: Callable[[NotebookNode], object]
    observer: Observer
    stop: StopSignal
    limits: Limits = field(default_factory=Limits)
    ending: Ending | None = None
    cells: list[dict[str, Any]] | None = None
    save_problems: list[str] | None = None
    _stacks: str = field(default="", init=False, repr=False)

    def run(self, notebook: NotebookNode) -> None:
        """Run all cells in a kernel of their own; outputs, marks and the reason of the end are in the notebook.

        Raises:
            UnwritableError: the disk has no room for the notebook as it ended; the last one saved stays.
        """
        started_s = time.monotonic()
        journal = Journal(notebook, self.save, self.observer)
        failure: Exception | None = None
        try:
            with disk_reserve(self.run_dir):
                self.ending = asyncio.run(self._run(notebook, journal))
        except Exception as error:  # recorded first, then the caller's
            failure, self.ending = error, of_failure(error)
        try:
            self.ending = self._with_stacks(self.ending, journal)
            journal.run_ended(self.ending, time.monotonic() - started_s)
        finally:
            self.cells, self.save_problems = journal.cells(), journal.save_problems
        if failure is not None:
            raise failure

    async def _run(self, notebook: NotebookNode, journal: Journal) -> Ending:
        async with run_kernel(self.run_dir, self.environment) as kernel:
            watchdog = Watchdog(self.limits, lambda: file_age_s(self.run_dir))
            ending = await _Session(notebook, kernel, journal, self.stop, watchdog).run()
            self._stacks = kernel.stacks()
            if ending.exit_code != 0:
                journal.save_at_once()  # clearing away takes its time, and whoever stops the runner may not wait for it
                await kernel.kill()
            return ending

    def _with_stacks(self, ending: Ending, journal: Journal) -> Ending:
        """Keep what the kernel has dumped beside the notebook; the reason says where."""
        if not self._stacks:
            return ending
        try:
            RunFolder(self.run_dir).write(STACKS, f"{ending.reason}\n\n{self._stacks}")
        except UnwritableError as error:
            journal.save_problems.append(f"{_now()}: {error}")
            return ending
        return replace(ending, reason=f"{ending.reason}; every thread's stack is in {STACKS}")


class _Ends(NamedTuple):
    """What may end a run from outside: a signal, or a limit that was passed, in words."""

    stopped: asyncio.Future[None]
    expired: asyncio.Future[str]


class _Session:
    """One notebook on one kernel."""

    def __init__(
        self, notebook: NotebookNode, kernel: Kernel, journal: Journal, stop: StopSignal, watchdog: Watchdog
    ) -> None:
        self._notebook = notebook
        self._kernel = kernel
        self._journal = journal
        self._stop = stop
        self._watchdog = watchdog

    async def run(self) -> Ending:
        ends = _Ends(asyncio.ensure_future(self._stop.wait()), asyncio.ensure_future(self._watchdog.wait()))
        saving = asyncio.ensure_future(self._save_regularly())
        channels = self._kernel.manager.client()
        channels.start_channels()
        try:
            client = await self._client(channels, ends)
            return client if isinstance(client, Ending) else await self._run_cells(client, ends)
        finally:
            channels.stop_channels()
            for task in (*ends, saving):
                task.cancel()

    async def _client(self, channels: AsyncKernelClient, ends: _Ends) -> NotebookClient | Ending:
        """A client whose kernel answers, or the ending where it does not come to that."""
        starting = asyncio.ensure_future(self._connected(channels))
        await _first_of(starting, *ends)
        if not starting.done():
            return await self._break_off(starting, ends, "the kernel's start")
        problem = starting.exception()
        if problem is None:
            return starting.result()
        if not isinstance(problem, RuntimeError):  # what jupyter_client and nbclient say of a kernel that is not there
            raise problem
        return await self._death("before its first cell") or Ending("kernel died", 30, f"the kernel: {problem}")

    async def _connected(self, channels: AsyncKernelClient) -> NotebookClient:
        """Puts the kernel that really runs into the notebook's metadata, whatever that named."""
        await channels.wait_for_ready(timeout=_START_TIMEOUT_S)
        channels.allow_stdin = False
        client = _observed_client(self._notebook, self._kernel, self._watchdog.progressed)
        client.kc = channels
        reply = await client.async_wait_for_reply(channels.kernel_info())
        assert reply is not None
        self._notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        self._notebook.metadata.language_info = reply["content"]["language_info"]
        return client

    async def _run_cells(self, client: NotebookClient, ends: _Ends) -> Ending:
        for index in range(len(self._notebook.cells)):
            if not self._journal.runs(index):
                continue
            self._journal.cell_started(index)
            self._watchdog.cell_started()
            ending = await self._run_cell(client, index, ends)
            self._watchdog.cell_ended()
            self._journal.cell_ended(index, "completed" if ending is None or ending.exit_code == 0 else "failed")
            if ending is not None:
                return ending
        return COMPLETED

    async def _run_cell(self, client: NotebookClient, index: int, ends: _Ends) -> Ending | None:
        """None when the cell ran and the next may follow."""
        running = asyncio.ensure_future(client.async_execute_cell(self._notebook.cells[index], index))
        await _first_of(running, *ends)
        if running.done():
            return await self._judge(index, running.exception())
        return await self._break_off(running, ends, self._journal.where(index))

    async def _break_off(self, running: asyncio.Future[Any], ends: _Ends, where: str) -> Ending:
        """Interrupt what runs: a signal has come, or a limit was passed, and then the kernel's stacks tell more."""
        if expired := not ends.stopped.done():
            await self._kernel.dump_stacks()
        await self._kernel.manager.interrupt_kernel()
        await _first_of(running, timeout_s=_INTERRUPT_GRACE_S)
        await _abandon(running)
        return Ending("timed out", 20, f"{where}: {ends.expired.result()}") if expired else self._stop.ending()

    async def _judge(self, index: int, problem: BaseException | None) -> Ending | None:
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        where = self._journal.where(index)
        if problem is None:
            return None
        if isinstance(problem, CellExecutionError):
            return of_error(problem.ename, problem.evalue, where, problem.traceback)
        if not isinstance(problem, DeadKernelError):
            raise problem
        return await self._death(f"in {where}") or Ending("kernel died", 30, f"the kernel died in {where}")

    async def _death(self, when: str) -> Ending | None:
        """What the kernel's death means; None while it lives."""
        if (cause := await self._kernel.cause_of_death()) is None:
            return None
        if self._stop.received is not None:  # a scheduler signals the kernel as well as the runner
            return self._stop.ending()
        if await self._kernel.was_taken_for_memory():
            return Ending("out of memory", 31, f"the kernel {cause} {when}: the OOM killer struck in its cgroup")
        return Ending("kernel died", 30, f"the kernel {cause} {when}")

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(_MIN_SAVE_INTERVAL_S)
            self._journal.save_if_due()


def _observed_client(notebook: NotebookNode, kernel: Kernel, on_message: Callable[[], object]) -> NotebookClient:
    from nbclient import NotebookClient

    class Observed(NotebookClient):
        """Says when a cell has said something."""

        def process_message(self, *arguments: Any, **named: Any) -> NotebookNode | None:
            on_message()
            return super().process_message(*arguments, **named)

    return Observed(notebook, km=kernel.manager, iopub_timeout=_OUTPUT_TIMEOUT_S)


def of_error(name: str, value: str, where: str, traceback: str = "") -> Ending:
    """What an exception in a cell means: the lab's own errors keep their exit codes, and so does `sys.exit`.

    `traceback` is searched for a GPU without memory that another exception came from.
    """
    if name != "SystemExit":
        said = [name, *value.strip().splitlines()[:1]]
        if is_out_of_gpu_memory(name, value, traceback):
            return Ending("out of GPU memory", 32, f"{where}: {': '.join(said)}")
        return Ending("failed", exit_codes().get(name, _CELL_FAILED), f"{where}: {': '.join(said)}")
    if value in ("", "None", "0"):
        return Ending("completed", 0, f"ended early: {where} called sys.exit({value})")
    code = int(value) & 0xFF if re.fullmatch(r"-?[0-9]+", value) else 1
    return Ending("exited", code or 1, f"{where} called sys.exit({value})")


def is_out_of_gpu_memory(name: str, value: str, traceback: str = "") -> bool:
    """Whether torch said so, itself or as the cause of another exception. Want of host memory reads otherwise."""
    return _CAUSE_IN_TRACEBACK.search(f"{name}: {value}\n{_COLOUR.sub('', traceback)}") is not None


def of_failure(error: Exception) -> Ending:
    """What an exception of the runner itself means: nothing that the notebook did explains it."""
    said = [type(error).__name__, *str(error).strip().splitlines()[:1]]
    return Ending("failed", error.exit_code if isinstance(error, P99labError) else 1, f"runner: {': '.join(said)}")


def exit_codes() -> dict[str, int]:
    """The exit code of each of the project's errors that has one of its own, by the name under which a kernel says it.

    A kernel says the name of the class and nothing of its ancestors, so the whole hierarchy is listed.
    """
    import p99lab.engine.scheduler
    import p99lab.probe.client_process
    import p99lab.probe.targets  # noqa: F401  all define errors with codes of their own

    return {error.__name__: error.exit_code for error in _descendants(P99labError) if error.exit_code != 1}


def _descendants(ancestor: type[P99labError]) -> list[type[P99labError]]:
    return [one for child in ancestor.__subclasses__() for one in (child, *_descendants(child))]


async def _first_of(*awaitables: Awaitable[Any], timeout_s: float | None = None) -> None:
    futures = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def _abandon(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _headings(notebook: NotebookNode) -> list[str]:
    """For each cell, the last heading above it."""
    headings, current = [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            titles = [line.lstrip("#").strip() for line in cell.source.splitlines() if line.startswith("#")]
            current = titles[-1] if titles else current
        headings.append(current)
    return headings


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
