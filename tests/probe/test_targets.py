from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from p99lab.engine.events import TokenEvent, Usage
from p99lab.engine.request import FinishReason, Timeline
from p99lab.probe.documents import Passage
from p99lab.probe.load import drive
from p99lab.probe.records import Outcome
from p99lab.probe.targets import InProcessTarget, shared_interpreter
from p99lab.probe.workload import ClosedLoad, Query

pytestmark = pytest.mark.light


def asked(count: int) -> list[Query]:
    return [Query(i, 0, Passage.of("a text", [1, 2, 3]), 2, max_tokens=3, ignore_eos=True) for i in range(count)]


class FakeEngine:
    """Streams three tokens per request; remembers what it was asked and who left early."""

    tokenizer = None

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.num_closed = 0

    async def stream(self, prompt: Any, sampling: Any = None, **options: Any) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append((prompt, sampling))
        try:
            for number in range(sampling.max_tokens):
                await asyncio.sleep(0)
                last = number + 1 == sampling.max_tokens
                bill = Usage(len(prompt), 2, number + 1, Timeline(0.0, queue_s=0.25)) if last else None
                yield TokenEvent("r", number, "", 0.0, None, FinishReason.LENGTH if last else None, bill)
        finally:
            self.num_closed += 1

    def stats(self) -> Any:
        class Stats:
            def as_dict(self) -> dict[str, Any]:
                return {"num_queried_tokens": 30, "num_cached_tokens": 20, "busy_s": 0.5}

        return Stats()


def test_an_engine_in_process_is_a_target() -> None:
    engine = FakeEngine()
    load = ClosedLoad(concurrency=1, num_requests=2, warmup_share=0)
    run = asyncio.run(drive(InProcessTarget(engine), load, iter(asked(2))))
    record = run.records[0]
    assert (record.outcome, record.num_output_tokens, record.num_cached_tokens) == (Outcome.OK, 3, 2)
    assert record.queue_s == 0.25
    assert len(record.token_times_s) == 3
    assert run.counters_after == {"num_queried_tokens": 30, "num_cached_tokens": 20}
    prompt, sampling = engine.asked[0]
    assert np.array_equal(prompt, [1, 2, 3])
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (3, True, 0.0)


def test_a_client_that_leaves_cancels_its_request() -> None:
    engine = FakeEngine()

    async def main() -> None:
        chunks = InProcessTarget(engine).send(asked(1)[0])
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(main())
    assert engine.num_closed == 1


def test_priming_sends_each_document_once() -> None:
    from p99lab.probe.documents import synthetic_documents

    engine = FakeEngine()
    documents = [document for document, _ in zip(synthetic_documents(0, (5, 9), 97), range(3), strict=False)]
    asyncio.run(InProcessTarget(engine).prime(documents))
    assert [len(prompt) for prompt, _ in engine.asked] == [d.passage.num_tokens for d in documents]
    assert {sampling.max_tokens for _, sampling in engine.asked} == {1}


def test_sharing_the_interpreter_is_undone() -> None:
    before = sys.getswitchinterval()
    with shared_interpreter():
        assert sys.getswitchinterval() < 0.001
    assert sys.getswitchinterval() == before
