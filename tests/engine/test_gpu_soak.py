"""Ten thousand random steps on a GPU, and what is left when memory runs out.

`pytest -m gpu tests/engine/test_gpu_soak.py` on a Hopper GPU, with FlashInfer, graphs and overlap. On the CPU the same
with the reference backend and fewer steps.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from p99lab.engine.config import GroupingConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import page_bytes
from p99lab.engine.model import LlamaModel
from p99lab.engine.request import FinishReason, Request, SamplingParams
from p99lab.engine.scheduler import RequestTooLargeError
from p99lab.errors import BadParameterError, EngineFailedError, QueueFullError
from tests.engine.gpu_cases import (
    MAX_NUM_SEQS,
    MAX_POSITIONS,
    NUM_TOP,
    RIGS,
    VOCAB,
    Asked,
    Model,
    Models,
    Prompt,
    Session,
    Watched,
    Writer,
    drawn,
    greedy,
    watched,
)

NUM_STEPS = {"cpu": 300, "cuda": 10_000}
CHECK_EVERY = 50  # steps
PAGE_SIZE, NUM_PAGES = 16, 30  # two of the longest requests
MAX_NEW_TOKENS = 60
NUM_JUDGED = 60  # answers of every tenth of the soak

LISTS_BYTES = 64 << 10  # what the latest step leaves: the index arrays of its attention, and no two steps' are alike
SETTLED_BYTES = 32 << 20  # cuBLAS keeps a workspace for each stream that has ever been used
LARGE_POOL = 8192  # pages, 128 MiB: not to be overlooked


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=RIGS)
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    return models.get(request.param)


def allocated_bytes(device: str) -> int:
    """Of tensors that are still alive; on the CPU of those that Python knows of."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    tensors = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor)
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Caller:
    """Does anything to an engine that its users may do, at random."""

    def __init__(self, engine: Engine, runner: Watched, seed: int) -> None:
        self.engine, self.runner = engine, runner
        self.rng = np.random.default_rng(seed)
        self.session = Session(engine)
        self.cancelled: set[str] = set()
        self.num_steps = 0
        self.happened: Counter[str] = Counter()
        self.documents = [Writer(PAGE_SIZE, None, seed).extend([], num_pages) for num_pages in (1, 2, 4, 6)]
        operations: dict[Callable[[], object], int] = {
            self.step: 700,
            self.add: 400,
            self.cancel: 40,
            self.ask_too_much: 10,
            self.storm: 10,
            self.drain: 10,
            self.forget: 4,
        }
        self.operations, weights = [*operations], np.array([*operations.values()])
        self.odds = weights / weights.sum()

    def run(self, num_steps: int) -> None:
        """Until so many steps more have been launched."""
        last = self.num_steps + num_steps
        while self.num_steps < last:
            self.operations[self.rng.choice(len(self.operations), p=self.odds)]()

    def step(self) -> None:
        assert self.engine.step() == []
        launched, self.runner.plans = self.runner.plans, []
        for plan in launched:
            self.num_steps += 1
            self.happened["replayed"] += plan.epoch in self.runner.replayed
            self.happened["followed"] += any(row.follows is not None for row in plan.rows)
            self.happened["grouped"] += bool(plan.groups)
            if self.num_steps % CHECK_EVERY == 0:
                self.engine.check()
        self.runner.replayed.clear()

    def add(self) -> None:
        try:
            self.session.add(self._prompt(), self._sampling())
        except QueueFullError:
            self.happened["queue full"] += 1

    def cancel(self) -> None:
        live = self._live()
        if live:
            self._cancel(live[self.rng.integers(len(live))])

    def storm(self) -> None:
        """Many requests at once, a few steps, and all that live are cancelled."""
        for _ in range(30):
            self.add()
        for _ in range(self.rng.integers(4)):
            self.step()
        live = self._live()
        for at in self.rng.permutation(len(live)):
            self._cancel(live[at])
        self.engine.check()
        self.happened["storms"] += 1

    def ask_too_much(self) -> None:
        num_waiting = self.engine.stats().num_waiting
        with pytest.raises(RequestTooLargeError, match=r"^request '.*' needs \d+ pages of 16 tokens, the pool has 30$"):
            self.engine.add([1] * (NUM_PAGES * PAGE_SIZE), SamplingParams(max_tokens=2))
        assert self.engine.stats().num_waiting == num_waiting
        self.happened["too large"] += 1

    def drain(self) -> None:
        """Step until nothing is left, and go on in another way."""
        while self.engine.has_work:
            self.step()
        rng = self.rng
        self.happened["preemptions"] += self.engine.stats().num_preemptions
        scheduler = SchedulerConfig(
            composition="stock" if rng.random() < 0.2 else "chunked",
            policy=("fcfs", "priority", "deadline")[rng.integers(3)],
            max_num_batched_tokens=int(rng.choice([7, 64, 64, 200])),
            max_num_seqs=3 if rng.random() < 0.2 else MAX_NUM_SEQS,
            max_num_waiting=None if rng.random() < 0.7 else 10,
            overlap=bool(rng.random() < 0.8),
            reserve_tokens=0 if rng.random() < 0.7 else 256,
        )
        grouping = GroupingConfig(
            enabled=bool(rng.random() < 0.9),
            decide_by="length" if rng.random() < 0.7 else "cost",
            min_shared_tokens=int(rng.choice([1, 40])),
        )
        self.engine.reconfigure(scheduler, grouping, prefix_cache=bool(rng.random() < 0.9))
        self.happened["reconfigured"] += 1

    def forget(self) -> None:
        self.engine.forget_except([np.array(self.documents[2], np.int32)] if self.rng.random() < 0.5 else [])

    def quiesce(self) -> None:
        """Cancel what is left, through the engine, and prove that nothing is."""
        self.cancelled |= {one.answer.request_id for one in self._live()}
        self.engine.quiesce()
        assert not self.engine.has_work
        assert self.engine.stats().num_active_pages == 0

    def answers(self) -> list[Asked]:
        """Everything asked since the last call; all of it has ended, each as it should."""
        asked, self.session.asked = self.session.asked, []
        for one in asked:
            _check_end(one, one.answer.request_id in self.cancelled)
            self.happened[str(one.answer.finish_reason)] += 1
        self.cancelled.clear()
        return asked

    def _live(self) -> list[Asked]:
        return [one for one in self.session.asked if one.answer.finish_reason is None]

    def _cancel(self, victim: Asked) -> None:
        assert self.engine.cancel(victim.answer.request_id)
        self.cancelled.add(victim.answer.request_id)

    def _prompt(self) -> Prompt:
        rng = self.rng
        document = self.documents[rng.integers(len(self.documents))]
        begun = document[: len(document) if rng.random() < 0.8 else rng.integers(len(document))]
        return begun + rng.integers(0, VOCAB, rng.integers(1, 60 if rng.random() < 0.2 else 10)).tolist()

    def _sampling(self) -> SamplingParams:
        rng = self.rng
        num_tokens = int(rng.integers(1, MAX_NEW_TOKENS + 1))
        sampling = greedy(num_tokens) if rng.random() < 0.6 else drawn(num_tokens, int(rng.integers(1000)))
        return replace(
            sampling,
            stop_token_ids=tuple(rng.integers(0, VOCAB, 8).tolist()) if rng.random() < 0.3 else (),
            ignore_eos=bool(rng.random() < 0.5),
            prompt_logprobs=NUM_TOP if rng.random() < 0.05 else None,
        )


def _check_end(one: Asked, was_cancelled: bool) -> None:
    token_ids, sampling = one.answer.token_ids, one.sampling
    stops = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else [VOCAB - 1])}
    at_stop = [at for at, token_id in enumerate(token_ids) if token_id in stops]
    if was_cancelled:
        assert one.answer.finish_reason is FinishReason.CANCELLED
        assert not at_stop
        assert len(token_ids) < sampling.max_tokens
    elif at_stop:
        assert one.answer.finish_reason is FinishReason.STOP
        assert at_stop == [len(token_ids) - 1]
    else:
        assert one.answer.finish_reason is FinishReason.LENGTH
        assert len(token_ids) == sampling.max_tokens


def test_thousands_of_random_steps(model: Model) -> None:
    """Accounts add up, answers are right to the last, and neither device nor host memory grows after a tenth of it.

    Memory is compared between moments at which no request is left and no step runs.
    """
    num_steps = NUM_STEPS[model.device]
    config = model.config(page_size=PAGE_SIZE, num_pages=NUM_PAGES, chunk=MAX_POSITIONS, graphs=64)
    with watched(config) as (engine, runner):
        caller = Caller(engine, runner, seed=8)
        engine.reconfigure(model.config().scheduler)  # steps may have fewer tokens than at the start, never more
        bytes_after, requests_after = [], []
        for _ in range(10):
            caller.run(num_steps // 10)
            caller.quiesce()
            answered = [one for one in caller.answers() if one.answer.token_ids]
            model.judge.check(answered[-NUM_JUDGED:])
            del answered
            bytes_after.append(allocated_bytes(model.device))
            requests_after.append(sum(type(thing) is Request for thing in gc.get_objects()))
        engine.check()
        happened = caller.happened + Counter(preemptions=engine.stats().num_preemptions)
    assert max(bytes_after) - min(bytes_after) <= LISTS_BYTES
    assert max(requests_after) - min(requests_after) <= MAX_NUM_SEQS  # those of the latest step are still named
    assert caller.num_steps >= num_steps
    assert happened["followed"] > num_steps // 4
    assert happened["grouped"] > num_steps // 10
    for event in ("preemptions", "storms", "reconfigured", "too large", "stop", "length", "cancelled"):
        assert happened[event] > 0, event
    if model.device == "cuda":
        assert happened["queue full"] > 0
        assert happened["preemptions"] > 100
        assert happened["replayed"] > num_steps // 4


TOO_LARGE = [
    pytest.param("cpu", 50.0, id="cpu"),
    pytest.param("cuda", 50.0, id="nothing fits", marks=pytest.mark.gpu),
    pytest.param("cuda", 0.7, id="keys fit", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "share"), TOO_LARGE)
def test_a_pool_that_is_too_large_is_refused_at_once_and_leaves_nothing_behind(
    models: Models, device: str, share: float
) -> None:
    """`share`: of the free memory, that keys alone would take; values as much again."""
    model = models.get(device)
    _use(model)
    before = allocated_bytes(device)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().total
    num_pages = int(2 * share * free / _pool_bytes(model, 1))
    with pytest.raises(
        BadParameterError, match=rf"^a pool of {num_pages} pages takes [\d.]+ GiB, more than '{device}' has$"
    ):
        Engine(model.config(num_pages=num_pages))
    assert allocated_bytes(device) - before <= LISTS_BYTES
    _use(model)


def test_a_step_that_runs_out_of_memory_ends_the_engine_and_gives_up_its_memory(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(model)
    before = allocated_bytes(model.device)
    writer = Writer(PAGE_SIZE, None)
    engine = Engine(model.config(num_pages=LARGE_POOL))
    assert allocated_bytes(model.device) - before >= _pool_bytes(model, LARGE_POOL)
    session = Session(engine)
    for _ in range(3):
        session.add(writer.extend([], 1), greedy(30))
    for _ in range(6):
        engine.step()
    _fail_long_steps(monkeypatch)
    session.add(writer.extend([], 4), greedy(30))  # more tokens than a graph has room for
    with pytest.raises(torch.OutOfMemoryError):
        _finish(engine)
    monkeypatch.undo()
    assert [one.answer.finish_reason for one in session.asked] == [FinishReason.ERROR] * 4
    assert all(one.answer.usage is not None for one in session.asked)
    assert not engine.has_work
    for call in (engine.step, engine.check, engine.quiesce, lambda: engine.add([1]), lambda: engine.generate([[1]])):
        with pytest.raises(EngineFailedError, match=r"^this engine has failed.*OutOfMemoryError"):
            call()
    assert allocated_bytes(model.device) - before <= SETTLED_BYTES  # though the engine is still named
    _use(model)
    engine.close()


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _fail_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than 20 tokens run out of memory."""
    forward = LlamaModel.forward

    def failing(self: LlamaModel, token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        if len(token_ids) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return forward(self, token_ids, *args)

    monkeypatch.setattr(LlamaModel, "forward", failing)


def _use(model: Model) -> None:
    """Make an engine, have it answer rightly, close it."""
    with Engine(model.config()) as engine:
        session = Session(engine)
        session.generate(Writer(PAGE_SIZE, None).load("one").questions, greedy(12))
    model.judge.check(session.asked)


def _pool_bytes(model: Model, num_pages: int) -> int:
    return num_pages * page_bytes(Geometry.from_directory(model.directory), PAGE_SIZE, torch.bfloat16)
