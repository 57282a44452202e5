"""`bench h200`: floors against figures worked out by hand, sizes, and a whole run on a shape small enough for a CPU."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from p99lab.cli import app
from p99lab.engine.geometry import Geometry
from p99lab.engine.request import SamplingParams
from p99lab.errors import BadParameterError
from p99lab.lab.bench import h200, h200_transformers
from p99lab.lab.bench.h200_engine import Ours
from p99lab.lab.bench.h200_floors import Rates, Work, attention_flops, floor_s, layer_weights, product_flops
from p99lab.lab.bench.h200_runner import reachable
from p99lab.lab.bench.h200_sizes import BARS_MS, CASES, OVER_HTTP, H200Bench, chosen
from p99lab.lab.bench.h200_transformers import config_values
from p99lab.lab.vllm_server import VllmSpec
from tests.lab.fake_vllm import BROKEN, make_model, make_site

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


def test_bars_hold_for_the_stated_sizes_alone() -> None:
    assert H200Bench().is_stated
    assert not H200Bench(document_len=1000).is_stated
    assert not H200Bench(device="cpu").is_stated
    assert set(BARS_MS) < set(CASES)


def test_the_sizes_fit_the_context() -> None:
    bench = H200Bench()
    for workload in (bench.shared, bench.whole, bench.short):
        assert workload.max_context_len <= bench.context_len
    assert bench.short.max_context_len - bench.answer_len // 2 == bench.short_len


def test_every_case_has_a_row_with_its_floor_and_vllm_beside_those_over_http(tmp_path: Path) -> None:
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
    assert rows["memory copy"].unit == "GB/s"
    assert rows["compile"].name == "compile: own, T = 2"
    assert rows["groups, 4 on 2 × 128"].detail
    assert "starting vLLM" in told
    assert not any("no site given" in line for line in told)


def test_a_peer_that_fails_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its log stays
    broken = VllmSpec(make_site(tmp_path / "site", BROKEN), make_model(tmp_path / "model"))
    peers = h200.measure_peers(TINY, frozenset({"ttft-1"}), broken)
    name, sample, note = peers.of("ttft-1")
    assert (name, sample) == (None, None)
    assert note is not None
    assert "no kernels for this GPU" in note
    assert h200.measure_peers(TINY, frozenset({"warm"}), broken).vllm == {}  # not even started


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


def test_transformers_computes_the_whole_context_and_the_steps_behind_it() -> None:
    times = h200_transformers.run(TINY)
    assert len(times.steps_s) == TINY.num_transformers_steps
    assert min(times.prefill_s, *times.steps_s) > 0.0


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
