"""Which attention runs a step, and whether graphs do, chosen at the start and again over the same cached pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch

from p99lab.engine import backends, checkpoint
from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.attention.spans import SegmentTokens, Split, plan_spans
from p99lab.engine.backends import Attentions, rehearse
from p99lab.engine.config import AttentionConfig, EngineConfig, GraphsConfig, ModelConfig, SchedulerConfig
from p99lab.engine.costs import H200, SEGMENT_COUNTS, StepCost
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.geometry import Geometry
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.model import LlamaModel
from p99lab.engine.plan import StepPath, StepPlan, StepResult
from p99lab.engine.request import SamplingParams
from p99lab.engine.runner import ModelRunner
from p99lab.engine.weights import Weights
from p99lab.errors import BadParameterError, ModelError

PROMPT = list(range(1, 40))
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=0)
ON, OFF = GraphsConfig(), GraphsConfig(enabled=False)
SPANS, PAGED = AttentionConfig(), AttentionConfig(kernels="paged")


class Counted(ReferenceAttention):
    num_steps = 0

    def plan(self, step: StepPlan) -> StepPath:
        self.num_steps += 1
        return super().plan(step)


@dataclass
class NoneFits:
    """Graphs of which none has a step's shape."""

    attention: Counted
    num_asked: int = 0

    def prepare(self, plan: StepPlan, *args: Any) -> StepPath:
        self.num_asked += 1
        return self.attention.plan(plan)


@dataclass
class Runners:
    """Makes runners with two attentions and graphs for the first, and remembers their parts."""

    spans: list[Counted] = field(default_factory=list)
    paged: list[Counted] = field(default_factory=list)
    graphs: list[NoneFits] = field(default_factory=list)

    def __call__(self, config: EngineConfig, weights: Weights, pool: KVPool, costs: StepCost | None) -> ModelRunner:
        spans, paged = Counted(pool), Counted(pool)
        self.spans.append(spans)
        self.paged.append(paged)
        self.graphs.append(NoneFits(spans))
        sampled = torch.zeros(64, dtype=torch.int64)
        graphs: Any = self.graphs[0]
        return ModelRunner(
            LlamaModel(weights), pool, spans, 0, sampled, graphs, lambda c: paged if c.kernels == "paged" else spans
        )


def _answer(engine: Engine) -> list[int]:
    return list(engine.generate([PROMPT], GREEDY)[0].token_ids)


def test_steps_run_by_the_attention_and_the_graphs_last_configured(config: EngineConfig) -> None:
    runners = Runners()
    with Engine(config, new_runner=runners) as engine:
        (spans,), (paged,), (graphs,) = runners.spans, runners.paged, runners.graphs

        def counts() -> tuple[int, int, int]:
            before = (spans.num_steps, paged.num_steps, graphs.num_asked)
            answers.append(_answer(engine))
            after = (spans.num_steps, paged.num_steps, graphs.num_asked)
            return tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[return-value]

        answers: list[list[int]] = []
        num = counts()[0]
        assert num > 0
        assert counts() == (num, 0, num)
        engine.reconfigure(graphs=OFF)
        assert counts() == (num, 0, 0)
        engine.reconfigure(attention=PAGED)
        assert counts() == (0, num, 0)
        with pytest.raises(BadParameterError, match="none were captured for this attention"):
            engine.reconfigure(graphs=ON)
        assert engine.config.graphs == OFF
        assert counts() == (0, num, 0)
        engine.reconfigure(attention=SPANS, graphs=ON)
        assert counts() == (num, 0, num)
        engine.reconfigure(attention=PAGED)  # graphs are still wanted, for steps that have some
        assert counts() == (0, num, 0)
        engine.reconfigure(attention=SPANS)
        assert counts() == (num, 0, num)
        assert len({tuple(answer) for answer in answers}) == 1


def test_what_a_cpu_has_not_is_refused_and_nothing_changes(engine: Engine) -> None:
    answer, before = _answer(engine), engine.config
    for refused, why in (
        ({"graphs": ON}, "none were captured"),
        ({"graphs": GraphsConfig(enabled=False, max_num_tokens=7)}, "'max_num_tokens' is fixed"),
        ({"attention": AttentionConfig(backend="flashinfer", kernels="paged")}, "'flashinfer': it needs a GPU"),
        ({"attention": PAGED, "graphs": ON, "prefix_cache": False}, "none were captured"),
    ):
        with pytest.raises(BadParameterError, match=why):
            engine.reconfigure(**refused)  # type: ignore[arg-type]
        assert engine.config == before
    engine.reconfigure(attention=PAGED, graphs=OFF, prefix_cache=True)
    assert (engine.config.attention, engine.config.graphs) == (PAGED, OFF)
    assert _answer(engine) == answer


def test_a_bound_on_steps_that_nobody_has_measured_is_refused_and_nothing_changes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p99lab.engine.engine.device_costs", lambda name: None)
    runners = Runners()
    with Engine(config, new_runner=runners) as engine:
        before = engine.config
        with pytest.raises(BadParameterError, match="step times have not been measured"):
            engine.reconfigure(SchedulerConfig(max_step_s=0.1), attention=PAGED, prefix_cache=False)
        assert engine.config == before
        _answer(engine)
        _answer(engine)
        assert engine.stats().num_cached_tokens > 0
    assert runners.paged[0].num_steps == 0


@pytest.mark.gpu
def test_all_attentions_answer_alike_over_one_pool() -> None:
    model = ModelConfig(name="dummy:qwen2.5-0.5b", dtype="bfloat16", device="cuda")
    rng = np.random.default_rng(0)
    document = rng.integers(0, 10_000, 3000).tolist()
    questions = [[*document, *rng.integers(0, 10_000, n).tolist()] for n in (1, 30, 70, 300)]
    scheduler = SchedulerConfig(max_num_batched_tokens=1024)
    answers: dict[str, list[Completion]] = {}
    with Engine(EngineConfig(model=model, scheduler=scheduler)) as engine:
        engine.generate([document], GREEDY)
        for name, attention, graphs in (
            ("reference", AttentionConfig(backend="reference"), OFF),
            ("paged", AttentionConfig(backend="flashinfer", kernels="paged"), OFF),
            ("spans", AttentionConfig(backend="flashinfer"), OFF),
            ("graphs", AttentionConfig(backend="flashinfer"), ON),
        ):
            engine.reconfigure(attention=attention, graphs=graphs)
            engine.forget_except([np.array(document, np.int32)])
            answers[name] = engine.generate(questions, GREEDY)
    for completions in answers.values():
        for ours, expected in zip(completions, answers["reference"], strict=True):
            pairs = zip(ours.token_ids, expected.token_ids, strict=True)
            num_alike = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            ends = slice(min(num_alike + 1, len(ours.token_ids)))  # the next is the best of nearly the same scores
            chosen = [[logprob.chosen for logprob in one.logprobs[ends]] for one in (ours, expected)]
            np.testing.assert_allclose(*chosen, atol=0.05)


def test_a_rehearsal_runs_each_kind_of_step_and_leaves_the_pool_usable(config: EngineConfig) -> None:
    seen: list[StepPlan] = []

    class Rehearsed(ModelRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            seen.append(plan)
            return super().execute(plan)

    def new_runner(config: EngineConfig, weights: Weights, pool: KVPool, costs: StepCost | None) -> ModelRunner:
        attention, sampled = ReferenceAttention(pool), torch.zeros(64, dtype=torch.int64)
        runner = Rehearsed(LlamaModel(weights), pool, attention, 0, sampled, None, lambda c: attention)
        rehearse(runner, pool, 100, 3)
        return runner

    with Engine(config) as engine, Engine(config, new_runner=new_runner) as rehearsed:
        assert _answer(rehearsed) == _answer(engine)
        size = config.cache.page_size
    lengths = [[len(row.token_ids) for row in plan.rows] for plan in seen]
    assert lengths[0] == [100]  # the largest first
    assert [size] in lengths  # a prompt after what has been computed of it
    assert any(size in step and 1 in step for step in lengths)
    assert {len(step) for step in lengths if set(step) == {1}} == {1, 2, 3}
    assert any(plan.groups for plan in seen)
    assert any(row.sampling.temperature > 0 for plan in seen for row in plan.rows)


def test_steps_that_memory_has_no_room_for_are_refused_at_the_start(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(backends, "LlamaModel", out_of_memory)
    with pytest.raises(BadParameterError, match=r"^steps of up to \d+ tokens do not fit beside weights and pool"):
        Engine(config)


def test_who_plans_a_step_and_who_runs_it_search_for_its_cut_once(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's runner is given what its scheduler has, and asks it for the segments of the spans of each step."""
    num_asked, num_searched = 0, 0

    class Cutting(ReferenceAttention):
        costs: StepCost

        def plan(self, step: StepPlan) -> StepPath:
            plan_spans(step, config.cache.page_size, Split(self.segment_tokens))
            return super().plan(step)

        def segment_tokens(self, spans: Sequence[tuple[int, int]]) -> int:
            nonlocal num_asked
            num_asked += 1
            return self.costs.segment_tokens(spans)

    class Searches(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            nonlocal num_searched
            num_searched += 1
            return super().__iter__()

    def make(config: EngineConfig, weights: Weights, pool: KVPool, costs: StepCost | None) -> ModelRunner:
        attention, sampled = Cutting(pool), torch.zeros(64, dtype=torch.int64)
        assert costs is not None
        attention.costs = costs
        return ModelRunner(LlamaModel(weights), pool, attention, 0, sampled, None, lambda c: attention)

    monkeypatch.setattr("p99lab.engine.costs.SEGMENT_COUNTS", Searches(SEGMENT_COUNTS))
    config = config.model_copy(update={"scheduler": SchedulerConfig(max_num_batched_tokens=8)})
    with Engine(config, new_runner=make) as engine:
        engine.generate([PROMPT], SamplingParams(max_tokens=1))
    assert num_asked == num_searched == 4  # all steps but the first see earlier keys


def test_spans_are_cut_by_the_costs_that_are_given(triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from p99lab.engine.attention import flashinfer, paged

    cuts: list[SegmentTokens] = []
    monkeypatch.setattr(flashinfer, "FlashInferAttention", lambda pool, geometry, cut, *rest: cuts.append(cut))
    monkeypatch.setattr(paged, "PagedAttention", lambda pool, geometry: None)
    geometry = Geometry.named("llama-3.1-8b")
    small = geometry.model_copy(update={"num_layers": 1})
    pool = KVPool.allocate(small, 2, 64, torch.bfloat16, torch.device("cpu"))
    costs = StepCost(H200, geometry, page_size=64)
    for given in (costs, None):
        Attentions(pool, geometry, 100, given).spans  # noqa: B018
    assert cuts[0] == costs.segment_tokens
    assert cuts[1] != costs.segment_tokens
    assert cuts[1]([(32, 130_816)]) == costs.segment_tokens([(32, 130_816)])


def test_weights_that_memory_has_no_room_for_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(checkpoint, "dummy_weights", out_of_memory)
    with pytest.raises(ModelError, match=r"^the weights of 'dummy:tiny-128k' in float32 do not fit on 'cpu'$"):
        Engine(EngineConfig(model=ModelConfig(name="dummy:tiny-128k")))
