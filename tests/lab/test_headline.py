"""The headline experiment on a tiny random model: what each arm is sent, what is found, how claims are judged."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from p99lab.lab import headline, headline_effects, headline_figures, headline_tables, headline_views
from p99lab.lab.headline import Block, Headline
from p99lab.lab.headline_clients import in_a_loop_of_its_own
from p99lab.lab.parameters import Headline01
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.units import Units
from p99lab.probe.load import Run
from p99lab.probe.records import Outcome, Phase, RequestRecord
from p99lab.probe.stats import SHARES, summarise
from p99lab.probe.workload import ClosedLoad
from tests.engine.tiny_models import save_tiny_model

BUILT = ["no cache", "stock", "+chunked", "+shared-prefix groups"]  # and can be measured on a CPU
FULL = BUILT[-1]
LONG = ("stock", FULL)


@pytest.fixture(scope="module")
def parameters(tmp_path_factory: pytest.TempPathFactory) -> Headline01:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return Headline01(
        model=str(directory),
        dtype="float32",
        device="cpu",
        threads=1,
        transport="in-process",
        random_tokens=127,
        tokenizer=None,
        exact_lengths=None,
        num_documents=2,
        document_tokens_min=150,
        document_tokens_max=300,
        question_tokens_min=8,
        question_tokens_max=12,
        answer_tokens_min=2,
        answer_tokens_max=4,
        arms=None,
        concurrency=3,
        clients_without_cache=3,
        max_num_seqs=8,
        chunk_tokens=64,
        max_step_s=None,
        max_hold_s=0.0,
        requests_for_p99=48,
        requests_for_p90=12,
        requests_without_cache=4,
        warmup_requests=4,
        num_blocks=2,
        open_requests=12,
        open_share=0.2,
        open_arms=None,
        block_s=None,
        open_block_requests=0,
        open_shares=(),
        bursty_shares=(),
        open_rates=(),
        churn_share=0.2,
        cold_documents=0,
        cold_every_s=0.4,
        vllm_site=None,
        vllm_model=None,
        vllm_arguments=(),
        max_measuring_s=60.0,
        slo_p99_s=2.0,
        seed=3,
    )


def units_in(folder: RunFolder) -> Units:
    return Units(folder, basis="this code, these parameters, this machine")


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder.create(tmp_path_factory.mktemp("outputs"))


@pytest.fixture(scope="module")
def measured(parameters: Headline01, first_run: RunFolder) -> Headline:
    return headline.run(parameters, units=units_in(first_run))


def test_every_built_arm_runs_its_blocks_and_long_arms_an_open_load(measured: Headline) -> None:
    blocks = Counter((block.arm.name, block.load) for block in measured.blocks)
    closed = {(name, "closed"): 1 if name == "no cache" else 2 for name in BUILT}
    assert blocks == {**closed, **{(name, "open"): 1 for name in LONG}}


def test_all_arms_are_sent_the_same_requests(measured: Headline) -> None:
    for number in range(2):
        blocks = [block for block in measured.blocks if block.load == "closed" and block.number == number]
        sent = [[record.prompt_digest for record in block.run.records] for block in blocks]
        shortest = min(map(len, sent))
        assert shortest >= 4
        assert len({tuple(digests[:shortest]) for digests in sent}) == 1


def test_no_block_finds_more_in_the_cache_than_it_declares(measured: Headline) -> None:
    for block in measured.blocks:
        assert block.summary.hit_rates.verdict == "as declared", block
        cached = {record.num_cached_tokens for record in block.used}
        assert (cached == {0}) == (not block.arm.prefix_cache)
        for record in block.used:
            assert (record.num_cached_tokens or 0) < record.num_document_tokens + 8  # no question was there before


def test_every_request_is_answered_whole(measured: Headline) -> None:
    for block in measured.blocks:
        assert all(record.outcome is Outcome.OK for record in block.used)
        assert all(record.num_output_tokens == record.max_tokens for record in block.used)


def test_tables_cover_every_cell(measured: Headline) -> None:
    summary = headline_tables.summary(measured)
    assert list(summary["arm"][summary["load"] == "closed"]) == BUILT
    percentiles = headline_tables.percentiles(measured)
    assert set(percentiles["metric"]) >= {"ttft", "itl", "tpot", "e2e", "queue_time"}
    assert set(headline_tables.hit_rates(measured)["checked"]) == {"as declared"}
    assert len(headline_tables.windows(measured)) == len(measured.blocks)
    timelines = headline_tables.timelines(measured)
    assert list(timelines) == [name for name in BUILT if name != "no cache"]  # a handful of requests shows nothing
    window = max(measured.cell("stock").blocks, key=lambda block: len(block.used)).summary.steady_window
    assert timelines["stock"]["steady"].any() == (window.verdict == "steady")
    requests = measured.requests().to_pandas()
    assert len(requests) == sum(len(block.run.records) for block in measured.blocks)
    assert set(requests["arm"]) == set(BUILT)


def test_attribution_sums_to_the_latency(measured: Headline) -> None:
    shares = headline_tables.attribution(measured)
    assert list(shares.index) == [f"{arm}: {what}" for arm in BUILT for what in ("slowest", "mean")]
    slowest = max(value for value in headline_tables.latencies(measured)["stock"])
    assert shares.loc["stock: slowest"].sum() == pytest.approx(slowest)
    assert (shares.to_numpy() > -1e-6).all()


# --- work units ----------------------------------------------------------------------------------------------------


NAMES = (
    *(f"closed.{name.replace(' ', '-')}.{number}" for name in BUILT[1:] for number in (1, 2)),
    "closed.no-cache.1",
    *(f"open.{name.replace(' ', '-')}.1" for name in LONG),
)


def hand_over(first_run: RunFolder, parent: Path, names: Iterable[str], seconds: float | None = None) -> RunFolder:
    """A new run that starts with these units of the first, each of which took `seconds` where that is given."""
    folder = RunFolder.create(parent)
    for name in names:
        unit = units_in(first_run).get(name)
        assert unit is not None, name
        files = {file: unit.read(file) for file in unit.manifest.files}
        units_in(folder).finish(name, files, unit.seconds if seconds is None else seconds)
    return folder


def test_a_run_of_restored_blocks_alone_gives_the_same_tables(
    parameters: Headline01, measured: Headline, first_run: RunFolder, tmp_path: Path
) -> None:
    told: list[str] = []
    restored = headline.run(parameters, told.append, units_in(hand_over(first_run, tmp_path, NAMES)))
    assert len(told) == len(NAMES)
    assert all("restored from run" in line for line in told)
    assert restored == measured
    assert restored.blocks == measured.blocks
    for table in (headline_tables.summary, headline_tables.percentiles, headline_tables.windows):
        pd.testing.assert_frame_equal(table(restored), table(measured))
    assert restored.requests().equals(measured.requests())


def test_what_is_not_restored_is_measured_in_its_place(
    parameters: Headline01, measured: Headline, first_run: RunFolder, tmp_path: Path
) -> None:
    open_block = f"open.{FULL.replace(' ', '-')}.1"
    missing = ("closed.+chunked.2", open_block)
    told: list[str] = []
    folder = hand_over(first_run, tmp_path, [name for name in NAMES if name not in missing], seconds=30.0)
    resumed = headline.run(parameters, told.append, units_in(folder))
    assert [(b.arm, b.load, b.number, b.order) for b in resumed.blocks] == [
        (b.arm, b.load, b.number, b.order) for b in measured.blocks
    ]
    assert resumed.open_rate == measured.open_rate  # of closed blocks that were restored
    anew = [block for block, before in zip(resumed.blocks, measured.blocks, strict=True) if block != before]
    assert {(block.arm.name, block.load) for block in anew} == {("+chunked", "closed"), (FULL, "open")}
    assert all(units_in(folder).get(name) is not None for name in missing)
    assert [line for line in told if "at most" in line][-1].endswith("at most 1 s")  # the time was used up before


def test_a_run_by_hand_keeps_no_blocks(tmp_path: Path, parameters: Headline01) -> None:
    few = parameters.model_copy(update={"requests_for_p99": 4, "requests_for_p90": 4, "num_blocks": 1})
    folder = RunFolder.create(tmp_path)
    headline.run(few.model_copy(update={"open_requests": 0, "warmup_requests": 0}), units=Units(folder, None))
    assert list(folder.path.iterdir()) == []


# --- transport ------------------------------------------------------------------------------------------------------


def test_clients_of_their_own_send_the_same_over_http(parameters: Headline01, measured: Headline) -> None:
    few = {"requests_for_p99": 12, "requests_for_p90": 6, "num_blocks": 1, "open_requests": 6}
    there = headline.run(parameters.model_copy(update={"transport": "http", **few}))
    assert there.workload_digest == measured.workload_digest
    for cell in (*there.cells("closed"), *there.cells("open")):
        (block,), here = cell.blocks, measured.cell(cell.arm.name, cell.load).blocks[0]
        sent = {record.index: record.prompt_digest for record in here.run.records}
        assert all(sent.get(r.index, r.prompt_digest) == r.prompt_digest for r in block.run.records)
        assert {record.outcome for record in block.used} == {Outcome.OK}
        assert all(record.num_output_tokens == record.max_tokens for record in block.used)
        assert all(record.decode_s is not None for record in block.used)  # the server passes the engine's account on
        assert {record.num_cached_tokens == 0 for record in block.used} == {not cell.arm.prefix_cache}
    assert set(there.requests().column("transport").to_pylist()) == {"http"}


def test_too_few_requests_give_no_verdict_on_a_tail(measured: Headline) -> None:
    figures = {figure.metric: figure for figure in headline_figures.figures(measured)}
    assert "p99_ratio" not in figures
    assert "share_allocation" not in figures  # too few requests: not something that this machine cannot show
    verdicts = headline_figures.verdicts(measured, figures.values()).set_index("claim")["verdict"]
    assert verdicts["c1.p99_ratio"] == "no verdict"
    assert verdicts["c1.bottleneck"] == "no verdict"
    assert verdicts["c1.warm_lengths"] == "not testable here"


# --- figures from records that are made up, so that what must come out is known ------------------------------------


def _record(index: int, latency_s: float, **shares: float) -> RequestRecord:
    sent_s = index * 0.01
    times = (sent_s + latency_s / 2, sent_s + latency_s)
    booked = {f"{name}_s": 0.0 for name in SHARES[1:-1]} | {f"{name}_s": value for name, value in shares.items()}
    return RequestRecord(
        index=index,
        phase=Phase.MEASURED,
        document=0,
        client=0,
        intended_s=None,
        send_s=sent_s,
        first_token_s=times[0],
        end_s=times[1],
        token_times_s=times,
        outcome=Outcome.OK,
        error=None,
        max_tokens=2,
        num_prompt_tokens=1010,
        num_document_tokens=1000,
        num_cached_tokens=1000,
        num_output_tokens=2,
        prompt_digest=str(index),
        **booked,
    )


def _made_up(measured: Headline, stock_scale: float, full_scale: float, num_page_waits: int = 0) -> Headline:
    """800 requests per long arm, latencies spread over 1 to 2 times the scale, a tenth of it scheduling."""
    order = np.random.default_rng(0).permutation(800)
    blocks = []
    for name, scale in (("stock", stock_scale), ("+shared-prefix groups", full_scale)):
        template = next(block for block in measured.blocks if block.arm.name == name)
        latencies = [scale * (1 + place / 800) for place in order]
        records = tuple(
            _record(i, s, queue=0.3 * s, prefill=0.4 * s, decode=0.2 * s, scheduling=0.1 * s)
            for i, s in enumerate(latencies)
        )
        run = Run(records, {}, {})
        stats = dataclasses.replace(template.stats, num_page_waits=num_page_waits, num_preemptions=0)
        summary = summarise(run, ClosedLoad(num_requests=800))
        blocks.append(Block(template.arm, "closed", 0, 0, run, summary, stats))
    return dataclasses.replace(measured, blocks=tuple(blocks))


def _figures(made_up: Headline) -> dict[str, headline_figures.Figure]:
    return {figure.metric: figure for figure in headline_figures.figures(made_up)}


def test_a_tail_three_times_shorter_shows_the_direction_and_lists_what_differs(measured: Headline) -> None:
    made_up = _made_up(measured, 3.0, 1.0)
    figures = _figures(made_up)
    ratio = figures["p99_ratio"]
    assert ratio.value == pytest.approx(3.0)
    assert ratio.ci95 is not None
    assert ratio.ci95[0] < 3.0 < ratio.ci95[1]
    row = headline_figures.verdicts(made_up, figures.values()).set_index("claim").loc["c1.p99_ratio"]
    assert row["verdict"] == "direction only"
    assert "concurrency 3 (stated 64)" in row["why"]


def test_the_decision_page_gets_each_measure_and_the_full_set(measured: Headline) -> None:
    effects = {effect.metric: effect for effect in headline_effects.effects(_made_up(measured, 3.0, 1.0))}
    assert list(effects) == ["E2E P50", "E2E P99", "E2E jitter"]
    p99 = effects["E2E P99"]
    assert (p99.measure, p99.against) == ("chunked + shared-prefix groups", "prefix cache")
    assert p99.ratio == pytest.approx(3.0)
    assert {effect.verdict for effect in effects.values()} == {"helps"}
    assert p99.conditions["documents"] == len(measured.document_tokens)
    assert "kernels of its own" in p99.conditions["with"]  # the arm brings more than its name says
    without_stock = headline_effects.effects(_contaminated(measured, "stock"))
    assert not any("prefix cache" in (effect.measure, effect.against) for effect in without_stock)
    assert "prefix cache" in headline_effects.measures()


def test_a_handful_of_requests_gives_a_bound_where_all_are_longer(measured: Headline) -> None:
    long = _made_up(measured, 3.0, 1.0)
    none, stock = (next(b for b in measured.blocks if b.arm.name == name) for name in ("no cache", "stock"))
    records = tuple(_record(i, 100.0 + i, queue=0, prefill=1, decode=0, scheduling=0) for i in range(3))
    few = dataclasses.replace(_with_records(none, records), load="closed")
    blocks = (few, *(block for block in long.blocks if block.arm == stock.arm))
    (effect,) = headline_effects.effects(dataclasses.replace(measured, blocks=blocks))
    assert (effect.measure, effect.metric, effect.n) == ("prefix cache", "E2E, every request", 3)
    longest = max(record.end_s - record.send_s for record in blocks[1].run.records)
    assert effect.ci_low == pytest.approx(100.0 / longest)
    assert effect.ci_high is None
    assert effect.verdict == "helps"


def test_no_difference_shows_no_direction(measured: Headline) -> None:
    made_up = _made_up(measured, 1.0, 1.0)
    verdicts = headline_figures.verdicts(made_up, headline_figures.figures(made_up)).set_index("claim")["verdict"]
    assert verdicts["c1.p99_ratio"] == "no verdict"


def _with_records(block: Block, records: tuple[RequestRecord, ...]) -> Block:
    run = dataclasses.replace(block.run, records=records)
    return dataclasses.replace(block, run=run, summary=summarise(run, ClosedLoad(num_requests=800)))


def _contaminated(headline: Headline, arm: str) -> Headline:
    """The same, but the arm's cache was not what it declares."""
    blocks = (
        _with_records(block, tuple(dataclasses.replace(record, num_cached_tokens=0) for record in block.run.records))
        if block.arm.name == arm
        else block
        for block in headline.blocks
    )
    return dataclasses.replace(headline, blocks=tuple(blocks))


def _in_convoys(headline: Headline) -> Headline:
    """The same latencies in convoys of 16 alike: worth about 50 independent ones."""

    def at(place: int, record: RequestRecord) -> RequestRecord:
        end_s = place * 0.01 + record.end_s - record.send_s
        return dataclasses.replace(record, index=place, send_s=place * 0.01, end_s=end_s)

    blocks = []
    for block in headline.blocks:
        ascending = sorted(block.run.records, key=lambda record: record.end_s - record.send_s)
        convoys = np.random.default_rng(1).permutation(len(ascending) // 16)
        sent = [ascending[16 * convoy + place] for convoy in convoys for place in range(16)]
        blocks.append(_with_records(block, tuple(itertools.starmap(at, enumerate(sent)))))
    return dataclasses.replace(headline, blocks=tuple(blocks))


@pytest.mark.parametrize("arm", LONG)
def test_a_contaminated_arm_gives_no_verdict_and_is_marked(measured: Headline, arm: str) -> None:
    void = _contaminated(_made_up(measured, 3.0, 1.0), arm)
    figures = headline_figures.figures(void)
    which = "stock" if arm == "stock" else "full"
    names = {figure.metric for figure in figures}
    assert not names & {"p99_ratio", "std_ratio", f"p99_e2e_{which}", f"std_e2e_{which}"}
    assert ("share_allocation" in names) == (arm != "stock")
    verdicts = headline_figures.verdicts(void, figures).set_index("claim")
    assert verdicts.loc["c1.p99_ratio", "verdict"] == "no verdict"
    assert f"{arm} is void: declared primed" in verdicts.loc["c1.p99_ratio", "why"]
    assert f"{arm} (void)" in set(headline_tables.ablation(void)["arm"])
    assert f"{arm} (void)" in headline_tables.latencies(void)
    assert "void: declared primed" in headline_tables.summary(void).set_index("arm").loc[arm, "note"]


def test_a_p99_without_an_interval_names_no_p99_requests(measured: Headline) -> None:
    names = {figure.metric for figure in headline_figures.figures(_in_convoys(_made_up(measured, 1.0, 1.0)))}
    assert "p99_e2e_stock" in names
    assert "share_allocation" not in names


def test_waiting_counts_as_allocation_only_where_pages_were_lacking(measured: Headline) -> None:
    enough = _figures(_made_up(measured, 1.0, 1.0))["share_allocation"]
    lacking = _figures(_made_up(measured, 1.0, 1.0, num_page_waits=1))["share_allocation"]
    assert enough.value == pytest.approx(10.0)
    assert lacking.value == pytest.approx(40.0)


def test_a_tail_with_one_bound_says_which(measured: Headline) -> None:
    convoys = headline_tables.summary(_in_convoys(_made_up(measured, 1.0, 1.0)))["E2E tail (s)"][0]
    assert re.fullmatch(r"P99 1\.9\d \[≥ 1\.\d+\]", convoys)
    calm = headline_tables.summary(_made_up(measured, 1.0, 1.0))["E2E tail (s)"][0]
    assert re.fullmatch(r"P99 1\.9\d \[1\.\d+, [12]\.?\d*\]", calm)


@pytest.mark.parametrize(("slo_s", "says"), [(3.0, "met"), (1.5, "missed"), (1.99, "cannot tell")])
def test_an_open_load_meets_the_slo_or_not(measured: Headline, slo_s: float, says: str) -> None:
    made_up = _made_up(measured, 1.0, 1.0)
    opened = tuple(dataclasses.replace(block, load="open") for block in made_up.blocks)
    parameters = measured.parameters.model_copy(update={"slo_p99_s": slo_s})
    table = headline_tables.summary(dataclasses.replace(made_up, blocks=opened, parameters=parameters))
    assert set(table["note"]) == {f"SLO of {slo_s:g} s: {says}"}
    for row in headline_tables.summary(measured).itertuples():
        is_said = "SLO of 2 s: cannot tell, n too small" in row.note
        assert is_said == (row.load == "open" and "void" not in row.note)


def test_only_a_block_that_ended_early_is_said_to_have(measured: Headline) -> None:
    assert not any("ended early" in note for note in headline_tables.summary(measured)["note"])
    cut = next(block for block in measured.blocks if block.arm.name == "stock" and block.load == "closed")
    kept = [record for record in cut.run.records if record.phase is not Phase.MEASURED or record.index % 2]
    blocks = [_with_records(block, tuple(kept)) if block is cut else block for block in measured.blocks]
    notes = headline_tables.summary(dataclasses.replace(measured, blocks=tuple(blocks))).set_index(["arm", "load"])[
        "note"
    ]
    assert "it ended early" in notes["stock", "closed"]
    assert "it ended early" not in notes[FULL, "closed"]


def test_a_block_of_seconds_ended_early_where_its_last_answer_came_before_they_were_over(measured: Headline) -> None:
    for block_s, is_early in ((0.001, False), (1e6, True)):
        parameters = measured.parameters.model_copy(update={"block_s": block_s})
        notes = headline_tables.summary(dataclasses.replace(measured, parameters=parameters)).query("load == 'closed'")
        assert any("it ended early" in note for note in notes["note"]) == is_early


def test_blocks_are_numbered_from_1_as_the_run_tells_them(measured: Headline) -> None:
    for table in (headline_tables.windows(measured), headline_tables.hit_rates(measured)):
        assert set(table.query("arm == 'stock' and load == 'closed'")["block"]) == {1, 2}


def test_the_page_shows_the_kept_rows_in_fewer_columns(measured: Headline) -> None:
    kept = headline_tables.percentiles(_made_up(measured, 2.0, 1.0))
    row = headline_views.percentiles(kept).query("arm == 'stock' and load == 'closed' and metric == 'e2e'").iloc[0]
    assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", row["P99"])
    assert list(row.index) == ["arm", "load", "metric", "n", "effective n", "P50", "P90", "P99", "max"]
    windows = headline_views.windows(headline_tables.windows(measured))
    assert len(windows) == len(measured.blocks)
    assert all(re.fullmatch(r"\d+\.\d\d – \d+\.\d\d", window) for window in windows["window (s)"])
    coverage = headline_views.coverage(headline_tables.coverage(measured), measured.parameters)
    assert list(coverage["arm"]) == BUILT
    claims = headline_figures.verdicts(measured, headline_figures.figures(_made_up(measured, 3.0, 1.0)))
    shown = headline_views.claims(claims).set_index("claim")["measured"]
    assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\] x", shown["c1.p99_ratio"])
    assert shown["c1.warm_lengths"] == "–"


def test_an_interrupt_cancels_the_clients_before_it_goes_on() -> None:
    seen: list[str] = []

    async def client() -> None:
        try:
            await asyncio.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        in_a_loop_of_its_own(client())
    assert seen == ["cancelled"]


def test_what_the_clients_return_or_raise_comes_back() -> None:
    async def answer(value: int) -> int:
        return 1 // value

    assert in_a_loop_of_its_own(answer(1)) == 1
    with pytest.raises(ZeroDivisionError):
        in_a_loop_of_its_own(answer(0))


def test_the_ablation_shows_the_deepest_tail_that_n_allows(measured: Headline) -> None:
    deep = headline_tables.ablation(_made_up(measured, 2.0, 1.0)).set_index("arm")
    assert set(deep["tail_name"]) == {"P99"}
    assert deep.loc["stock", "low"] < deep.loc["stock", "tail"] < deep.loc["stock", "high"]
    shallow = headline_tables.ablation(measured).set_index("arm")
    assert shallow.loc["no cache", "tail_name"] == "max"
    assert pd.isna(shallow.loc["no cache", "low"])
