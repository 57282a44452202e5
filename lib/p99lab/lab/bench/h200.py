"""`p99lab bench h200`: one engine at 128K contexts on one GPU, each figure beside its floor, its bar and its peers.

transformers and vLLM run first, in processes of their own: two engines do not share a device. Cases over HTTP have the
same clients, transport and token ids for vLLM and for us, and are compared with each other alone. Floors are arithmetic
(`h200_floors`) over ceilings that are measured in the same run.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import check
from p99lab.errors import BadParameterError, P99labError
from p99lab.lab.bench import (
    h200_closed,
    h200_compile,
    h200_groups,
    h200_http,
    h200_scheduling,
    h200_steps,
    h200_transformers,
)
from p99lab.lab.bench.h200_engine import Ours, Steps
from p99lab.lab.bench.h200_floors import ELEMENT_BYTES, Rates, Work, floor_s
from p99lab.lab.bench.h200_http import Sample, Tell
from p99lab.lab.bench.h200_runner import BenchRunner, reachable
from p99lab.lab.bench.h200_sizes import (
    APART,
    BARS_MS,
    BESIDE_TRANSFORMERS,
    CASES,
    FAKE,
    ON_DOCUMENTS,
    OVER_HTTP,
    WITHOUT_ENGINE,
    H200Bench,
)
from p99lab.lab.bench.rows import BenchRow
from p99lab.lab.headline_clients import OUR_MODEL, endpoint, served
from p99lab.lab.vllm_server import MODEL as PEER_MODEL
from p99lab.lab.vllm_server import VllmSpec, vllm_server
from p99lab.observe.ceilings import Sizes, ceilings, device_ceilings
from p99lab.observe.hardware import has_gpu
from p99lab.probe.client_process import ClientProcess

DEVICE_SIZES = Sizes(buffer_mib=4096, matmul_size=8192, disk_mib=1, launches=1000, repeats=7)
HOST_SIZES = Sizes(buffer_mib=64, matmul_size=512, disk_mib=1, launches=1, repeats=3)


@dataclass(slots=True)
class Peers:
    """What they reached, by case, and why one reached nothing."""

    transformers: dict[str, Sample] = field(default_factory=dict)
    vllm: dict[str, Sample] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by the peer's name

    def of(self, case: str) -> tuple[str | None, Sample | None, str | None]:
        """The peer that a case is compared with, its figure, and a note: of it, or why there is none."""
        name = "transformers" if case in BESIDE_TRANSFORMERS else "vLLM" if case in OVER_HTTP else None
        if name is None:
            return None, None, None
        sample = (self.transformers if name == "transformers" else self.vllm).get(case)
        if sample is None:
            return None, None, self.notes.get(name)
        if sample.failed is not None:
            return None, None, f"{name}: {sample.failed}"
        return name, sample, None if sample.note is None else f"{name}: {sample.note}"


def rows(
    bench: H200Bench, cases: frozenset[str], vllm: VllmSpec | None, tell: Tell = lambda line: None
) -> Iterator[BenchRow]:
    """Measure and yield each row as soon as it is known; what is refused is so before the first is asked for.

    Raises:
        ModelError: the model is not there.
        BadParameterError: there is no GPU.
    """
    check(bench.model)
    if bench.device.startswith("cuda") and not has_gpu():
        raise BadParameterError(f"device={bench.device} needs an NVIDIA GPU, and there is none here")
    found = _rows(bench, cases, vllm, tell)
    return found if bench.primed == "real" else map(_labelled, found)


def _labelled(row: BenchRow) -> BenchRow:
    """A row of a bench whose documents nobody has computed."""
    if row.name.partition(":")[0] not in ON_DOCUMENTS:
        return row
    return replace(row, note=_joined(row.note, FAKE))


def _rows(bench: H200Bench, cases: frozenset[str], vllm: VllmSpec | None, tell: Tell) -> Iterator[BenchRow]:
    geometry = check(bench.model)
    yield from _settings(bench, cases, vllm)
    peers = measure_peers(bench, cases, vllm, tell)
    tell("ceilings of this machine")
    yield from (found := Ceilings.measured(bench)).rows
    report = Report(bench, geometry, found.rates, peers)
    if "compile" in cases:
        tell(f"compile: {CASES['compile']}")
        yield from h200_compile.rows(bench, geometry, found.rates)
    if not cases - APART:
        return
    tell("starting the engine")
    with reachable(bench.engine) as (engine, runner):
        if "groups" in cases:
            tell(f"groups: {CASES['groups']}")
            yield from h200_groups.rows(bench, runner, geometry, found.rates)
        ours = Ours(bench, engine)
        if cases & ON_DOCUMENTS:
            tell(f"priming {bench.num_documents} documents")
            prime(bench, ours, runner)
        for case in (name for name in CASES if name in cases - OVER_HTTP - APART - WITHOUT_ENGINE):
            tell(f"{case}: {CASES[case]}")
            yield from report.in_process(case, ours)
        if cases & OVER_HTTP:
            ours.schedule(h200_scheduling.over_http(bench))
            with ClientProcess() as clients, served(engine, on_loss=clients.kill) as url:
                found_there = h200_http.measure(bench, cases, clients, endpoint(url, OUR_MODEL), prime=False, tell=tell)
                yield from (report.row(case, sample) for case, sample in found_there)
        if "steps" in cases:  # last: it overwrites the pool, and a profiler that was there slows what follows
            tell(f"steps: {CASES['steps']}")
            engine.quiesce()
            yield from h200_steps.rows(bench, runner, geometry, found.rates)


def _settings(bench: H200Bench, cases: frozenset[str], vllm: VllmSpec | None) -> Iterator[BenchRow]:
    """What is measured: how steps are put together, vLLM's flags, and why there are no verdicts."""
    yield from h200_scheduling.rows(bench, cases)
    if vllm is not None and cases & OVER_HTTP:
        yield BenchRow(f"vLLM {vllm.version}", math.nan, "", note=" ".join(vllm.arguments))
    if bench.deviations:
        yield BenchRow("no verdicts", math.nan, "", note=f"bars are for other sizes: {', '.join(bench.deviations)}")


def prime(bench: H200Bench, ours: Ours, runner: BenchRunner) -> None:
    """Enter the documents into the cache: computed, or at once over random keys and values."""
    if bench.primed == "real":
        ours.prime()
        return
    runner.fill(bench.seed)
    with runner.without_computing():
        ours.prime()


def measure_peers(
    bench: H200Bench, cases: frozenset[str], vllm: VllmSpec | None, tell: Tell = lambda line: None
) -> Peers:
    """A peer that fails leaves a note, beside what it has reached before: the bench goes on."""
    peers = Peers(notes={} if vllm else {"vLLM": "vLLM: not run, no site given"})
    if bench.transformers and cases & BESIDE_TRANSFORMERS:
        tell("transformers, in a process of its own")
        try:
            times = h200_transformers.measure(bench)
        except P99labError as error:
            peers.notes["transformers"] = str(error)
        else:
            steps = Sample(statistics.median(times.steps_s), len(times.steps_s))
            peers.transformers = {"prefill": Sample(times.prefill_s, 1), "decode-1": steps}
    if vllm is not None and cases & OVER_HTTP:
        tell("starting vLLM")
        try:
            with vllm_server(vllm) as url:
                _measure_vllm(bench, cases, url, peers, tell)
        except P99labError as error:
            peers.notes["vLLM"] = str(error)
    for note in peers.notes.values():
        tell(note)
    return peers


def _measure_vllm(bench: H200Bench, cases: frozenset[str], url: str, peers: Peers, tell: Tell) -> None:
    server = endpoint(url, PEER_MODEL)
    with ClientProcess() as clients:
        found_there = h200_http.measure(
            bench, cases, clients, server, prime=True, tell=lambda line: tell(f"vLLM, {line}")
        )
        for case, sample in found_there:
            peers.vllm[case] = sample
            if sample.failed is not None:
                tell(f"vLLM, {case}: {sample.failed}")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's, as floors need them and as rows."""

    rates: Rates
    rows: tuple[BenchRow, ...]

    @classmethod
    def measured(cls, bench: H200Bench) -> Ceilings:
        on_gpu = bench.device.startswith("cuda")
        with tempfile.TemporaryDirectory() as scratch:
            found = device_ceilings(DEVICE_SIZES) if on_gpu else ceilings(HOST_SIZES, Path(scratch))
        best = {ceiling.name: ceiling.best for ceiling in found}
        memory, multiplied = ("device", "device matmul bf16") if on_gpu else ("memory", "matmul fp32")
        read, copy, product = best[f"{memory} read"], best[f"{memory} copy"], best[multiplied]
        if not read or not copy or not product:
            raise P99labError(f"no ceilings of '{bench.device}': no floors can be given")
        rows = (
            BenchRow(f"{memory} read", read, "GB/s", note="floors' rate" if read >= copy else None),
            BenchRow(f"{memory} copy", copy, "GB/s", note="floors' rate" if read < copy else None),
            BenchRow(multiplied, product / 1e3, "TFLOP/s"),
        )
        return cls(Rates(1e9 * max(read, copy), 1e9 * product), rows)


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of one run: times in milliseconds beside floors, bars and peers."""

    bench: H200Bench
    geometry: Geometry
    rates: Rates
    peers: Peers

    def in_process(self, case: str, ours: Ours) -> Iterator[BenchRow]:
        decodes: dict[str, Callable[[], Steps]] = {
            "decode-1": ours.decode_alone,
            "decode-64": ours.decode_shared,
            "decode-short": ours.decode_apart,
        }
        if case in decodes:
            yield from self._decode(case, decodes[case]())
        elif case == "closed-idle":
            found = h200_closed.measure(self.bench, ours.engine, ours.documents)
            yield from h200_closed.rows(self.bench, found, self._floor_s(case))
        else:
            times = {"questions-64": ours.questions, "prefill": ours.prefill, "warm": ours.warm}[case]()
            yield self.row(case, Sample(statistics.median(times), len(times)))

    def _decode(self, case: str, steps: Steps) -> Iterator[BenchRow]:
        yield self.row(case, Sample(steps.p50_s, steps.n))
        yield BenchRow(f"{case}: P99 of a step", 1e3 * steps.p99_s, "ms", n=steps.n)
        if steps.device_s is not None:
            yield BenchRow(f"{case}: device, a step in the mean", 1e3 * steps.device_s, "ms", n=steps.n)
        yield BenchRow(f"{case}: host, a step", 1e3 * steps.host_s, "ms", n=steps.n)
        replayed = f"{100 * steps.graph_share:.3g} % of steps replayed from a graph"
        yield BenchRow(f"{case}: time without a step", 100 * steps.idle_share, "%", n=steps.n, note=replayed)

    def row(self, case: str, sample: Sample) -> BenchRow:
        """A case's own row."""
        floor, value = 1e3 * self._floor_s(case), 1e3 * sample.time_s
        peer, other, note = self.peers.of(case)
        theirs = None if other is None else 1e3 * other.time_s
        has_value = sample.failed is None
        return BenchRow(
            name=f"{case}: {CASES[case]}",
            value=value,
            unit="ms",
            floor=floor,
            ratio_to_floor=value / floor if has_value else None,
            peer=peer,
            peer_value=theirs,
            ratio_to_peer=theirs / value if has_value and theirs is not None else None,
            n=sample.n,
            bar=self._bar(case),
            note=_joined(sample.failed, sample.note, note),
        )

    def _floor_s(self, case: str) -> float:
        return floor_s(self.geometry, _work(case, self.bench), self.rates, ELEMENT_BYTES[self.bench.dtype])

    def _bar(self, case: str) -> float | None:
        """Milliseconds; only for the scenario that the bars are stated for. One over HTTP is vLLM's own time."""
        if not self.bench.is_stated:
            return None
        if case == "itl-short":
            theirs = self.peers.of(case)[1]
            return None if theirs is None else 1e3 * theirs.time_s
        return BARS_MS.get(case)


def _joined(*notes: str | None) -> str | None:
    return "; ".join(note for note in notes if note) or None


def _work(case: str, bench: H200Bench) -> Work:
    """What a case's step computes; contexts at their mean over the answer."""
    private = bench.question_len + bench.answer_len // 2
    shared = Work.decode_shared(bench.num_requests, bench.num_documents, bench.document_len, private)
    question = Work.questions(1, 1, bench.document_len, bench.question_len)
    apart = Work.decode_apart(bench.num_requests, bench.short_len)
    asked = (bench.num_requests, bench.num_documents, bench.document_len, bench.question_len)
    works = {
        "decode-1": Work.decode_alone(bench.context_len - bench.num_alone_steps // 2),
        "itl-1": Work.decode_alone(bench.document_len + private),
        "decode-64": shared,
        "itl-64": shared,
        "decode-short": apart,
        "itl-short": apart,
        "questions-64": Work.questions(*asked),
        "closed-idle": Work.answers(*asked, bench.closed_answer_len),
        "prefill": Work.prefill(bench.context_len),
        "cold": Work.prefill(bench.context_len),
        "warm": question,
        "ttft-1": question,
    }
    return works[case]
