"""The cases of `p99lab bench h200` that need no transport: this engine, stepped by the caller's own thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from p99lab.engine.config import SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.errors import AccountingError
from p99lab.lab.bench.h200_sizes import H200Bench
from p99lab.probe.documents import Document
from p99lab.probe.workload import ClosedLoad, Workload, make_documents, queries

ANY_LOAD = ClosedLoad(num_requests=1)  # closed: queries have no times


@dataclass(frozen=True, slots=True)
class Steps:
    """Many like steps. A step lasts from its launch, or the end of the one before it where that came later, to its end.

    `device_s`: one of them in the mean by the device's own clock, None where it has none. `host_s`: what the host did
    for one, waiting apart. `idle_share`: of the time, that in which the device (else the engine) had no step.
    `graph_share`: of the steps, those replayed from a graph.
    """

    p50_s: float
    p99_s: float
    n: int
    device_s: float | None
    host_s: float
    idle_share: float
    graph_share: float


class Ours:
    """An engine whose documents are primed. Each case leaves the cache as it found it, and begins the counters anew."""

    def __init__(self, bench: H200Bench, engine: Engine) -> None:
        self._bench = bench
        self.engine = engine
        self._documents: tuple[Document, ...] = ()
        self._num_asked = 0

    @property
    def documents(self) -> tuple[Document, ...]:
        """Those that are primed."""
        return self._documents

    def prime(self) -> None:
        self._documents = make_documents(self._bench.shared)
        for document in self._documents:
            self._generate([_ids(document)], 1)

    def schedule(self, scheduler: SchedulerConfig) -> None:
        """Put steps together so from now on."""
        self._begin(scheduler)

    def decode_alone(self) -> Steps:
        """One request whose last token fills the context."""
        known = _ids(self._documents[0])[: self._bench.context_len - self._bench.num_alone_steps]
        return self._steps([known], self._bench.num_alone_steps)

    def decode_shared(self) -> Steps:
        return self._steps(self._questions(self._bench.num_requests), self._bench.answer_len)

    def decode_apart(self) -> Steps:
        return self._steps(self._asked(self._bench.short, self._bench.num_requests), self._bench.answer_len)

    def questions(self) -> list[float]:
        """Seconds of the steps that answer one question per request with its first token, repeat by repeat.

        As the engine counts its steps: the first launch is in it, which the device's own clock leaves out.
        """
        seconds = []
        for _ in range(self._bench.repeats + 1):
            prompts = self._questions(self._bench.num_requests)
            self._begin()
            self._generate(prompts, 1)
            seconds.append(self.engine.stats().busy_s)
        return seconds[1:]  # the first warms up

    def prefill(self) -> list[float]:
        """TTFT of prompts of the whole context, less the one token that the engine keeps room for."""
        rng = np.random.default_rng([self._bench.seed, 7])
        size = self._bench.context_len - 1
        seconds = []
        for _ in range(self._bench.num_prefills):
            self._begin()
            prompt = rng.integers(0, self._bench.vocab_size, size, dtype=np.int32)
            seconds.append(_ttft_s(*self._generate([prompt], 1)))
        return seconds

    def warm(self) -> list[float]:
        """TTFT of one question at a time on a known document."""
        prompts = self._questions(self._bench.num_questions + 1)
        self._begin()
        return [_ttft_s(*self._generate([prompt], 1)) for prompt in prompts][1:]

    def _steps(self, prompts: Sequence[IntArray], num_tokens: int) -> Steps:
        """The steps of decoding these prompts; their prefill is among them, and too few to move a median."""
        self._begin()
        began_s = time.perf_counter()
        self._generate(prompts, num_tokens)
        return steps(self.engine, time.perf_counter() - began_s)

    def _begin(self, scheduler: SchedulerConfig | None = None) -> None:
        self.engine.quiesce()
        self.engine.reconfigure(scheduler=scheduler)
        self.engine.forget_except([_ids(document) for document in self._documents])

    def _generate(self, prompts: Sequence[IntArray], num_tokens: int) -> list[Completion]:
        return self.engine.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))

    def _questions(self, count: int) -> list[IntArray]:
        """Questions that were not asked before, evenly over the documents."""
        tails = [prompt[self._bench.document_len :] for prompt in self._asked(self._bench.shared, count)]
        heads = [_ids(self._documents[place % len(self._documents)]) for place in range(count)]
        return [np.concatenate(pair) for pair in zip(heads, tails, strict=True)]

    def _asked(self, workload: Workload, count: int) -> list[IntArray]:
        """The workload's next prompts."""
        documents = self._documents if workload == self._bench.shared else make_documents(workload)
        endless = queries(workload, documents, ANY_LOAD, first=self._num_asked)
        self._num_asked += count
        return [_known(query.prompt.token_ids) for query in islice(endless, count)]


def steps(engine: Engine, wall_s: float) -> Steps:
    """What an engine says of its steps since its counters began, and what of `wall_s` had none."""
    stats = engine.stats()
    if stats.step_p50_s is None or stats.step_p99_s is None:
        raise AccountingError("no step was run")
    return Steps(
        p50_s=stats.step_p50_s,
        p99_s=stats.step_p99_s,
        n=stats.num_steps,
        device_s=stats.device_s / stats.num_steps or None,
        host_s=(stats.schedule_s + stats.launch_s + stats.update_s) / stats.num_steps,
        idle_share=max(0.0, 1.0 - (stats.device_s or stats.busy_s) / wall_s),
        graph_share=stats.graph_share,
    )


def _ttft_s(completion: Completion) -> float:
    if completion.usage is None or completion.usage.timeline.first_token_s is None:
        raise AccountingError("a completion without its first token")
    return completion.usage.timeline.first_token_s - completion.usage.timeline.arrival_s


def _ids(document: Document) -> IntArray:
    return _known(document.passage.token_ids)


def _known(token_ids: IntArray | None) -> IntArray:
    if token_ids is None:
        raise AccountingError("a synthetic passage without token ids")
    return token_ids
