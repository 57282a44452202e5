"""The engine on a GPU: FlashInfer's kernels in bfloat16, steps as CUDA graphs, steps that overlap.

`pytest -m gpu tests/engine/test_gpu.py` on a Hopper GPU. Most tests also run on the CPU, with the reference backend in
bfloat16: there they test themselves. The first few run the reference path on the GPU, against the CPU.
"""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p99lab.caches.pages import PageCopy, PagePool
from p99lab.engine import linear
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
    Load,
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
CASES = [*dict.fromkeys([*covering(FACTORS), *covering({name: values[::-1] for name, values in FACTORS.items()})])]
ON_CPU = [case for case in CASES if 16 in case and 7 not in case][:6]  # the short ones; enough to test the test


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
        reserve_tokens=0 if of["preempted"] else 256,
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
    _check_groups(runner.plans, of["groups"], few_at_once=of["preempted"] or of["chunk"] == 7)
    assert any(row.follows is not None for plan in runner.plans for row in plan.rows) == of["overlap"]
    if device == "cuda":
        _check_graphs(runner, of["graphs"], of["chunk"])


def _few_pages(questions: Sequence[Prompt], num_tokens: int, page_size: int) -> int:
    """Room for the longest of them, and a little more."""
    return -(-(max(map(len, questions)) + num_tokens) // page_size) + 2


def _samplings(num: int, num_tokens: int, random: bool, scored: int = 0) -> list[SamplingParams]:
    """`scored`: how many of the first have their prompts scored. Random ones have a seed of their own or none."""
    asked = []
    for number in range(num):
        prompt_logprobs = NUM_TOP if number < scored else None
        seed = None if number % 2 else 100 + number
        asked.append(drawn(num_tokens, seed, prompt_logprobs) if random else greedy(num_tokens, prompt_logprobs))
    return asked


def _check_groups(plans: Sequence[StepPlan], groups: str, few_at_once: bool) -> None:
    """The load has made the groups that it is there for."""
    sizes = [sorted(len(group.rows) for group in plan.groups) for plan in plans]
    nested = max(sum(i in group.rows for group in plan.groups) for plan in plans for i in range(len(plan.rows)))
    assert (max(map(len, sizes)) > 0) == (groups != "off")
    assert nested >= 2 or groups != "nested"
    if groups == "skewed" and not few_at_once:
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


@pytest.mark.parametrize("device", RIGS)
def test_what_one_attention_has_stored_another_reads(models: Models, device: str) -> None:
    """On the CPU all of them are the reference."""
    model = models.get(device, ModelShape("qwen3", 128, 4, tied=False))
    load = Writer(16, None).load("nested")
    others = [AttentionConfig(backend="reference")]
    if device == "cuda":
        others = [AttentionConfig(backend="flashinfer", kernels="paged"), *others, model.config().attention]
    with watched(model.config()) as (engine, runner):
        session = Session(engine)
        session.generate(load.documents, greedy(1))
        session.generate(load.questions, greedy(12))
        for number, attention in enumerate(others):
            engine.reconfigure(attention=attention)  # epochs begin anew
            runner.plans.clear()
            runner.replayed.clear()
            session.generate(_asked_again(load, number), _samplings(len(load.questions), 12, random=False, scored=1))
            assert engine.stats().num_cached_tokens > 0
            is_captured = device == "cuda" and attention == model.config().attention
            assert bool(runner.replayed) == is_captured
        engine.check()
    model.judge.check(session.asked)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 1), (128, 3)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_flashinfers_own_wrappers(models: Models, head_dim: int, group: int, page_size: int) -> None:
    model = models.get("cuda", ModelShape("llama", head_dim, group, tied=False))
    config = model.config(page_size=page_size, num_pages=120)
    config = config.model_copy(update={"attention": AttentionConfig(backend="flashinfer", kernels="paged")})
    load = Writer(page_size, None).load("skewed")
    with watched(config) as (engine, runner):
        session = Session(engine)
        _scatter(session, free_runs=(1, 2, 3, 5))
        session.generate(load.documents, greedy(1))
        session.generate(load.questions, _samplings(len(load.questions), 12, random=False, scored=2))
    model.judge.check(session.asked)
    assert not runner.replayed


def _asked_again(load: Load, number: int) -> list[Prompt]:
    """The questions, all of them longer than when they were asked before."""
    return [[*question, number, number] for question in load.questions]


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
        session.generate(
            [*prompts[1:], prompts[0]], [*_samplings(len(prompts) - 1, 24, random=True), drawn(24, seed=5)]
        )
    model.judge.check(session.asked)  # every token of both is the one that its seed and place draw
    company = session.asked[-1]
    agreeing = itertools.takewhile(
        lambda both: both[0] == both[1], zip(alone[0].answer.token_ids, company.answer.token_ids, strict=True)
    )
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
def test_a_step_that_no_graph_fits_runs_between_replayed_ones(
    model: Model, intruder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, scattered = Writer(16, None), intruder == "scattered pages"
    # of 200 pages none is next to another: more decode spans than the 171 that the largest decode graph has room for,
    # 40 and one for each of 131 places where lanes meet
    num_scattered = 200 if model.device == "cuda" else 30
    num_pages = {"long prompt": 16, "scored prompt": 2, "scattered pages": num_scattered}[intruder]
    sampling = greedy(4, prompt_logprobs=NUM_TOP if intruder == "scored prompt" else None)
    graphs = DECODE_GRAPHS if scattered else MIXED_GRAPHS
    with watched(model.config(num_pages=2 * num_pages + 60, chunk=4096, graphs=graphs)) as (engine, runner):
        session = Session(engine)
        if scattered:
            monkeypatch.setattr(PagePool, "clear_run", lambda *_: None)  # it would move the pages in between
            _scatter(session, free_runs=(1,))
        first_epoch = runner.plans[-1].epoch if runner.plans else 0
        for _ in range(3):
            session.add(writer.extend([], 2), greedy(30))
        for _ in range(10):
            engine.step()
        session.add(writer.extend([], num_pages), sampling)
        while engine.has_work:
            engine.step()
        engine.check()
    model.judge.check(session.asked)
    with_intruder = [plan for plan in runner.decode_plans if plan.epoch > first_epoch and len(plan.rows) == 4]
    assert len(with_intruder) >= 3
    if scattered:
        assert max(_num_runs(row.page_table) for row in with_intruder[0].rows) >= num_scattered
    if model.device == "cuda":
        assert all((plan.epoch in runner.replayed) != scattered for plan in with_intruder)
        was_replayed = [plan.epoch in runner.replayed for plan in runner.plans if plan.epoch > first_epoch]
        assert False in was_replayed[was_replayed.index(True) : -1]
        assert was_replayed[-1]


@pytest.mark.parametrize("free_runs", [(1,), (1, 2, 3, 5)])
def test_prefixes_and_private_parts_in_many_pieces(model: Model, free_runs: tuple[int, ...]) -> None:
    load = Writer(16, None, seed=3).load("nested")
    with watched(model.config(num_pages=120, graphs=MIXED_GRAPHS)) as (engine, runner):
        session = Session(engine)
        _scatter(session, free_runs)
        session.generate(load.documents, greedy(1))
        session.generate(load.questions, greedy(20))
        engine.check()
    model.judge.check(session.asked)
    assert max(_num_runs(row.page_table) for plan in runner.plans for row in plan.rows) >= 4
    assert any(plan.groups for plan in runner.plans)


def _scatter(session: Session, free_runs: Sequence[int]) -> None:
    """Fill the pool with prompts of a page each and give up all but some: single pages, as many free ones between them
    as `free_runs` says by turns."""
    num_pages = session.engine.config.cache.num_pages
    assert num_pages is not None
    writer = Writer(session.engine.config.cache.page_size, 0, seed=1)
    prompts = [writer.extend([], 1) for _ in range(num_pages)]
    session.generate(prompts, greedy(1))
    is_kept = np.zeros(num_pages, np.bool_)
    is_kept[np.cumsum([size + 1 for size in itertools.islice(itertools.cycle(free_runs), num_pages)]) % num_pages] = 1
    session.engine.forget_except(
        [np.array(prompt, np.int32) for prompt, kept in zip(prompts, is_kept, strict=True) if kept]
    )


def _num_runs(page_table: np.ndarray) -> int:
    return 1 + int(np.count_nonzero(np.diff(page_table) != 1))


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (128, 3)])
@pytest.mark.parametrize("device", RIGS)
def test_long_documents_are_read_in_segments(models: Models, device: str, head_dim: int, group: int) -> None:
    model = models.get(device, ModelShape("llama", head_dim, group, tied=False))
    writer = Writer(64, None, seed=4)
    num_pages = 40 if device == "cuda" else 6  # a CPU reads whole what 132 multiprocessors share
    document = writer.extend([], num_pages)
    config = model.config(page_size=64, num_pages=num_pages + 20, chunk=1024)
    with watched(config) as (engine, _):
        session = Session(engine)
        session.generate([document], greedy(1))
        for num_rows in (1, 5):
            session.generate([writer.extend(document, num_pages + 1) for _ in range(num_rows)], greedy(8))
    model.judge.check(session.asked)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [None, MIXED_GRAPHS])
@pytest.mark.parametrize("random", [False, True])
def test_the_host_waits_for_one_event_a_step_and_nothing_else(
    models: Models, monkeypatch: pytest.MonkeyPatch, random: bool, graphs: int | None
) -> None:
    """`set_sync_debug_mode` sees all that torch waits for but events and whole devices: those are counted here."""
    waited: list[torch.cuda.Event] = []
    wait = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        waited.append(event)
        wait(event)

    load = Writer(16, None).load("skewed")
    with watched(models.get("cuda").config(graphs=graphs)) as (engine, runner):
        session = Session(engine)
        session.generate(load.documents, greedy(1))
        session.generate(load.questions, _samplings(len(load.questions), 4, random))  # compiles what is not yet
        engine.forget_except([])
        num_before = len(runner.plans)
        for prompt, sampling in zip(load.questions, _samplings(len(load.questions), 40, random), strict=True):
            session.add(prompt, sampling)
        monkeypatch.setattr(torch.cuda.Event, "synchronize", counted)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("waits for the whole device"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            while engine.has_requests:
                engine.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()
        assert len(waited) == len(runner.plans) - num_before
    models.get("cuda").judge.check(session.asked)


@pytest.mark.gpu
def test_products_with_large_weights_have_kernels_of_their_own_and_change_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured at 1, 2, 4 and 8 tokens: rows of one or two are streamed, those of eight tiled."""
    thin_linear = importlib.import_module("p99lab.engine.thin_linear")
    called: Counter[str] = Counter()
    for name in ("stream", "tile"):
        monkeypatch.setattr(thin_linear, name, _counted(called, name, getattr(thin_linear, name)))
    config = EngineConfig(
        model=ModelConfig(name="dummy:llama-3.2-1b", dtype="bfloat16", device="cuda"),
        cache=CacheConfig(num_pages=200),
        scheduler=SchedulerConfig(max_num_seqs=8),
        graphs=GraphsConfig(max_num_tokens=8),
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100_000, 100 + number).tolist() for number in range(8)]
    answers: list[list[Completion]] = []
    for least in (1 << 20, 1 << 60):  # of this small model too, all are large
        monkeypatch.setattr(linear, "MIN_LARGE_BYTES", least)
        called.clear()
        with Engine(config) as engine:
            answers.append([one for num in (1, 2, 8) for one in engine.generate(prompts[:num], GREEDY)])
            stats = engine.stats()
            assert stats.num_graph_steps == stats.num_steps - 3
        assert (called["stream"] > 0, called["tile"] > 0) == ((least < 1 << 60,) * 2)
    for ours, expected in zip(*answers, strict=True):
        pairs_of_ids = zip(ours.token_ids, expected.token_ids, strict=True)
        num_alike = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs_of_ids)))
        ends = slice(min(num_alike + 1, len(ours.token_ids)))  # the next is the best of nearly the same scores
        chosen = [[logprob.chosen for logprob in one.logprobs[ends]] for one in (ours, expected)]
        np.testing.assert_allclose(*chosen, atol=0.1)  # bfloat16 leaves 0.03 to 0.06 of a score of 8


def _counted(called: Counter[str], name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        called[name] += 1
        return kernel(*args, **options)

    return call


@pytest.mark.gpu
def test_no_step_compiles_anything_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that run eagerly: chunks of a document, 64 questions about it at once, decode steps of 64 rows to one."""
    triton = importlib.import_module("triton")
    rng = np.random.default_rng(0)
    document = rng.integers(0, 10_000, 3000).tolist()
    questions = [[*document, *rng.integers(0, 10_000, 20).tolist()] for _ in range(64)]
    config = EngineConfig(
        model=ModelConfig(name="dummy:llama-3.2-1b", dtype="bfloat16", device="cuda"),
        cache=CacheConfig(num_pages=400),
        graphs=GraphsConfig(enabled=False),
    )
    compiled: list[object] = []
    with watched(config) as (engine, runner):
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(1))
        engine.generate([document], SamplingParams(max_tokens=1))
        engine.generate(questions, [SamplingParams(max_tokens=2 + i, ignore_eos=True) for i in range(64)])
        assert engine.stats().num_fallback_steps == 0
    assert max(row.num_computed_tokens for row in runner.plans[1].rows) > 0  # the second chunk
    assert any(len(plan.rows) == 64 < plan.num_tokens for plan in runner.plans)
    assert {len(plan.rows) for plan in runner.decode_plans} >= {*range(1, 65)}
    assert any(plan.groups for plan in runner.decode_plans)
    assert not compiled


@pytest.mark.gpu
def test_draws_are_those_of_the_cpu() -> None:
    """Unless a uniform number lies within a rounding error of the border of two tokens: sums have another order."""
    num_rows = 256
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, 1000, generator=generator) * 2
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=20, seed=2),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.02, top_p=0.95, seed=3),
        SamplingParams(),
    ]
    empty = np.empty(0, np.int32)
    rows = [Row("", i, empty, 0, empty, True, params[i % len(params)], i) for i in range(num_rows)]
    on_cpu, on_cuda = choose(logits, rows, 0), choose(logits.cuda(), rows, 0).cpu()
    assert torch.count_nonzero(on_cpu != on_cuda) <= 1


@pytest.mark.gpu
def test_without_a_kernel_for_it_the_reference_attends_and_one_line_says_why(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.get("cuda", ModelShape("llama", 32, 4, tied=False))
    config = model.config()
    with pytest.raises(BadParameterError, match=r"^attention backend 'flashinfer': [^\n]*heads of 64 and 128[^\n]*$"):
        Engine(config)
    with Engine(config.model_copy(update={"attention": AttentionConfig()})) as engine:
        session = Session(engine)
        session.generate(Writer(16, None).load("one").questions, greedy(12))
    model.judge.check(session.asked)
    own = [record.message for record in caplog.records if record.name.startswith("p99lab")]
    assert ["heads of 64 and 128" in message for message in own] == [True]


# --- the reference path on a GPU, in float32 --------------------------------------------------------------------------


def _prompts(vocab_size: int) -> list[Prompt]:
    rng = np.random.default_rng(2)
    document = rng.integers(0, vocab_size, 70).tolist()
    return [[*document, *rng.integers(0, vocab_size, n).tolist()] for n in (1, 5, 9, 17)] + [[3]]


def _answers(config: EngineConfig) -> list[Completion]:
    with Engine(config) as engine:
        engine.generate(_prompts(127)[:1], GREEDY)  # leaves the document in the cache
        return engine.generate(_prompts(127), GREEDY)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_cuda_answers_as_the_cpu_does(architecture: str, tmp_path: Path) -> None:
    save_tiny_model(architecture, tmp_path)
    config = EngineConfig(
        model=ModelConfig(name=str(tmp_path)),
        cache=CacheConfig(page_size=4, num_pages=300),
        scheduler=SchedulerConfig(max_num_batched_tokens=24),
        grouping=GroupingConfig(decide_by="length", min_shared_tokens=8),
    )
    on_cuda = config.model_copy(update={"model": ModelConfig(name=str(tmp_path), device="cuda")})
    for ours, expected in zip(_answers(on_cuda), _answers(config), strict=True):
        assert ours.token_ids == expected.token_ids
        logprobs = [[logprob.chosen for logprob in completion.logprobs] for completion in (ours, expected)]
        np.testing.assert_allclose(*logprobs, atol=1e-4)
        assert ours.usage is not None
        assert expected.usage is not None
        assert ours.usage.num_cached_tokens == expected.usage.num_cached_tokens


@pytest.mark.gpu
def test_the_scores_of_a_prompt_are_the_cpus(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=2)
    scheduler = SchedulerConfig(max_num_batched_tokens=24)
    scored = []
    for device in ("cpu", "cuda"):
        model = ModelConfig(name=str(tmp_path), device=device)
        with Engine(
            EngineConfig(model=model, cache=CacheConfig(page_size=4, num_pages=300), scheduler=scheduler)
        ) as engine:
            scored.append([completion.prompt_logprobs for completion in engine.generate(_prompts(127), asked)])
    for ours, expected in zip(*scored, strict=True):
        assert ours is not None
        assert expected is not None
        assert len(ours) == len(expected)
        for one, other in zip(ours[1:], expected[1:], strict=True):
            assert one is not None
            assert other is not None
            assert abs(one.chosen - other.chosen) < 1e-4
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_pool_is_sized_from_the_devices_free_memory_and_a_cached_answer_is_near_the_computed_one() -> None:
    before = torch.cuda.memory_allocated()
    model = ModelConfig(name="dummy:qwen2.5-0.5b", dtype="bfloat16", device="cuda")
    with Engine(EngineConfig(model=model, graphs=GraphsConfig(max_num_tokens=8))) as engine:
        free, total = torch.cuda.mem_get_info()
        assert engine.stats().num_free_pages > 1000
        assert 1 << 30 < free < 0.1 * total  # a reserve is left, and no more
        prompt = np.random.default_rng(0).integers(0, 10_000, 3000, dtype=np.int32)
        computed, cached = (engine.generate([prompt], GREEDY)[0] for _ in range(2))
        assert cached.usage is not None
        assert cached.usage.num_cached_tokens == 2999
        assert abs(computed.logprobs[0].chosen - cached.logprobs[0].chosen) < 0.05
    del engine
    assert torch.cuda.memory_allocated() - before < 2**30


@pytest.mark.gpu
def test_an_engine_made_after_another_is_given_as_much_memory(models: Models) -> None:
    config = models.get("cuda").config(page_size=64, num_pages=None)
    num_pages = []
    for _ in range(2):
        with Engine(config) as engine:
            num_pages.append(engine.stats().num_free_pages)
    assert num_pages[1] > 0.95 * num_pages[0]
