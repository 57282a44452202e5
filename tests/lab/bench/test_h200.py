"""`bench h200`: floors against figures worked out by hand, sizes, and a whole run on a shape small enough for a CPU."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from p99lab.cli import app
from p99lab.engine.config import SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.geometry import Geometry
from p99lab.engine.request import SamplingParams
from p99lab.errors import BadParameterError, P99labError
from p99lab.lab.bench import h200, h200_compile, h200_http, h200_scheduling, h200_transformers, report
from p99lab.lab.bench.h200 import Ceilings, Peers, Report
from p99lab.lab.bench.h200_engine import ANY_LOAD, Ours, Steps
from p99lab.lab.bench.h200_floors import Rates, Work, attention_flops, floor_s, layer_weights, product_flops
from p99lab.lab.bench.h200_http import Sample
from p99lab.lab.bench.h200_runner import reachable
from p99lab.lab.bench.h200_sizes import BARS_MS, CASES, FAKE, OVER_HTTP, H200Bench, chosen
from p99lab.lab.bench.h200_transformers import config_values
from p99lab.lab.bench.rows import BenchRow
from p99lab.lab.headline_clients import served
from p99lab.lab.vllm_server import VllmSpec
from p99lab.observe.ceilings import Ceiling
from p99lab.probe.workload import make_documents, queries
from tests.lab.fake_vllm import BROKEN, SERVER, make_model, make_site

H200 = Rates(bytes_per_s=4.2e12, flops_per_s=740e12)
TINY = H200Bench(
    model="dummy:tiny-128k",
    dtype="float32",
    device="cpu",
    num_pages=300,
    context_len=400,
    num_documents=2,
    document_len=300,
    question_len=8,
    num_requests=3,
    short_len=60,
    num_alone_steps=12,
    answer_len=5,
    num_questions=2,
    repeats=1,
    num_prefills=1,
    num_cold=2,
    num_transformers_steps=2,
    chunk_tokens=128,
    transformers=False,
    closed_s=0.3,
    closed_warmup_s=0.1,
    closed_answer_len=4,
    closed_chunk_tokens=64,
    group_requests=(1, 4),
    group_documents=(1, 2),
    group_prefixes=(128, 1024),
    group_cell_s=0.01,
    compile_tokens=(2,),
    compile_ways=("own", "default"),
)


@pytest.fixture(scope="module")
def llama() -> Geometry:
    return Geometry.named("llama-3.1-8b")


@pytest.mark.parametrize(
    ("work", "rates", "milliseconds"),
    [
        # (15.0 GB of weights + 131 072 tokens of 128 KiB) ÷ 4.2 TB/s
        (Work.decode_alone(131_072), H200, 7.7),
        # the weights and 4 documents of 130 816 tokens; what the 64 requests have of their own is 0.16 ms more
        (Work.decode_shared(64, 4, 130_816, 0), H200, 19.9),
        # 57 TFLOP of products and 281 of attention ÷ 740 TFLOP/s
        (Work.questions(64, 4, 130_816, 64), H200, 457),
        # the weights and 64 × 1 024 tokens of 128 KiB
        (Work.decode_apart(64, 1024), H200, 5.6),
        # one question reads as much as a decode step, and computes less
        (Work.questions(1, 1, 130_816, 64), H200, 7.7),
        # a round of the closed load: 64 × 79 tokens, 72 TFLOP of products and 347 of attention
        (Work.answers(64, 4, 130_816, 64, 16), H200, 566),
    ],
)
def test_floors_are_those_worked_out_by_hand(llama: Geometry, work: Work, rates: Rates, milliseconds: float) -> None:
    assert 1e3 * floor_s(llama, work, rates) == pytest.approx(milliseconds, rel=0.006)


def test_a_cold_prompts_floor(llama: Geometry) -> None:
    """1 830 TFLOP of products and 4 504 of attention at 740 TFLOP/s. The 9.7 s stated elsewhere compute the output head
    for every token too, and attention at the 639 TFLOP/s that FA3 reaches."""
    prompt = Work.prefill(131_072)
    assert floor_s(llama, prompt, H200) == pytest.approx(8.56, abs=0.01)
    whole = Work(131_072, 131_072, 0, prompt.num_pairs)
    elsewhere_s = product_flops(llama, whole) / H200.flops_per_s + attention_flops(llama, whole) / 639e12
    assert elsewhere_s == pytest.approx(9.7, abs=0.02)


def test_weights_and_flops(llama: Geometry) -> None:
    assert layer_weights(llama) == 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    one = Work.decode_alone(1000)
    assert product_flops(llama, one) == 2 * (layer_weights(llama) + 128_256 * 4096)
    assert attention_flops(llama, one) == 4 * 32 * 4096 * 1000


def test_cases_are_chosen_by_name() -> None:
    assert chosen([]) == frozenset(CASES)
    assert chosen(["warm", "itl-1"]) == {"warm", "itl-1"}
    with pytest.raises(BadParameterError, match="no case 'decode1'; did you mean 'decode-1'"):
        chosen(["decode1"])


def test_bars_hold_for_the_stated_scenario_alone() -> None:
    assert H200Bench().is_stated
    assert H200Bench(device="cuda:1", transformers=False, num_transformers_steps=3, compile_tokens=(1,)).is_stated
    for name, value in {
        "document_len": 1000,
        "short_len": 512,
        "answer_len": 16,
        "num_alone_steps": 100,
        "closed_answer_len": 4,
        "primed": "fake",
        "num_cold": 1,
        "chunk_tokens": 2048,
        "group_prefixes": (256,),
        "num_pages": 9000,
    }.items():
        assert H200Bench(**{name: value}).deviations == (f"{name}={value}",)
    assert H200Bench(device="cpu").deviations == ("device=cpu",)
    assert set(BARS_MS) < set(CASES)


def _report(peers: Peers, bench: H200Bench | None = None) -> Report:
    return Report(bench or H200Bench(), Geometry.named("llama-3.1-8b"), Rates(4.5e12, 740e12), peers)


def test_decode_short_is_held_against_the_floor_that_was_stated() -> None:
    """1.25 × 5.6 ms, whatever this machine's own floor is, and whatever vLLM takes over HTTP."""
    short = _report(Peers(vllm={"itl-short": Sample(0.0068, 100)}))
    row = short.row("decode-short", Sample(0.00699, 128))
    assert (row.bar, row.verdict, row.peer) == (7.0, "held", None)
    assert row.floor == pytest.approx(5.6 * 4.2 / 4.5, rel=0.01)
    assert row.ratio_to_floor == pytest.approx(6.99 / row.floor)
    assert short.row("decode-short", Sample(0.00701, 128)).verdict == "missed"


def test_itl_short_is_held_against_vllms_over_http() -> None:
    short = _report(Peers(vllm={"itl-short": Sample(0.0095, 100)}))
    row = short.row("itl-short", Sample(0.0094, 90))
    assert (row.bar, row.verdict, row.peer, row.n) == (pytest.approx(9.5), "held", "vLLM", 90)
    assert short.row("itl-short", Sample(0.0096, 90)).verdict == "missed"
    noted = _report(Peers(vllm={"itl-short": Sample(0.0095, 100, note="few")}))
    assert noted.row("itl-short", Sample(0.0094, 9, note="some")).note == "some; vLLM: few"
    alone = _report(Peers(notes={"vLLM": "vLLM: not run, no site given"})).row("itl-short", Sample(0.0094, 90))
    assert (alone.bar, alone.verdict, alone.note) == (None, None, "vLLM: not run, no site given")
    assert _report(Peers(vllm={"itl-short": Sample(0.0095, 9)}), TINY).row("itl-short", Sample(0.0094, 9)).bar is None


def test_what_has_failed_has_a_reason_and_no_verdict() -> None:
    """On either side: a peer that has failed is no bar, and its cell is empty."""
    theirs = Peers(vllm={"itl-short": Sample(math.nan, 0, "1 of 64 requests were answered"), "cold": Sample(10.3, 3)})
    row = _report(theirs).row("itl-short", Sample(0.0094, 90))
    assert (row.peer, row.peer_value, row.ratio_to_peer, row.bar, row.verdict) == (None,) * 5
    assert row.note == "vLLM: 1 of 64 requests were answered"
    ours = _report(theirs).row("cold", Sample(math.nan, 0, "2 of 3 requests were answered"))
    assert math.isnan(ours.value)
    assert (ours.bar, ours.verdict, ours.ratio_to_floor) == (10_200.0, None, None)
    assert (ours.peer, ours.peer_value, ours.ratio_to_peer) == ("vLLM", pytest.approx(10_300), None)
    assert ours.note == "2 of 3 requests were answered"
    (record,) = report.as_record([ours])["rows"]
    assert (record["value"], record["verdict"]) == (None, None)


def test_a_decode_case_has_its_step_by_every_clock() -> None:
    steps = Steps(p50_s=0.0088, p99_s=0.009, n=1040, device_s=0.0085, host_s=0.001, idle_share=0.01, graph_share=0.995)
    ours = SimpleNamespace(decode_alone=lambda: steps, decode_shared=None, decode_apart=None)
    found = {row.name.partition(": ")[2]: row for row in _report(Peers()).in_process("decode-1", ours)}
    assert found[CASES["decode-1"]].verdict == "held"
    assert found["device, a step in the mean"].value == pytest.approx(8.5)
    idle = found["time without a step"]
    assert (idle.value, idle.note) == (pytest.approx(1.0), "99.5 % of steps replayed from a graph")


@pytest.mark.parametrize(("read", "rate"), [(4500.0, 4.5e12), (4100.0, 4.2e12)])
def test_floors_take_the_faster_of_reading_and_copying(
    monkeypatch: pytest.MonkeyPatch, read: float, rate: float
) -> None:
    best = {"device read": read, "device copy": 4200.0, "device matmul bf16": 780e3}
    found = [Ceiling(name, "", value, value, "") for name, value in best.items()]
    monkeypatch.setattr(h200, "device_ceilings", lambda sizes: found)
    measured = Ceilings.measured(H200Bench())
    assert measured.rates == Rates(rate, 780e12)
    assert {row.name: row.value for row in measured.rows} == best | {"device matmul bf16": 780.0}
    assert [row.name for row in measured.rows if row.note] == ["device read" if read > 4200 else "device copy"]
    found[0] = Ceiling("device read", "GB/s", None, None, "not testable here")
    with pytest.raises(P99labError, match="no floors can be given"):
        Ceilings.measured(H200Bench())


def test_the_sizes_fit_the_context() -> None:
    bench = H200Bench()
    for workload in (bench.shared, bench.whole, bench.short):
        assert workload.max_context_len <= bench.context_len
    assert bench.short.max_context_len - bench.answer_len // 2 == bench.short_len


def test_nothing_is_shared_where_nothing_is_to_be() -> None:
    """A fresh document differs from others in one token, its first: those of a case have to differ in it."""
    bench = H200Bench()
    for workload, first, count in (
        (bench.short, bench.num_requests, bench.num_requests),  # decode-short comes after decode-64
        (bench.short, h200_http.first_query("itl-short"), bench.num_requests),
        (bench.whole, h200_http.first_query("cold"), bench.num_cold),
    ):
        asked = itertools.islice(queries(workload, make_documents(workload), ANY_LOAD, first=first), count)
        assert len({int(query.prompt.token_ids[0]) for query in asked}) == count


def test_every_case_has_a_row_with_its_floor_and_vllm_beside_those_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = _as_if_the_headline_had_this_model(monkeypatch)
    vllm = VllmSpec(make_site(tmp_path / "site"), make_model(tmp_path / "model"))
    told: list[str] = []
    bench = TINY.model_copy(update={"compile_ways": ("own",)})  # compiling for a CPU takes half a minute
    rows = {row.name.split(":")[0]: row for row in reversed([*h200.rows(bench, frozenset(CASES), vllm, told.append)])}
    for case in CASES:  # a case's own row is its first
        row = rows[case]
        assert row.floor is not None
        if case == "closed-idle":
            assert (row.unit, row.floor, row.ratio_to_floor) == ("%", 0.0, None)
        else:
            assert row.ratio_to_floor == pytest.approx(row.value / row.floor)
        assert math.isfinite(row.value)
        assert row.bar is None
        assert (row.peer == "vLLM") == (case in OVER_HTTP)
        if row.peer_value is not None and row.peer_value > 0:  # the stand-in may answer in no time
            assert row.ratio_to_peer == pytest.approx(row.peer_value / row.value)
    assert rows["itl-1"].n == 3 * 4
    assert rows["ttft-1"].n == 2
    assert rows["cold"].n == bench.num_cold
    assert rows["memory copy"].unit == rows["memory read"].unit == "GB/s"
    assert "--max-num-batched-tokens=8192" in rows["vLLM unknown"].note
    assert "device=cpu, model=dummy:tiny-128k" in rows["no verdicts"].note
    settings = {name: row.value for name, row in rows.items() if name.startswith("scheduler")}
    assert settings == {"scheduler in process": 128, "scheduler of closed-idle": 64, "scheduler over HTTP": 128}
    (over_http,) = scheduled
    assert (over_http.max_num_batched_tokens, over_http.max_step_s) == (128, h200_scheduling.headline().max_step_s)
    assert rows["compile"].name == "compile: own, T = 2"
    assert rows["groups, 4 on 2 × 128"].detail
    assert "starting vLLM" in told
    assert not any("no site given" in line for line in told)


def _as_if_the_headline_had_this_model(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerConfig]:
    """How the engine is scheduled when it is served, once that has happened."""
    same = h200_scheduling.headline().model_copy(update={"model": TINY.model, "dtype": TINY.dtype})
    seen: list[SchedulerConfig] = []

    @contextmanager
    def watched(engine: Engine, on_loss: Callable[[], object]) -> Iterator[str]:
        seen.append(engine.config.scheduler)
        with served(engine, on_loss) as url:
            yield url

    monkeypatch.setattr(h200_scheduling, "headline", lambda: same)
    monkeypatch.setattr(h200, "served", watched)
    return seen


def test_a_peer_that_fails_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its log stays
    broken = VllmSpec(make_site(tmp_path / "site", BROKEN), make_model(tmp_path / "model"))
    peers = h200.measure_peers(TINY, frozenset({"ttft-1"}), broken)
    name, sample, note = peers.of("ttft-1")
    assert (name, sample) == (None, None)
    assert note is not None
    assert "no kernels for this GPU" in note
    assert h200.measure_peers(TINY, frozenset({"warm"}), broken).vllm == {}  # not even started


def test_a_peers_answers_that_are_too_short_are_no_figure(tmp_path: Path) -> None:
    brief = SERVER.replace('asked["max_tokens"]', 'min(2, asked["max_tokens"])')
    vllm = VllmSpec(make_site(tmp_path / "site", brief), make_model(tmp_path / "model"))
    told: list[str] = []
    peers = h200.measure_peers(TINY, frozenset({"ttft-1", "itl-short"}), vllm, told.append)
    assert peers.of("ttft-1")[0] == "vLLM"
    note = "vLLM: 3 of 3 answers are not as long as asked for (2 tokens of 5)"
    assert peers.of("itl-short") == (None, None, note)
    assert note.replace("vLLM:", "vLLM, itl-short:") in told


def test_a_peer_that_dies_keeps_what_it_has_reached(tmp_path: Path) -> None:
    dying = SERVER.replace("import json, sys", "import json, os, sys").replace(
        "        usage = {", "        if number == 5:\n            os._exit(1)\n        usage = {"
    )
    vllm = VllmSpec(make_site(tmp_path / "site", dying), make_model(tmp_path / "model"))
    peers = h200.measure_peers(TINY, frozenset({"ttft-1", "itl-64", "itl-short"}), vllm)
    assert peers.of("ttft-1")[1] is not None
    assert peers.of("itl-64")[2].startswith("vLLM: 0 of 3 requests were answered (")
    assert "does not answer" in peers.of("itl-short")[2]


def test_rows_of_documents_that_nobody_has_computed_say_so() -> None:
    fake = TINY.model_copy(update={"primed": "fake"})
    found = [*h200.rows(fake, frozenset({"decode-64", "decode-short"}), None)]
    of_documents = [row.note for row in found if row.name.startswith("decode-64")]
    assert len(of_documents) == 4
    assert all(FAKE in note for note in of_documents)
    assert not any(FAKE in (row.note or "") for row in found if row.name.startswith("decode-short"))
    (why,) = (row.note for row in found if row.name == "no verdicts")
    assert "primed=fake" in why


def test_over_http_the_engine_is_to_run_as_the_headline_does() -> None:
    tier = h200_scheduling.headline()
    there = h200_scheduling.over_http(H200Bench())
    assert (there.max_num_batched_tokens, there.max_step_s) == (tier.chunk_tokens, tier.max_step_s)
    (_, closed, row) = h200_scheduling.rows(H200Bench(), frozenset({"warm", "closed-idle", "cold"}))
    assert (row.name, row.value) == ("scheduler over HTTP: max_num_batched_tokens", tier.chunk_tokens)
    assert f"max_step_s={tier.max_step_s}" in row.note
    assert closed.note == row.note
    assert h200_scheduling.over_http(H200Bench(model="dummy:tiny-128k")) == H200Bench().engine.scheduler
    assert [*h200_scheduling.rows(H200Bench(), frozenset({"groups", "compile"}))] == []  # none has a scheduler


def test_questions_take_what_their_steps_do_beside_computing() -> None:
    """Copying pages, which the device's own clock leaves out."""
    engine = MagicMock()
    engine.stats.return_value = SimpleNamespace(busy_s=0.5, device_s=0.4)
    ours = Ours(TINY, engine)
    ours.prime()
    assert ours.questions() == [0.5] * TINY.repeats


def test_fake_documents_are_known_and_nobody_has_computed_them() -> None:
    """Their pages hold what the pool was filled with, and the next question finds them."""
    fake = TINY.model_copy(update={"primed": "fake"})
    with reachable(fake.engine) as (engine, runner):
        ours = h200.Ours(fake, engine)
        h200.prime(fake, ours, runner)
        filled = runner.pool.k.clone()
        assert engine.stats().num_cached_pages == sum(-(-300 // 64) for _ in ours.documents)
        assert float(filled.std()) == pytest.approx(1.0, abs=0.01)
        (answer,) = engine.generate([ours.documents[0].passage.token_ids], SamplingParams(max_tokens=2))
        assert answer.usage is not None
        assert answer.usage.num_cached_tokens == 299
        assert len(answer.token_ids) == 2
        assert not filled.equal(runner.pool.k)  # what is asked is computed again


def test_transformers_second_run_of_the_whole_context_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 100.0, 107.0, 107.0, 108.0, 108.0, 110.0])
    monkeypatch.setattr(h200_transformers, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    times = h200_transformers.run(TINY)
    assert (times.prefill_s, times.steps_s) == (7.0, (1.0, 2.0))


def test_transformers_beside_the_cases_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which may fail or take too long: the bench goes on with a reason."""
    bench, cases = TINY.model_copy(update={"transformers": True}), frozenset({"prefill", "decode-1"})
    told = SimpleNamespace(returncode=0, stdout='noise\n{"prefill_s": 11.7, "steps_s": [0.1, 0.3, 0.2]}\n', stderr="")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", lambda *arguments, **options: told)
        peers = h200.measure_peers(bench, cases, None)
    assert peers.of("prefill") == ("transformers", Sample(11.7, 1), None)
    assert peers.of("decode-1") == ("transformers", Sample(0.2, 3), None)
    with monkeypatch.context() as patched:
        patched.setattr(h200_transformers, "MODULE", "p99lab.lab.bench.no_such_module")
        failed = h200.measure_peers(bench, cases, None).of("prefill")
        patched.setattr(h200_transformers, "TIMEOUT_S", 1e-3)
        late = h200.measure_peers(bench, cases, None).of("prefill")
    assert failed[:2] == late[:2] == (None, None)
    assert "no_such_module" in failed[2]
    assert late[2] == "transformers did not end within 0 s"


def test_compile_alone_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        h200_compile, "rows", lambda *arguments: iter([BenchRow("compile: own, T = 2", 1.0, "µs/layer")])
    )
    told: list[str] = []
    assert [*h200.rows(TINY, frozenset({"compile"}), None, told.append)][-1].name == "compile: own, T = 2"
    assert "starting the engine" not in told


def test_a_geometry_as_transformers_has_it(llama: Geometry) -> None:
    values = config_values(llama)
    assert values["rope_parameters"]["rope_type"] == "llama3"
    assert values["rope_parameters"]["rope_theta"] == 500_000.0
    assert values["num_key_value_heads"] == 8


def test_its_options_are_its_own() -> None:
    said = CliRunner().invoke(app, ["bench", "plan", "--only", "warm"])
    assert isinstance(said.exception, BadParameterError)
    assert "only for p99lab bench h200" in str(said.exception)
    alone = CliRunner().invoke(app, ["bench", "h200", "--vllm-site", "."])
    assert isinstance(alone.exception, BadParameterError)
    argument = CliRunner().invoke(app, ["bench", "h200", "--vllm-argument", "--max-num-seqs=8"])
    assert str(argument.exception) == "--vllm-argument: only with --vllm-site"


def test_without_a_gpu_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200, "has_gpu", lambda: False)
    said = CliRunner().invoke(app, ["bench", "h200", "--out", str(tmp_path / "rows")])
    assert isinstance(said.exception, BadParameterError)
    assert "needs an NVIDIA GPU" in str(said.exception)
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("bench", ["plan", "h200"])
def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: str
) -> None:
    begun: list[str] = []

    def rows(*_: object) -> Iterator[BenchRow]:
        begun.append(bench)
        yield BenchRow("a", 1.0, "ms")

    monkeypatch.setattr(h200, "rows", rows)
    monkeypatch.setattr(report, "run", lambda _: [*rows()])
    (tmp_path / "file").touch()
    said = CliRunner().invoke(app, ["bench", bench, "--out", str(tmp_path / "file")])
    assert isinstance(said.exception, BadParameterError)
    assert str(said.exception) == f"cannot write to {tmp_path}/file: File exists"
    assert begun == []


def test_notes_follow_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [BenchRow("a, one of many", 1.0, "ms", detail=True, note="not shown"), BenchRow("a", 2.0, "ms", note="why")]
    asked = []

    def rows(bench: H200Bench, *others: object) -> Iterator[BenchRow]:
        asked.append(bench)
        yield from given

    monkeypatch.setattr(h200, "rows", rows)
    options = ["bench", "h200", "-p", "primed=fake", "-p", "seed=7", "--out", str(tmp_path)]
    said = CliRunner().invoke(app, options)
    assert asked == [H200Bench(primed="fake", seed=7)]
    assert said.output.rstrip().endswith("a: why")
    assert "not shown" not in said.output
    assert sorted(os.listdir(tmp_path)) == ["bench_h200.json", "bench_h200.md", "bench_h200.parquet"]
    monkeypatch.setattr(report, "run", lambda name: given)
    plain = CliRunner().invoke(app, ["bench", "plan", "--json", "--out", str(tmp_path)])
    assert [row["note"] for row in json.loads(plain.output)["rows"]] == ["not shown", "why"]
    assert (tmp_path / "bench_plan.md").read_text().count("why") == 1
