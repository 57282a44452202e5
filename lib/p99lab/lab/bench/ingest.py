"""`p99lab bench ingest`: what long prompts that come over HTTP cost the engine's step loop. No GPU, no model.

An engine with its real scheduler, prefix tree and step loop runs *fake* steps: each sleeps for a fixed time, as a host
does that waits for its device, and computes nothing. Some requests decode all the time; a client process sends prompts
of 130 000 ids at a fixed rate, each a known document and a question of its own. Four stretches, one after the other:

- quiet: no prompts;
- direct: the prompts are there already, as arrays, in a thread of the engine's process;
- gateway: over HTTP, through `serve_from_process`;
- thread: over HTTP, through `serve_in_thread`, whose server shares the engine's interpreter (the peer).

A step's time is from its beginning to the next one's: the sleep, and all that the loop does or waits for in between.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import orjson
import psutil
from numpy.typing import NDArray

from p99lab.engine.config import AttentionConfig, CacheConfig, EngineConfig, GraphsConfig, ModelConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import TokenEvent
from p99lab.engine.interpreter import shared_interpreter
from p99lab.engine.plan import StepPlan, StepResult
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.errors import AccountingError
from p99lab.lab.bench.ingest_client import IngestPrompts, Order
from p99lab.lab.bench.rows import BenchRow
from p99lab.serving import child
from p99lab.serving.background import serve_in_thread
from p99lab.serving.gateways import serve_from_process

MODEL = "dummy:tiny-128k"
GATEWAY_MODULE = "p99lab.serving.gateway"


@dataclass(frozen=True, slots=True)
class IngestBench:
    """The defaults are those the project's bar is stated for: 60 prompts of 130 000 ids a second."""

    prompts_per_s: float = 60.0
    prompt_len: int = 130_000
    question_len: int = 64
    answer_len: int = 16
    num_documents: int = 4
    num_decoding: int = 32
    step_ms: float = 20.0
    seconds: float = 8.0  # of each stretch
    settling_s: float = 0.5  # before and after each
    num_gateways: int = 1
    overlap: bool = False

    @property
    def order(self) -> Order:
        return Order(
            prompts_per_s=self.prompts_per_s,
            prompt_len=self.prompt_len,
            question_len=self.question_len,
            answer_len=self.answer_len,
            num_documents=self.num_documents,
            seconds=self.seconds,
        )


@dataclass(slots=True)
class SleepingStep:
    """A step that ends at a given time."""

    plan: StepPlan
    ends_s: float

    def result(self) -> StepResult:
        self.abandon()
        token_ids = tuple(1 if row.samples else None for row in self.plan.rows)
        return StepResult(self.plan.epoch, token_ids, (None,) * len(self.plan.rows))

    def abandon(self) -> None:
        time.sleep(max(0.0, self.ends_s - time.perf_counter()))


@dataclass(slots=True)
class SleepingRunner:
    """Steps of a fixed time, one after the other as on a device; `began_s`: when each began."""

    step_s: float
    began_s: list[float] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> SleepingStep:
        now_s = time.perf_counter()
        began_s = max(now_s, self.began_s[-1] + self.step_s) if self.began_s else now_s
        self.began_s.append(began_s)
        return SleepingStep(plan, began_s + self.step_s)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def reconfigure(self, attention: AttentionConfig | None, graphs: GraphsConfig | None) -> None:
        """It sleeps the same whatever it is told."""


@dataclass(frozen=True, slots=True)
class IngestStretch:
    """What one stretch has shown. CPU seconds are of its whole length; `gateway_cpu_s` is 0 where there is none."""

    step_ms: NDArray[np.float64]  # [num_steps]
    engine_cpu_s: float
    gateway_cpu_s: float
    num_answered: int

    def step_percentile(self, percent: float) -> float:
        return float(np.percentile(self.step_ms, percent))


def run(bench: IngestBench | None = None) -> list[BenchRow]:
    """All stretches; about half a minute.

    Raises:
        AccountingError: a prompt was not answered.
    """
    bench = bench or IngestBench()
    runner = SleepingRunner(bench.step_ms / 1e3)
    with Engine(_config(bench), new_runner=lambda *_: runner) as engine, shared_interpreter():
        asked = IngestPrompts.draw(bench.order)
        engine.generate(list(asked.documents), SamplingParams(max_tokens=1))
        _decode_all_the_time(engine, bench)
        measure = partial(_measure, bench, runner)
        quiet = measure(lambda: time.sleep(bench.seconds))
        direct = measure(lambda: _put_in(engine, bench, asked))
        with serve_from_process(engine, model="ingest", num_gateways=bench.num_gateways) as url, _client(bench) as send:
            gateway = measure(lambda: send(url))
        with serve_in_thread(engine, model="ingest") as url, _client(bench) as send:
            thread = measure(lambda: send(url))
        engine.quiesce()
    return _rows(bench, quiet, direct, gateway, thread)


def _config(bench: IngestBench) -> EngineConfig:
    document_pages = -(-bench.prompt_len // CacheConfig().page_size) + 1
    return EngineConfig(
        model=ModelConfig(name=MODEL),
        cache=CacheConfig(num_pages=bench.num_documents * document_pages + 16_384),
        scheduler=SchedulerConfig(max_num_batched_tokens=1 << 17, max_num_seqs=256, overlap=bench.overlap),
    )


def _decode_all_the_time(engine: Engine, bench: IngestBench) -> None:
    """Requests that outlast the benchmark, so that there is a step to disturb at any time."""
    endless = SamplingParams(max_tokens=100_000, ignore_eos=True)
    for number in range(bench.num_decoding):
        prompt = np.full(8, number, np.int32)
        engine.submit(partial(_add, prompt, endless, lambda: None))


def _measure(bench: IngestBench, runner: SleepingRunner, load: Callable[[], int | None]) -> IngestStretch:
    time.sleep(bench.settling_s)
    first, cpu_s, gateway_cpu_s = len(runner.began_s), time.process_time(), _gateway_cpu_s()
    num_answered = load() or 0
    step_ms = 1e3 * np.diff(np.array(runner.began_s[first:]))
    stretch = IngestStretch(step_ms, time.process_time() - cpu_s, _gateway_cpu_s() - gateway_cpu_s, num_answered)
    time.sleep(bench.settling_s)
    return stretch


def _put_in(engine: Engine, bench: IngestBench, asked: IngestPrompts) -> int:
    """The requests of a load, from a thread of this process; returns once all are answered."""
    sampling = SamplingParams(max_tokens=bench.answer_len, ignore_eos=True)
    ended = threading.Semaphore(0)
    began_s = time.perf_counter()
    for number in range(bench.order.num_prompts):
        prompt = asked.prompt(number)
        time.sleep(max(0.0, began_s + number / bench.prompts_per_s - time.perf_counter()))
        engine.submit(partial(_add, prompt, sampling, ended.release))
    for _ in range(bench.order.num_prompts):
        ended.acquire()
    return bench.order.num_prompts


def _add(prompt: IntArray, sampling: SamplingParams, at_end: Callable[[], None], engine: Engine) -> None:
    def on_event(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            at_end()

    engine.add(prompt, sampling, on_event=on_event)


@contextlib.contextmanager
def _client(bench: IngestBench) -> Iterator[Callable[[str], int]]:
    """A client's process that has its bodies ready; the function has them sent, and returns how many were answered."""
    command = child.command("p99lab.lab.bench.ingest_client", ())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(orjson.dumps(bench.order.model_dump()) + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        stdin, stdout = process.stdin, process.stdout

        def send(url: str) -> int:
            stdin.write(url.encode() + b"\n")
            stdin.flush()
            outcome = orjson.loads(stdout.readline())
            if outcome["num_answered"] != bench.order.num_prompts:
                raise AccountingError(f"{outcome['num_answered']} of {bench.order.num_prompts} prompts were answered")
            return int(outcome["num_answered"])

        try:
            yield send
        finally:
            process.kill()


def _gateway_cpu_s() -> float:
    """CPU seconds of this process's gateways so far."""
    total_s = 0.0
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if GATEWAY_MODULE in process.cmdline():
                times = process.cpu_times()
                total_s += times.user + times.system
    return total_s


def _rows(
    bench: IngestBench, quiet: IngestStretch, direct: IngestStretch, gateway: IngestStretch, thread: IngestStretch
) -> list[BenchRow]:
    peer = "server in the engine's process"
    rows = []
    for percent in (50, 99):
        floor, other = quiet.step_percentile(percent), thread.step_percentile(percent)
        value, own = gateway.step_percentile(percent), direct.step_percentile(percent)
        rows += [
            BenchRow(f"step P{percent}, prompts put in directly", own, "ms", floor, own / floor),
            BenchRow(
                f"step P{percent}, prompts over HTTP", value, "ms", floor, value / floor, peer, other, other / value
            ),
        ]
    engine_ms, direct_ms = _cpu_ms(gateway, quiet), _cpu_ms(direct, quiet)
    thread_ms = _cpu_ms(thread, quiet)
    gateway_ms = 1e3 * gateway.gateway_cpu_s / gateway.num_answered
    return [
        *rows,
        BenchRow(
            "engine's process, CPU a prompt",
            engine_ms,
            "ms",
            direct_ms,
            engine_ms / direct_ms,
            peer,
            thread_ms,
            thread_ms / engine_ms,
        ),
        BenchRow("gateway, CPU a prompt", gateway_ms, "ms"),
        BenchRow("prompts/s that one gateway's core allows", 1e3 / gateway_ms, "1/s", bench.prompts_per_s),
    ]


def _cpu_ms(stretch: IngestStretch, quiet: IngestStretch) -> float:
    """CPU milliseconds of the engine's process that a prompt and its answer have added."""
    length_s, quiet_s = stretch.step_ms.sum() / 1e3, quiet.step_ms.sum() / 1e3
    return float(1e3 * (stretch.engine_cpu_s - quiet.engine_cpu_s * length_s / quiet_s) / stretch.num_answered)
