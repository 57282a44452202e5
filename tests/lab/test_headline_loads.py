"""Notebook 01's plan: which arm gets which load, at which rate, for how long, and what a part leaves out."""

from __future__ import annotations

import pytest

from p99lab.engine.config import EngineConfig, ModelConfig
from p99lab.errors import BadParameterError
from p99lab.lab import headline_tables
from p99lab.lab.headline_arms import ARMS, arm, full_set, here, long_arms, measured_arms, why_not
from p99lab.lab.headline_loads import (
    LoadSpec,
    Planned,
    all_loads,
    churn_s,
    closed_load,
    open_load,
    open_s,
    plan,
    skipped,
)
from p99lab.lab.parameters import CONTRACTS, Headline01, load

CONTRACT = CONTRACTS["01_headline_p99"]
SITE = ("vllm_site=/site", "vllm_model=/model")


def tier(name: str, *overrides: str) -> Headline01:
    parameters = load(CONTRACT, name, overrides)
    assert isinstance(parameters, Headline01)
    return parameters


def test_the_gpu_tier_is_the_articles_scenario() -> None:
    drawn, exact = tier("h200"), tier("h200", "exact_lengths=[130816, 64, 16]")
    assert drawn.lengths == ((117_000, 130_900), (48, 80), (16, 16))
    assert exact.lengths == ((130_816, 130_816), (64, 64), (16, 16))
    for parameters in (drawn, exact):
        assert sum(most for _, most in parameters.lengths) <= 131_072
        assert (parameters.concurrency, parameters.num_documents) == (64, 4)


@pytest.mark.parametrize(
    "override", ["exact_lengths=[1, 0, 1]", "arms=[]", "arms=[stock, stock]", "arms=[stok]", "open_shares=[[1.5, 60]]"]
)
def test_what_does_not_fit_is_refused(override: str) -> None:
    with pytest.raises(BadParameterError, match=override.partition("=")[0]):
        tier("h200", override)


def test_the_arms_of_a_run() -> None:
    whole = [arm.name for arm in measured_arms(tier("h200", *SITE))]
    assert whole == ["no cache", "stock", "+chunked", "+shared-prefix groups", "+graphs and overlap", "vLLM"]
    assert [arm.name for arm in long_arms(tier("h200", *SITE))] == ["stock", "+graphs and overlap", "vLLM"]
    laptop = tier("laptop")
    assert [arm.name for arm in measured_arms(laptop)] == whole[:4]
    assert why_not(arm("+graphs and overlap"), laptop) == "not testable here: takes an NVIDIA GPU"
    assert why_not(arm("vLLM"), tier("h200")) == "not run: no vLLM site given"
    assert why_not(arm("vLLM"), tier("h200", *SITE, "transport=in-process")).startswith("not run: a peer answers")


def test_a_part_without_the_full_set_has_none() -> None:
    part = tier("h200", "arms=[stock, +chunked]")
    assert full_set(part) is None
    assert [arm.name for arm in long_arms(part)] == ["stock"]
    by_name = tier("h200", "device=cpu", "arms=[stock, +graphs and overlap]")
    assert full_set(by_name) == arm("+graphs and overlap")
    assert not arm("+graphs and overlap").graphs_config(by_name).enabled  # there are none on a CPU
    assert arm("+graphs and overlap").scheduler(by_name).overlap
    assert here(arm("+graphs and overlap"), by_name) == "measured, without CUDA graphs: no GPU"
    assert here(arm("+graphs and overlap"), tier("h200")) == here(arm("stock"), by_name) == "measured"
    assert here(arm("+chunked"), by_name) == "not run"


def test_what_the_engine_is_told_for_an_arm() -> None:
    parameters = tier("h200", "max_step_s=0.2", "max_hold_s=0.1")
    stock, chunked, groups = (arm(name) for name in ("stock", "+chunked", "+shared-prefix groups"))
    assert (stock.attention.kernels, groups.attention.kernels) == ("paged", "spans")
    assert stock.scheduler(parameters).max_num_batched_tokens == 130_980
    assert [one.scheduler(parameters).max_step_s for one in (stock, chunked, groups)] == [None, None, 0.2]
    assert [one.scheduler(parameters).max_hold_s for one in (stock, chunked, groups)] == [0.0, 0.0, 0.1]
    base = EngineConfig(model=ModelConfig(name="dummy:tiny-128k"))
    whole = arm("+graphs and overlap").engine_config(base, parameters)
    assert (whole.graphs.enabled, whole.scheduler.overlap, whole.grouping.enabled) == (True, True, True)


def test_open_loads_can_be_left_to_some_arms() -> None:
    opened = {p.arm.name for p in plan(tier("h200", *SITE, "open_arms=[vLLM]")) if p.load.kind != "closed"}
    assert opened == {"vLLM"}


def test_every_block_of_a_peer_comes_before_the_engines() -> None:
    peers = [planned.arm.is_peer for planned in plan(tier("h200", *SITE))]
    assert peers == sorted(peers, reverse=True)
    assert any(peers)
    assert not all(peers)


def test_closed_blocks_come_before_the_loads_that_need_their_capacity() -> None:
    blocks = plan(tier("h200"))
    assert [p.load.kind for p in blocks if p.load.kind == "closed"] == ["closed"] * 9  # 4 arms twice, no cache once
    last = max(place for place, planned in enumerate(blocks) if planned.load.kind == "closed")
    assert all(planned.load.kind != "closed" for planned in blocks[last + 1 :])
    assert blocks[-1].load.kind == "churn"
    assert len({planned.name for planned in blocks}) == len(blocks)


def test_no_two_blocks_of_an_arm_share_questions_and_all_arms_get_the_same() -> None:
    by_load: dict[str, set[int]] = {}
    for planned in plan(tier("h200", *SITE)):
        by_load.setdefault(f"{planned.load.name} {planned.number}", set()).add(planned.first_query)
    assert all(len(starts) == 1 for starts in by_load.values())
    assert len(set.union(*by_load.values())) == len(by_load)


def block(parameters: Headline01, load: LoadSpec, name: str = "stock") -> Planned:
    return next(p for p in plan(parameters) if p.load == load and p.arm.name == name)


def test_rates_are_shares_of_ones_own_capacity_or_fixed() -> None:
    capacities = {"stock": 8.0, "+graphs and overlap": 70.0}
    full = arm("+graphs and overlap")
    assert LoadSpec("share", 0.5).rate(full, capacities) == 35.0
    assert LoadSpec("common", 0.5).rate(full, capacities) == 4.0
    assert LoadSpec("rate", 60.0).rate(full, capacities) == 60.0
    assert [load.name for load in all_loads(tier("h200"))] == [
        "closed",
        "open 30 %",
        "open 50 %",
        "open 70 %",
        "open 90 %",
        "bursty 50 %",
        "open 6.2/s",
        "open 50/s",
        "churn 50 %",
    ]


def test_what_an_arm_cannot_answer_is_not_sent() -> None:
    parameters = tier("h200")
    fast = block(parameters, LoadSpec("rate", 50.0, 1))
    assert skipped(fast, {"stock": 8.0}) == "not run: above what stock can answer (8/s)"
    assert skipped(fast, {"stock": 60.0}) is None
    assert skipped(fast, {}) == "not run: stock has no capacity to take a share of"
    assert skipped(block(parameters, LoadSpec("closed")), {}) is None


def test_a_slow_arm_gets_time_for_a_p99() -> None:
    parameters = tier("h200", "open_shares=[[0.5, 60]]")
    half = block(parameters, LoadSpec("share", 0.5))
    assert open_s(half, parameters, 35.0) == 60.0
    slow_s = open_s(half, parameters, 4.0)
    assert slow_s is not None
    assert 0.9 * slow_s * 4.0 == pytest.approx(400.0)


def test_churn_lasts_for_all_its_cold_documents() -> None:
    parameters = tier("h200")
    churn = block(parameters, LoadSpec("churn", 0.5))
    assert churn.duration_s == churn_s(parameters) == 360.0
    asked = open_load(churn, parameters, 30.0, 360.0)
    assert asked.cold_every_s == 60.0
    num_cold = sum(k * 60.0 < 360.0 for k in range(1, 10))
    assert num_cold == parameters.cold_documents
    assert asked.warmup_share * 360.0 < 60.0  # the first is measured too
    bursty = open_load(block(parameters, LoadSpec("bursty", 0.5)), parameters, 30.0, 60.0)
    assert (bursty.arrivals, bursty.cv, bursty.cold_every_s) == ("gamma", 2.0, None)


def test_no_cache_has_clients_of_its_own_number() -> None:
    parameters = tier("h200")
    alone = block(parameters, LoadSpec("closed"), "no cache")
    assert closed_load(alone, parameters, 60.0).concurrency == 1
    assert closed_load(block(parameters, LoadSpec("closed")), parameters, 75.0).concurrency == 64


def test_the_page_says_of_every_arm_why_it_is_not_there() -> None:
    table = headline_tables.arms(tier("h200", "arms=[stock]")).set_index("arm")["here"]
    assert list(table.index) == [arm.name for arm in ARMS]
    assert table["stock"] == "measured"
    assert table["+chunked"] == "not run"
    assert table["+tiers and warm-up"] == "not built yet"
