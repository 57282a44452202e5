"""The headline under shares of each arm's capacity, with churn, and beside a stand-in for vLLM, on a tiny model."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path

import pytest

from p99lab.errors import P99labError
from p99lab.lab import headline, headline_bars, headline_demand, headline_effects, headline_figures, headline_tables
from p99lab.lab.headline import Block, Headline
from p99lab.lab.headline_arms import arm
from p99lab.lab.headline_bars import Bar, Measured
from p99lab.lab.parameters import CONTRACTS, Headline01, load
from p99lab.probe.load import Run
from p99lab.probe.records import Outcome, Phase, RequestRecord
from p99lab.probe.stats import summarise
from p99lab.probe.workload import OpenLoad
from tests.lab.fake_vllm import BROKEN, make_model, make_site

TINY = (
    "model=dummy:tiny-128k",
    "dtype=float32",
    "device=cpu",
    "threads=1",
    "tokenizer=null",
    "exact_lengths=[200, 8, 2]",
    "num_documents=2",
    "concurrency=2",
    "max_num_seqs=8",
    "chunk_tokens=64",
    "warmup_requests=2",
    "num_blocks=1",
    "block_s=0.4",
    "open_block_requests=0",
    "open_shares=[[0.2, 0.4]]",
    "bursty_shares=[[0.2, 0.4]]",
    "open_rates=[[5000.0, 0.4]]",
    "churn_share=0.2",
    "cold_documents=2",
    "cold_every_s=0.3",
    "arms=[stock, +graphs and overlap, vLLM]",
)


def parameters(tmp_path: Path, *overrides: str, server: str | None = None) -> Headline01:
    site = make_site(tmp_path / "site") if server is None else make_site(tmp_path / "site", server)
    folders = (f"vllm_site={site}", f"vllm_model={make_model(tmp_path / 'model')}")
    given = {text.partition("=")[0]: text for text in (*TINY, *folders, *overrides)}
    made = load(CONTRACTS[headline.NOTEBOOK], "h200", [*given.values()])
    assert isinstance(made, Headline01)
    return made


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Headline:
    return headline.run(parameters(tmp_path_factory.mktemp("peer")))


def test_every_arm_gets_every_load_that_it_can_answer(measured: Headline) -> None:
    table = headline_tables.coverage(measured).set_index("arm")
    for name in ("stock", "+graphs and overlap", "vLLM"):
        for load_name in ("closed", "open 20 %", "bursty 20 %", "churn 20 %"):
            assert table.loc[name, load_name].split()[0].isdecimal(), (name, load_name, measured.left_out)
        assert "above what" in table.loc[name, "open 5000/s"]
    assert set(table.loc["+chunked"]) == {"not run"}


def test_a_peer_is_asked_the_same(measured: Headline) -> None:
    ours, theirs = measured.cell("stock", "open 20 %"), measured.cell("vLLM", "open 20 %")
    assert ours is not None
    assert theirs is not None
    sent = [{r.index: r.prompt_digest for r in cell.blocks[0].run.records} for cell in (ours, theirs)]
    common = sent[0].keys() & sent[1].keys()
    assert common
    assert all(sent[0][index] == sent[1][index] for index in common)
    assert {block.stats is None for block in theirs.blocks} == {True}


def test_cold_documents_are_kept_apart_and_were_cold(measured: Headline) -> None:
    table = headline_demand.churn_table(measured).set_index("arm")
    assert list(table.index) == ["stock", "+graphs and overlap", "vLLM"]
    for name, row in table.iterrows():
        assert row["cold documents"] == len(row["their TTFT (s)"]) == 2, name
        assert row["of whom cold"] == 2
        churn = measured.cell(str(name), "churn 20 %")
        assert churn is not None
        assert {record.document for record in churn.used} <= {0, 1}
        assert {record.document for record in churn.blocks[0].cold} >= {2, 3}
    requests = measured.requests().to_pandas()
    assert set(requests["load"]) == {"closed", "open 20 %", "bursty 20 %", "churn 20 %"}
    assert requests["document"].max() >= 3  # cold ones are among them


def test_tables_take_a_peer_for_no_measure(measured: Headline) -> None:
    ratios = headline_tables.ratios(measured)
    assert set(zip(ratios["arm"], ratios["against"], strict=True)) <= {
        ("+graphs and overlap", "stock"),
        ("+graphs and overlap", "vLLM"),
    }
    assert headline_effects.effects(measured) == []  # on a CPU one of the two arms had no graphs
    on_gpu = measured.parameters.model_copy(update={"device": "cuda"})
    effects = headline_effects.effects(dataclasses.replace(measured, parameters=on_gpu))
    assert not any("vLLM" in (effect.measure, effect.against) for effect in effects)
    assert {effect.load for effect in effects} == {"closed, 2 clients"}  # elsewhere each arm has a rate of its own
    figures = headline_figures.figures(measured)
    assert len(headline_figures.verdicts(measured, figures)) >= 5
    headline_tables.hit_rates(measured)
    here = headline_tables.arms(measured.parameters).set_index("arm")["here"]
    assert here["vLLM"].startswith("measured: unknown, --load-format=dummy ")  # its flags are published
    assert len(headline_bars.bars(measured)) == 0  # another scenario


def test_a_peer_that_does_not_start_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its log stays
    few = ("open_shares=[]", "bursty_shares=[]", "open_rates=[]", "cold_documents=0", "arms=[stock, vLLM]")
    found = headline.run(parameters(tmp_path, *few, server=BROKEN))
    assert found.cell("vLLM") is None
    stock = found.cell("stock")
    assert stock is not None
    assert stock.used
    coverage = headline_tables.coverage(found).set_index("arm")["closed"]
    assert coverage["vLLM"].startswith("not run: vLLM ended with exit code 1: ImportError")


def test_a_peer_alone_that_does_not_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its log stays
    with pytest.raises(P99labError, match=r"^nothing was measured: vLLM, not run: .*ImportError"):
        headline.run(parameters(tmp_path, "arms=[vLLM]", server=BROKEN))


# --- figures from records that are made up, so that what must come out is known ------------------------------------


def _record(index: int, latency_s: float, every_s: float, document: int = 0) -> RequestRecord:
    at_s = index * every_s
    return RequestRecord(
        index=index,
        phase=Phase.MEASURED,
        document=document,
        client=None,
        intended_s=at_s,
        send_s=at_s,
        first_token_s=at_s + latency_s / 2,
        end_s=at_s + latency_s,
        token_times_s=(at_s + latency_s / 2, at_s + latency_s),
        outcome=Outcome.OK,
        error=None,
        max_tokens=2,
        num_prompt_tokens=1010,
        num_document_tokens=1000,
        num_cached_tokens=0 if document > 3 else 1000,
        num_output_tokens=2,
        prompt_digest=str(index),
    )


def _block(name: str, load: str, rate: float, latency_s: float, cold_s: tuple[float, ...] = ()) -> Block:
    records = tuple(_record(i, latency_s * (1 + (i * 37 % 100) / 1000), 1.0 / rate) for i in range(800))
    run = Run(records, {}, {})
    cold = tuple(_record(i, 2 * seconds, 1.0, document=4 + i) for i, seconds in enumerate(cold_s))
    summary = summarise(run, OpenLoad(num_requests=800, rate=rate))
    return Block(arm(name), load, 0, 0, run, summary, None, rate, cold)


def _few(block: Block, num_requests: int) -> Block:
    """The same, with fewer requests."""
    run = Run(block.run.records[:num_requests], {}, {})
    load = OpenLoad(num_requests=num_requests, rate=block.rate or 1.0)
    return dataclasses.replace(block, run=run, summary=summarise(run, load))


def _made_up(measured: Headline, *blocks: Block) -> Headline:
    h200 = load(CONTRACTS[headline.NOTEBOOK], "h200", ("vllm_site=/site", "vllm_model=/model"))
    assert isinstance(h200, Headline01)
    return dataclasses.replace(measured, parameters=h200, blocks=blocks)


FULL = "+graphs and overlap"


def test_answers_that_are_not_what_was_asked_for_are_remarked_upon(measured: Headline) -> None:
    block = _block("vLLM", "closed", 9.0, 7.0)
    short = tuple(dataclasses.replace(record, num_output_tokens=1) for record in block.run.records)
    load = OpenLoad(num_requests=800, rate=9.0)
    run = dataclasses.replace(block.run, records=short)
    made_up = _made_up(measured, dataclasses.replace(block, run=run, summary=summarise(run, load)))
    (note,) = headline_tables.summary(made_up)["note"]
    assert "answers are shorter than asked for" in note


def test_goodput_is_the_highest_rate_below_the_first_that_misses(measured: Headline) -> None:
    made_up = _made_up(
        measured,
        _block(FULL, "open 50 %", 35.0, 0.4),
        _block(FULL, "open 70 %", 50.0, 0.9),
        _block(FULL, "open 90 %", 63.0, 2.5),
        _block("vLLM", "closed", 9.0, 7.0),
        _block("vLLM", "open 50 %", 4.0, 1.5),
        _block("vLLM", "bursty 50 %", 4.0, 9.0),  # bursts are another matter
        _block("stock", "open 50 %", 3.0, 2.5),
    )
    table = headline_demand.goodput_table(made_up).set_index("arm")
    assert (table.loc[FULL, "at least/s"], table.loc[FULL, "below/s"]) == (50.0, 63.0)
    assert "open 90 %: 63 (misses)" in table.loc[FULL, "rates tried (verdict)"]
    assert table.loc["vLLM", "at least/s"] == 4.0
    assert table.loc["vLLM", "below/s"] == pytest.approx(9.0, rel=0.1)  # nothing was missed: its capacity is a bound
    assert math.isnan(table.loc["stock", "at least/s"])
    assert table.loc["stock", "below/s"] == 3.0


def _verdicts(measured: Headline, *blocks: Block) -> dict[str, str]:
    return headline_bars.bars(_made_up(measured, *blocks)).set_index("figure")["verdict"].to_dict()


COLD = (12.0, 13.0, 14.0, 15.0, 41.0)


def test_bars_are_held_or_missed_by_what_was_measured(measured: Headline) -> None:
    made_up = _made_up(
        measured,
        _block(FULL, "open 50 %", 35.0, 0.4),
        _block(FULL, "open 70 %", 50.0, 0.9),
        _block("vLLM", "open 50 %", 4.0, 1.5),
        _block("vLLM", "open 70 %", 6.0, 3.0),
        _block(FULL, "churn 50 %", 35.0, 0.7, cold_s=COLD),
    )
    bars = headline_bars.bars(made_up).set_index("figure")
    verdicts = bars["verdict"].to_dict()
    assert verdicts[headline_bars.CLOSED_P99.figure] == "not run"
    assert verdicts[headline_bars.GOODPUT.figure] == "held"
    assert bars.loc[headline_bars.GOODPUT_TIMES.figure, "measured"] == pytest.approx(
        50 / 6
    )  # it may reach just below 6
    assert verdicts[headline_bars.HALF_P99.figure] == "held"
    assert bars.loc[headline_bars.CHURN_TIMES.figure, "measured"] == pytest.approx(0.7 / 0.4)
    assert verdicts[headline_bars.CHURN_TIMES.figure] == "missed"
    assert bars.loc[headline_bars.CHURN_TTFT.figure, "measured"] == 41.0
    assert bars.loc[headline_bars.CHURN_TTFT.figure, "n"] == 5
    assert verdicts[headline_bars.CHURN_TTFT.figure] == "missed"


def test_a_bar_says_why_it_is_not_judged(measured: Headline) -> None:
    half, churn = _block(FULL, "open 50 %", 35.0, 0.4), _block(FULL, "churn 50 %", 35.0, 0.7, cold_s=COLD)
    found = _verdicts(measured, _few(half, 300), churn)
    assert found[headline_bars.GOODPUT.figure] == found[headline_bars.HALF_P99.figure] == "cannot tell"
    assert found[headline_bars.CHURN_TIMES.figure] == "cannot tell"
    assert found[headline_bars.GOODPUT_TIMES.figure] == "not run"
    void = dataclasses.replace(churn, summary=dataclasses.replace(churn.summary, void=("the client was late",)))
    found = _verdicts(measured, half, void)
    assert found[headline_bars.CHURN_TIMES.figure] == found[headline_bars.CHURN_TTFT.figure] == "void"
    found = _verdicts(measured, half, dataclasses.replace(churn, cold=churn.cold[:4]))
    assert found[headline_bars.CHURN_TTFT.figure].startswith("too few: 4 cold documents")
    warm = dataclasses.replace(churn.cold[0], num_cached_tokens=1000)
    found = _verdicts(measured, half, dataclasses.replace(churn, cold=(warm, *churn.cold[1:])))
    assert found[headline_bars.CHURN_TTFT.figure] == "not cold"


def test_goodput_that_is_known_between_two_rates_only_is_neither_held_nor_missed(measured: Headline) -> None:
    light, peer = _block(FULL, "open 6.2/s", 6.2, 0.3), _block("vLLM", "open 50 %", 4.0, 1.5)
    unknown = _few(_block(FULL, "open 50/s", 50.0, 0.9), 300)
    found = _verdicts(measured, light, unknown, _block(FULL, "open 90 %", 63.0, 2.5), peer)
    assert found[headline_bars.GOODPUT.figure] == "missed, by its value alone"  # somewhere from 6.2 to 63
    assert found[headline_bars.GOODPUT_TIMES.figure] == "cannot tell"  # nothing bounds the peer's
    found = _verdicts(measured, light, _block(FULL, "open 40/s", 40.0, 2.5), peer)
    assert found[headline_bars.GOODPUT.figure] == "missed"


def test_failed_requests_hold_no_bar(measured: Headline) -> None:
    half = _block(FULL, "open 50 %", 35.0, 0.4)
    records = tuple(
        dataclasses.replace(record, outcome=Outcome.ERROR) if record.index % 40 == 0 else record
        for record in half.run.records
    )
    run = dataclasses.replace(half.run, records=records)
    failing = dataclasses.replace(half, run=run, summary=summarise(run, OpenLoad(num_requests=800, rate=35.0)))
    assert _verdicts(measured, failing)[headline_bars.HALF_P99.figure] == "20 of 800 failed"


def test_a_short_or_drifting_closed_load_is_not_judged(measured: Headline) -> None:
    closed = _block(FULL, "closed", 70.0, 0.9)
    assert _verdicts(measured, closed)[headline_bars.CLOSED_P99.figure].startswith("too short: 800 requests in 11 s")
    blocks = [dataclasses.replace(closed, number=number) for number in range(11)]  # 8 800 in 126 s
    assert _verdicts(measured, *blocks)[headline_bars.CLOSED_P99.figure] == "held"
    drifting = dataclasses.replace(closed.summary.steady_window, verdict="drifting")
    blocks[3] = dataclasses.replace(closed, summary=dataclasses.replace(closed.summary, steady_window=drifting))
    assert _verdicts(measured, *blocks)[headline_bars.CLOSED_P99.figure] == "not steady"


@pytest.mark.parametrize(
    "easier",
    [
        {"num_documents": 1},
        {"model": "dummy:smollm2-135m"},
        {"dtype": "float16"},
        {"answer_tokens_min": 8},
        {"exact_lengths": (130_816, 64, 8)},
        {"slo_p99_s": 30.0},
        {"transport": "in-process"},
    ],
)
def test_an_easier_scenario_has_no_bars(measured: Headline, easier: dict[str, object]) -> None:
    made_up = _made_up(measured, _block(FULL, "open 50 %", 35.0, 0.4))
    assert len(headline_bars.bars(made_up))
    parameters = made_up.parameters.model_copy(update=easier)
    assert not len(headline_bars.bars(dataclasses.replace(made_up, parameters=parameters)))


def test_a_cold_document_that_was_never_answered_is_no_short_wait(measured: Headline) -> None:
    block = _block(FULL, "churn 50 %", 35.0, 0.5, cold_s=(12.0, 13.0))
    lost = dataclasses.replace(block.cold[1], outcome=Outcome.TIMEOUT)
    made_up = _made_up(measured, dataclasses.replace(block, cold=(block.cold[0], lost)))
    waits = headline_demand.churn_table(made_up)["their TTFT (s)"][0]
    assert waits == [12.0, math.inf]


@pytest.mark.parametrize(
    ("is_floor", "interval", "verdict"),
    [
        (False, (7.0, 6.0, 8.0), "held"),
        (False, (7.9, 7.0, 8.1), "held, by its value alone"),
        (False, (7.9, 7.0, None), "held, by its value alone"),
        (False, (8.2, 7.9, 9.0), "missed, by its value alone"),
        (False, (8.2, 8.1, None), "missed"),
        (True, (9.0, 8.1, None), "held"),
        (True, (9.0, 7.9, 10.0), "held, by its value alone"),
        (True, (7.0, 6.0, 7.9), "missed"),
        (True, (7.0, 6.0, 8.1), "missed, by its value alone"),
        (True, (None, None, None), "cannot tell"),
    ],
)
def test_a_bar_is_held_or_missed_by_a_whole_interval(
    is_floor: bool, interval: tuple[float | None, float | None, float | None], verdict: str
) -> None:
    assert Bar("a", 8.0, "s", is_floor).judge(Measured(*interval))["verdict"] == verdict
    assert Bar("a", 8.0, "s", is_floor).judge(Measured(*interval, without="void"))["verdict"] == "void"
