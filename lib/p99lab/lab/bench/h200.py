"""`p99lab bench h200`: one engine at 128K contexts on one GPU, each figure beside its floor, its bar and its peers.

transformers and vLLM run first, in processes of their own: two engines do not share a device. Cases over HTTP have the
same clients, transport and token ids for vLLM and for us. Floors are arithmetic (`h200_floors`) over ceilings that are
measured in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import check
from p99lab.errors import P99labError
from p99lab.lab.bench import h200_closed, h200_compile, h200_groups, h200_http, h200_transformers
from p99lab.lab.bench.h200_engine import Ours, Steps
from p99lab.lab.bench.h200_floors import ELEMENT_BYTES, Rates, Work, floor_s
from p99lab.lab.bench.h200_http import Sample, Tell
from p99lab.lab.bench.h200_runner import BenchRunner, reachable
from p99lab.lab.bench.h200_sizes import (
    APART,
    BARS_MS,
    BEFORE_DOCUMENTS,
    BESIDE_TRANSFORMERS,
    CASES,
    FAKE,
    ON_DOCUMENTS,
    OVER_HTTP,
    SHORT_TIMES_FLOOR,
    H200Bench,
)
from p99lab.lab.bench.rows import BenchRow
from p99lab.lab.headline_clients import OUR_MODEL, endpoint, served
from p99lab.lab.vllm_server import MODEL as PEER_MODEL
from p99lab.lab.vllm_server import VllmSpec, vllm_server
from p99lab.observe.ceilings import Sizes, ceilings, device_ceilings

DEVICE_SIZES = Sizes(buffer_mib=4096, matmul_size=8192, disk_mib=1, launches=1000, repeats=7)
HOST_SIZES = Sizes(buffer_mib=64, matmul_size=512, disk_mib=1, launches=1, repeats=3)


@dataclass(slots=True)
class Peers:
    """What they reached, by case, and why one reached nothing."""

    transformers: dict[str, Sample] = field(default_factory=dict)
    vllm: Mapping[str, Sample] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # by the peer's name

    def of(self, case: str) -> tuple[str | None, Sample | None, str | None]:
        """The peer that a case is compared with, its figure, and a note where it has none though it was asked for."""
        name = "transformers" if case in BESIDE_TRANSFORMERS else "vLLM" if case in OVER_HTTP else None
        if name is None:
            return None, None, None
        figure = (self.transformers if name == "transformers" else self.vllm).get(case)
        return (name, figure, None) if figure else (None, None, self.notes.get(name))


def rows(
    bench: H200Bench, cases: frozenset[str], vllm: VllmSpec | None, tell: Tell = lambda line: None
) -> Iterator[BenchRow]:
    """Measure and yield each row as soon as it is known.

    Raises:
        ModelError: the model is not there.
        BadParameterError: the device cannot be used.
    """
    geometry = check(bench.model)
    peers = measure_peers(bench, cases, vllm, tell)
    tell("ceilings of this machine")
    yield from (found := _Ceilings.measured(bench)).rows
    report = _Report(bench, geometry, found.rates, peers)
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
        for case in (name for name in CASES if name in cases - OVER_HTTP - APART - BEFORE_DOCUMENTS):
            tell(f"{case}: {CASES[case]}")
            yield from report.in_process(case, ours)
        if cases & OVER_HTTP:
            with served(engine) as url:
                samples = h200_http.measure(bench, cases, endpoint(url, OUR_MODEL), prime=False, tell=tell)
            yield from (report.row(case, sample.p50_s, sample.n) for case, sample in samples.items())


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
    """A peer that fails leaves a note: the bench goes on without it."""
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
                peers.vllm = h200_http.measure(
                    bench, cases, endpoint(url, PEER_MODEL), prime=True, tell=lambda line: tell(f"vLLM, {line}")
                )
        except P99labError as error:
            peers.notes["vLLM"] = str(error)
    for note in peers.notes.values():
        tell(note)
    return peers


@dataclass(frozen=True, slots=True)
class _Ceilings:
    """The machine's, as floors need them and as rows."""

    rates: Rates
    rows: tuple[BenchRow, ...]

    @classmethod
    def measured(cls, bench: H200Bench) -> _Ceilings:
        on_gpu = bench.device.startswith("cuda")
        with tempfile.TemporaryDirectory() as scratch:
            found = device_ceilings(DEVICE_SIZES) if on_gpu else ceilings(HOST_SIZES, Path(scratch))
        best = {ceiling.name: ceiling.best for ceiling in found}
        copied, multiplied = ("device copy", "device matmul bf16") if on_gpu else ("memory copy", "matmul fp32")
        if not (copy := best[copied]) or not (product := best[multiplied]):
            raise P99labError(f"no ceilings of '{bench.device}': no floors can be given")
        return cls(
            Rates(1e9 * copy, 1e9 * product),
            (BenchRow(copied, copy, "GB/s"), BenchRow(multiplied, product / 1e3, "TFLOP/s")),
        )


@dataclass(frozen=True, slots=True)
class _Report:
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
            steps = decodes[case]()
            yield self.row(case, steps.p50_s, steps.n)
            yield BenchRow(f"{case}: P99 of a step", 1e3 * steps.p99_s, "ms", n=steps.n)
            if steps.device_s is not None:
                yield BenchRow(f"{case}: device, a step in the mean", 1e3 * steps.device_s, "ms", n=steps.n)
            yield BenchRow(f"{case}: host, a step", 1e3 * steps.host_s, "ms", n=steps.n)
            yield BenchRow(f"{case}: time without a step", 100 * steps.idle_share, "%", n=steps.n)
        elif case == "closed-idle":
            found = h200_closed.measure(self.bench, ours.engine, ours.documents)
            yield from h200_closed.rows(self.bench, found, self._floor_s(case))
        else:
            times = {"questions-64": ours.questions, "prefill": ours.prefill, "warm": ours.warm}[case]()
            yield self.row(case, statistics.median(times), len(times))

    def row(self, case: str, seconds: float, n: int) -> BenchRow:
        """A case's own row."""
        floor = 1e3 * self._floor_s(case)
        peer, sample, note = self.peers.of(case)
        theirs = None if sample is None else 1e3 * sample.p50_s
        return BenchRow(
            name=f"{case}: {CASES[case]}",
            value=1e3 * seconds,
            unit="ms",
            floor=floor,
            ratio_to_floor=1e3 * seconds / floor,
            peer=peer,
            peer_value=theirs,
            ratio_to_peer=None if theirs is None else theirs / (1e3 * seconds),
            n=n,
            bar=self._bar(case, floor),
            note=note or (FAKE if self.bench.primed == "fake" and case in ON_DOCUMENTS else None),
        )

    def _floor_s(self, case: str) -> float:
        return floor_s(self.geometry, _work(case, self.bench), self.rates, ELEMENT_BYTES[self.bench.dtype])

    def _bar(self, case: str, floor: float) -> float | None:
        """Milliseconds; only for the sizes that the bars are stated for."""
        if not self.bench.is_stated:
            return None
        theirs = self.peers.vllm.get("itl-short")
        if case == "decode-short":
            return min(SHORT_TIMES_FLOOR * floor, float("inf") if theirs is None else 1e3 * theirs.p50_s)
        return BARS_MS.get(case)


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
