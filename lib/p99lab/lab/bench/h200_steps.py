"""`steps` of `p99lab bench h200`: steps as the headline's loads have them, measured, predicted, and taken apart.

Like those of `groups` they are made by hand and run by the engine's own runner over a pool of random values. Their
shapes are what the scheduler puts together on an H200. A step's bound is kept by predicted times; where a kind of step
takes longer than predicted, its bound is not kept, and the kernels' own times say where that comes from.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from torch.profiler import ProfilerActivity, profile

from p99lab.engine.costs import StepCost
from p99lab.engine.geometry import Geometry
from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import SamplingParams
from p99lab.lab.bench.h200_floors import ELEMENT_BYTES, Rates, Work, floor_s
from p99lab.lab.bench.h200_groups import arranged, costs_on, step_seconds
from p99lab.lab.bench.h200_runner import BenchRunner
from p99lab.lab.bench.h200_sizes import H200Bench
from p99lab.lab.bench.rows import BenchRow

NUM_PROFILED = 5
WARMUP_CELLS, MEASURED_CELLS = 4, 8  # of `group_cell_s` each: seconds, so that the device is at its power limit
KINDS: Mapping[str, str] = MappingProxyType(  # the first that a kernel's name matches
    {
        "attention, computed": r"PrefillWithKVCache",
        "attention, read": r"_attend_decode_spans",
        "attention, merged": r"_finish_states|_merge_states|_gather_folded",
        "norms, rotation, gates": r"_add_rms_norm|_rotate_and_store|_silu_and_multiply",
        "products": r"gemm|nvjet|cutlass|splitK|^_tile|^_stream",
        "the rest": r"",
    }
)


@dataclass(frozen=True, slots=True)
class LoadStep:
    """A step over documents, of rows that decode and of questions, and perhaps of a prompt in chunks.

    `decoding`: how many rows do on each document. `asked`: the tokens of the questions on each. `chunk`: tokens of a
    document that is being read, and what share of it has been.
    """

    name: str
    decoding: tuple[int, ...]
    asked: tuple[tuple[int, ...], ...]
    chunk: tuple[int, float] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.decoding) + sum(map(sum, self.asked)) + (self.chunk[0] if self.chunk else 0)


MOST_CHUNK = 512  # tokens
NOBODY: tuple[tuple[int, ...], ...] = ((), (), (), ())
STEPS = (
    LoadStep("decode alone", (13, 13, 13, 13), NOBODY),
    LoadStep("closed load", (8, 10, 12, 13), ((24,), (29, 57), (52,), (19,))),
    LoadStep("half load", (2, 3, 3, 6), ((), (), (62,), ())),
    LoadStep("churn, a quarter read", (5, 6, 6, 8), ((27,), (7,), (26,), ()), (288, 0.25)),
    LoadStep("churn, half read", (5, 6, 6, 8), ((27,), (7,), (26,), ()), (192, 0.5)),
    LoadStep("churn, three quarters read", (5, 6, 6, 8), ((27,), (7,), (26,), ()), (128, 0.75)),
    LoadStep("churn, questions first", (4, 6, 6, 7), ((49, 11), (38,), (38, 20), ()), (32, 0.5)),
)


class Layout:
    """Where the steps' rows have their pages: documents from page 0 on, then what each row has of its own.

    A document is as many tokens as fill its pages. `private_len`: tokens that a row which decodes has behind it.
    """

    def __init__(self, document_len: int, private_len: int, page_size: int) -> None:
        self.page_size = page_size
        self._document_pages = document_len // page_size
        self._private_len = private_len
        self._own_pages = -(-(private_len + 1) // page_size) + 1
        self._chunk_pages = -(-MOST_CHUNK // page_size)

    def rows(self, step: LoadStep) -> list[Row]:
        """Its rows, a document's side by side; the prompt in chunks is the last."""
        rows: list[Row] = []
        for document, (num_decoding, asked) in enumerate(zip(step.decoding, step.asked, strict=True)):
            for num_tokens, num_private in [(1, self._private_len)] * num_decoding + [(size, 0) for size in asked]:
                rows.append(self._row(len(rows), step, document, num_tokens, num_private))
        if step.chunk is not None:
            num_tokens, share = step.chunk
            num_read = int(share * self._document_pages)
            first = len(step.decoding) * self._document_pages
            pages = np.arange(first, first + num_read + -(-num_tokens // self.page_size), dtype=np.int32)
            rows.append(_row(len(rows), num_tokens, num_read * self.page_size, pages))
        return rows

    def num_pages(self, step: LoadStep) -> int:
        """Of a pool that holds the step: it never reads a page beyond."""
        return max(int(row.page_table.max()) for row in self.rows(step)) + 1

    def work(self, step: LoadStep) -> Work:
        rows = self.rows(step)
        lengths = np.array([len(row.token_ids) for row in rows])
        known = np.array([row.num_computed_tokens for row in rows])
        pages = np.concatenate([row.page_table[: row.num_computed_tokens // self.page_size] for row in rows])
        return Work(
            num_tokens=step.num_tokens,
            num_sampled=len(rows),
            num_kv_tokens=len(np.unique(pages)) * self.page_size,
            num_pairs=int((lengths * known + lengths * (lengths + 1) // 2).sum()),
        )

    def _row(self, index: int, step: LoadStep, document: int, num_tokens: int, num_private: int) -> Row:
        own = (len(step.decoding) + 1) * self._document_pages + self._chunk_pages + index * self._own_pages
        pages = [
            np.arange(document * self._document_pages, (document + 1) * self._document_pages),
            np.arange(own, own + -(-(num_private + num_tokens) // self.page_size)),
        ]
        known = self._document_pages * self.page_size + num_private
        return _row(index, num_tokens, known, np.concatenate(pages).astype(np.int32))


def rows(
    bench: H200Bench, runner: BenchRunner, geometry: Geometry, rates: Rates, steps: Sequence[LoadStep] = STEPS
) -> Iterator[BenchRow]:
    """A row a step; then, as details, what each kind of kernel takes. Profiling comes last: it slows what follows."""
    pool = runner.pool
    runner.fill(bench.seed)
    costs = costs_on(runner, geometry)
    layout = Layout(bench.document_len, bench.question_len + bench.closed_answer_len // 2, pool.page_size)
    plans: dict[str, StepPlan] = {}
    for step in steps:
        if (num_pages := layout.num_pages(step)) > pool.k.shape[1]:
            note = f"not measured: {num_pages} pages, and the pool has {pool.k.shape[1]}"
            yield BenchRow(f"steps: {step.name}", math.nan, "ms", note=note)
            continue
        plan = plans[step.name] = arranged(layout.rows(step), pool.page_size, costs)
        seconds = step_times(runner, plan, WARMUP_CELLS * bench.group_cell_s, MEASURED_CELLS * bench.group_cell_s)
        floor = floor_s(geometry, layout.work(step), rates, ELEMENT_BYTES[bench.dtype])
        yield _shown(step, seconds, floor, _predicted(costs, plan, geometry.num_layers))
    if pool.k.device.type == "cuda":
        for name, plan in plans.items():
            yield from _taken_apart(name, runner, plan)


def step_times(runner: BenchRunner, plan: StepPlan, warmup_s: float, seconds: float) -> list[float]:
    """Of like steps back to back for so long, three at least, after others that warm the device up."""
    first_s = max(step_seconds(runner, [plan] * 2))
    num_warmup, num_steps = (max(least, int(length / first_s)) for least, length in ((1, warmup_s), (3, seconds)))
    return list(step_seconds(runner, [plan] * (num_warmup + num_steps)))[num_warmup:]


def kernel_times(runner: BenchRunner, plan: StepPlan) -> dict[str, float]:
    """Seconds of a step's kernels by kind; kernels that run side by side count once each."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in step_seconds(runner, [plan] * NUM_PROFILED):
            pass
    found = dict.fromkeys(KINDS, 0.0)
    for event in profiled.key_averages():
        found[kind_of(event.key)] += event.self_device_time_total / 1e6 / NUM_PROFILED
    return found


def _taken_apart(name: str, runner: BenchRunner, plan: StepPlan) -> Iterator[BenchRow]:
    kinds = kernel_times(runner, plan)
    whole_s = sum(kinds.values())
    if not whole_s:
        yield BenchRow(f"steps: {name}: kernels", math.nan, "ms", note="the profiler sees none here", detail=True)
        return
    yield BenchRow(f"steps: {name}: all kernels, profiled", 1e3 * whole_s, "ms", n=NUM_PROFILED, detail=True)
    for kind, kind_s in kinds.items():
        yield BenchRow(f"steps: {name}: {kind}", 1e3 * kind_s, "ms", n=NUM_PROFILED, detail=True)


def kind_of(kernel: str) -> str:
    """Which of KINDS a kernel is, by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel))


def _predicted(costs: StepCost | None, plan: StepPlan, num_layers: int) -> tuple[float, float] | None:
    """Seconds of the step, and of its attention over what was computed before."""
    if costs is None:
        return None
    return costs.step_time_s(plan.rows, plan.groups), num_layers * costs.attention_of_s(plan.rows, plan.groups)


def _shown(step: LoadStep, seconds: Sequence[float], floor: float, predicted: tuple[float, float] | None) -> BenchRow:
    value, note = statistics.median(seconds), f"{step.num_tokens} tokens"
    if predicted is not None:
        whole_s, attention_s = predicted
        note += f"; predicted {1e3 * whole_s:.4g} ms, {1e3 * attention_s:.4g} of it attention"
    return BenchRow(
        f"steps: {step.name}", 1e3 * value, "ms", 1e3 * floor, value / floor, n=len(seconds), note=note
    )  # fmt: skip


def _row(index: int, num_tokens: int, num_computed: int, pages: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Row:
    ids = np.full(num_tokens, 1 + index % 7, np.int32)
    return Row(f"row-{index}", index, ids, num_computed, pages, True, SamplingParams(), 0)
