"""The engine on a GPU: FlashInfer's kernels in bfloat16, steps as CUDA graphs, steps that overlap.

`pytest -m gpu tests/engine/test_gpu.py` on a Hopper GPU. Most tests also run on the CPU, with the reference backend in
bfloat16: there they test themselves. The first few run the reference path on the GPU, against the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p99lab.caches.pages import PageCopy
from p99lab.engine.config import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    GraphsConfig,
    GroupingConfig,
    ModelConfig,
    SchedulerConfig,
)
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.plan import Row, StepPlan
from p99lab.engine.request import SamplingParams
from p99lab.engine.sampler import choose
from p99lab.errors import BadParameterError
from tests.engine.gpu_cases import (
    DECODE_GRAPHS,
    MIXED_GRAPHS,
    NUM_TOP,
    RIGS,
    VOCAB,
    Model,
    Models,
    ModelShape,
    Prompt,
    Session,
    Watched,
    Writer,
    covering,
    drawn,
    greedy,
    watched,
)
from tests.engine.pairwise import pairs
from tests.engine.tiny_models import ARCHITECTURES, save_tiny_model

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=0)

FACTORS: dict[str, tuple[Any, ...]] = {
    "architecture": tuple(ARCHITECTURES),
    "head_dim": (64, 128),
    "group": (4, 1, 3, 8),  # query heads of a kv head
    "tied": (False, True),
    "page_size": (64, 16),
    "ends": (-1, 0, 1, None),  # prompts: tokens beyond a page boundary; None: in mid-page
    "groups": ("off", "one", "skewed", "nested"),
    "chunk": (7, 64, 150, 4096),
    "preempted": (False, True),
    "graphs": (None, DECODE_GRAPHS, MIXED_GRAPHS),
    "overlap": (True, False),
    "random": (False, True),
}
CASES = list(covering(FACTORS))
ON_CPU = CASES[::4]  # enough to test the test


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=RIGS)
def model(request: pytest.FixtureRequest, models: Models) -> Model:
    """A model of 2 layers, head dimension 64, four query heads to a kv head."""
    return models.get(request.param)


def _name(case: Sequence[Any]) -> str:
    return "-".join(map(str, case))


def _everywhere() -> list[Any]:
    on_cpu = [pytest.param("cpu", case, id=f"cpu-{_name(case)}") for case in ON_CPU]
    return on_cpu + [pytest.param("cuda", case, id=_name(case), marks=pytest.mark.gpu) for case in CASES]


def test_the_cases_cover_every_pair() -> None:
    seen = set().union(*(pairs(case) for case in CASES))
    columns = list(enumerate(FACTORS.values()))
    assert seen == {
        ((i, one), (j, other))
        for (i, some), (j, others) in itertools.combinations(columns, 2)
        for one, other in itertools.product(some, others)
    }


@pytest.mark.parametrize(("device", "case"), _everywhere())
def test_answers_are_as_near_to_float32_as_bfloat16_allows(models: Models, device: str, case: tuple[Any, ...]) -> None:
    of = dict(zip(FACTORS, case, strict=True))
    model = models.get(device, ModelShape(of["architecture"], of["head_dim"], of["group"], of["tied"]))
    page_size = of["page_size"]
    load = Writer(page_size, of["ends"]).load(of["groups"])
    num_tokens = page_size + 2 if of["preempted"] else 12  # every request grows by a page at least, or few do
    config = model.config(
        page_size=page_size,
        num_pages=_few_pages(load.questions, num_tokens, page_size) if of["preempted"] else 256,
        chunk=of["chunk"],
        overlap=of["overlap"],
        grouped=of["groups"] != "off",
        graphs=of["graphs"],
    )
    with watched(config) as (engine, runner):
        session = Session(engine)
        session.generate(load.documents, greedy(1))
        session.generate(load.questions, _samplings(len(load.questions), num_tokens, of["random"]))
        again = load.questions[::2]  # from the cache; some are scored as well, and read nothing from it
        session.generate(again, _samplings(len(again), 6, of["random"], scored=2))
        engine.check()
        stats = engine.stats()
    model.judge.check(session.asked)
    assert stats.num_active_pages == 0
    assert stats.num_cached_tokens > 0
    assert (stats.num_preemptions > 0) == of["preempted"]
    _check_groups(runner.plans, of["groups"])
    assert any(row.follows is not None for plan in runner.plans for row in plan.rows) == of["overlap"]
    if device == "cuda":
        _check_graphs(runner, of["graphs"], of["chunk"])


def _few_pages(questions: Sequence[Prompt], num_tokens: int, page_size: int) -> int:
    """Room for the longest of them, and a little more."""
    return -(-(max(map(len, questions)) + num_tokens) // page_size) + 3


def _samplings(num: int, num_tokens: int, random: bool, scored: int = 0) -> list[SamplingParams]:
    """`scored`: how many of the first have their prompts scored. Random ones have a seed of their own or none."""
    asked = []
    for number in range(num):
        prompt_logprobs = NUM_TOP if number < scored else None
        seed = None if number % 2 else 100 + number
        asked.append(drawn(num_tokens, seed, prompt_logprobs) if random else greedy(num_tokens, prompt_logprobs))
    return asked


def _check_groups(plans: Sequence[StepPlan], groups: str) -> None:
    """The load has made the groups that it is there for."""
    sizes = [sorted(len(group.rows) for group in plan.groups) for plan in plans]
    nested = max(sum(i in group.rows for group in plan.groups) for plan in plans for i in range(len(plan.rows)))
    assert (max(map(len, sizes)) > 0) == (groups != "off")
    assert (nested >= 2) == (groups == "nested")
    if groups == "skewed":
        assert any(len(set(some)) > 1 for some in sizes)


def _check_graphs(runner: Watched, graphs: int | None, chunk: int) -> None:
    replayed = [plan for plan in runner.plans if plan.epoch in runner.replayed]
    num_mixed = sum(plan.num_tokens > len(plan.rows) for plan in replayed)
    assert (len(replayed) > num_mixed) == (graphs is not None)
    if chunk <= 64:  # steps with prompts fit into the smallest such graph
        assert (num_mixed > 0) == (graphs == MIXED_GRAPHS)


def _lose_copies(plan: StepPlan) -> StepPlan:
    """Copies of shared tail pages are one token short."""
    return replace(plan, copies=tuple(PageCopy(c.source, c.target, c.num_tokens - 1) for c in plan.copies))


def _mix_up_groups(plan: StepPlan) -> StepPlan:
    """The first group reads the page behind its first one twice."""
    if not plan.groups or plan.groups[0].num_pages < 2:
        return plan
    first = plan.groups[0].rows[0]
    table = plan.rows[first].page_table.copy()
    table[0] = table[1]
    return replace(plan, rows=_with_row(plan, first, page_table=table))


def _mix_up_rows(plan: StepPlan) -> StepPlan:
    """The first row follows another than its own."""
    if len(plan.rows) < 2 or None in (follows := [row.follows for row in plan.rows[:2]]):
        return plan
    return replace(plan, rows=_with_row(plan, 0, follows=follows[1]))


def _shift_tables(plan: StepPlan) -> StepPlan:
    """The last row's first page is another's."""
    table = plan.rows[-1].page_table.copy()
    table[0] = plan.rows[0].page_table[-1]
    return replace(plan, rows=_with_row(plan, len(plan.rows) - 1, page_table=table))


def _shift_draws(plan: StepPlan) -> StepPlan:
    """Uniform numbers are those of the next place."""
    rows = (replace(row, num_output_tokens=row.num_output_tokens + 1) for row in plan.rows)
    return replace(plan, rows=tuple(rows))


def _with_row(plan: StepPlan, at: int, **changes: Any) -> tuple[Row, ...]:
    return (*plan.rows[:at], replace(plan.rows[at], **changes), *plan.rows[at + 1 :])


@pytest.mark.parametrize("tamper", [_lose_copies, _mix_up_groups, _mix_up_rows, _shift_tables, _shift_draws])
def test_the_yardstick_shows_what_is_wrong(model: Model, tamper: Callable[[StepPlan], StepPlan]) -> None:
    with watched(model.config(), tamper) as (engine, _):
        session = Session(engine)
        load = Writer(16, None).load("skewed")
        session.generate(load.documents, greedy(1))
        session.generate(load.questions, _samplings(len(load.questions), 12, random=tamper is _shift_draws))
    with pytest.raises(AssertionError):
        model.judge.check(session.asked)


@pytest.mark.parametrize("graphs", [None, MIXED_GRAPHS])
def test_the_same_run_again_gives_the_same_to_the_last_bit(model: Model, graphs: int | None) -> None:
    answers = []
    for _ in range(2):
        with Engine(model.config(graphs=graphs)) as engine:
            session = Session(engine)
            load = Writer(16, None).load("skewed")
            session.generate(load.documents, greedy(1))
            for random in (False, True):
                session.generate(load.questions, _samplings(len(load.questions), 12, random))
        answers.append([(one.answer.token_ids, one.answer.logprobs) for one in session.asked])
    assert answers[0] == answers[1]


def test_a_seed_draws_the_same_numbers_in_any_company(model: Model) -> None:
    prompts = Writer(16, None).load("skewed").questions
    with Engine(model.config()) as engine:
        session = Session(engine)
        alone = session.generate(prompts[:1], drawn(24, seed=5))
        session.generate([*prompts[1:], prompts[0]], [*_samplings(len(prompts) - 1, 24, random=True), drawn(24, seed=5)])
    model.judge.check(session.asked)  # every token of both is the one that its seed and place draw
    company = session.asked[-1]
    agreeing = itertools.takewhile(lambda both: both[0] == both[1], zip(alone[0].answer.token_ids, company.answer.token_ids, strict=True))
    assert len(list(agreeing)) > 0


@pytest.mark.parametrize("graphs", [None, DECODE_GRAPHS])
def test_rows_follow_those_that_stood_elsewhere_a_step_before(model: Model, graphs: int | None) -> None:
    prompts = Writer(16, None).load("off").questions
    samplings = [drawn(3 + 2 * number, seed=number) for number in range(len(prompts))]  # the first ones end first
    with watched(model.config(graphs=graphs, grouped=False)) as (engine, runner):
        session = Session(engine)
        session.generate(prompts, samplings)
    model.judge.check(session.asked)
    assert any(row.follows not in (None, at) for plan in runner.plans for at, row in enumerate(plan.rows))


def test_graphs_are_replayed_for_fewer_rows_than_they_were_captured_for(model: Model) -> None:
    load = Writer(16, 0).load("one")
    lengths = (30, 6, 30, 12, 6, 30)  # 6 rows in the graph of 8, then 4, then 3 in that of 4
    with watched(model.config(num_pages=64)) as (engine, runner):
        session = Session(engine)
        session.generate(load.documents, greedy(1))
        session.generate(load.questions, [greedy(num_tokens) for num_tokens in lengths])
        session.generate(load.questions[:5], greedy(20))  # what rows that were not there have stored would be read now
    model.judge.check(session.asked)
    assert {3, 5, 6} <= {len(plan.rows) for plan in runner.decode_plans}
    assert 0 in runner.plans[0].rows[0].page_table  # where a stray key would go
    if model.device == "cuda":
        assert all(plan.epoch in runner.replayed for plan in runner.decode_plans)


@pytest.mark.parametrize("intruder", ["long prompt", "scored prompt", "scattered pages"])
def test_a_step_that_no_graph_fits_runs_between_replayed_ones(model: Model, intruder: str) -> None:
    writer = Writer(16, None)
    num_pages = 16 if intruder == "long prompt" else 2
    prompts = [writer.extend([], 2) for _ in range(3)]
    with watched(model.config(num_pages=360, chunk=4096, graphs=MIXED_GRAPHS)) as (engine, runner):
        session = Session(engine)
        if intruder == "scattered pages":
            num_pages = 150  # none next to another, 150 partial results where a graph of one row has room for 72
            _scatter(session, 360)
        answers = [Completion("") for _ in range(4)]
        for prompt, answer in zip(prompts, answers, strict=False):
            engine.add(prompt, greedy(30), on_event=answer.add)
        for _ in range(10):
            engine.step()
        sampling = greedy(4, prompt_logprobs=NUM_TOP if intruder == "scored prompt" else None)
        engine.add(late := writer.extend([], num_pages), sampling, on_event=answers[3].add)
        while engine.has_work:
            engine.step()
        engine.check()
    samplings = [*[greedy(30)] * 3, sampling]
    model.judge.check([*map(Asked, [*prompts, late], samplings, range(4), answers)])
