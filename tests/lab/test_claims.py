from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from p99lab.errors import BadParameterError
from p99lab.lab.claims import Claim, Name, Side, differences, load_claims, rule_digest, verdict
from p99lab.lab.figures import Figure, read_figures, write_figures
from p99lab.lab.ledger import Row, completed, ledger, table
from p99lab.lab.run_folder import RunFolder
from p99lab.lab.staleness import Present

pytestmark = pytest.mark.light

BY_NOTEBOOK = {
    "01_headline_p99": "c1.p99_baseline c1.p99_optimised c1.p99_ratio c1.jitter_before c1.jitter_after c1.bottleneck "
    "c1.warm_lengths",
    "02_1_kv_growth": "c2.kv_quadratic c2.kv_subquadratic c2.kv_table",
    "02_2_decode_utilisation": "c2.sm_active c2.issue_slots c2.stall_not_selected c2.l1_miss c2.kernel_table "
    "c2.one_lane",
    "02_3_attention_bandwidth": "c2.fa3_bandwidth c2.gmem_loads",
    "02_4_dynamic_batching": "c2.window_batches c2.batch_size c2.batch_variance c2.gpu_fluctuation c2.occupancy_blind",
    "02_5_weight_io": "c2.pcie_spikes c2.io_counters c2.hbm_jumps",
    "03_1_prompt_token_cache": "c3.l1_prefill_hits c3.lru1 c3.lru2",
    "03_2_kv_warmup": "c3.async_warmup c3.versioned_keys",
    "03_3_weight_shards": "c3.numa_gain c3.numa_map",
    "04_1_cuda_graph": "c4.graph_latency c4.graph_utilisation",
    "04_2_isolation": "c1.exclusive_process c1.units c4.hard_isolation",
    "04_3_priority": "c4.priority_bound c4.preemption",
    "04_4_p99_timeline": "c4.hotspots c4.rpc_share c4.protobuf_speedup c4.protobuf_allocations c4.serialisation_ms "
    "c4.gc_pause",
    "05_1_deployments": "c5.p99 c5.engine_config c5.deployments c5.stack c5.pipeline",
    "05_2_allreduce": "c5.allreduce",
    "05_3_token_jitter": "c5.token_jitter",
    "05_4_cold_start": "c5.cold_start_hits",
}

CONDITIONS = {"gpu": "NVIDIA A100-SXM4-80GB", "context": 120_000}
LAPTOP = {"gpu": "none", "context": 2_000}


def claim(kind: str = "value", **changes: object) -> Claim:
    """A claim of 10 ms on an A100 at a long context."""
    values = {
        "id": "c9.example",
        "chapter": "9",
        "says": "an example",
        "stated": 10.0,
        "unit": "ms",
        "conditions": {"gpu": "A100 80GB", "context": {"min": 117_000, "max": 131_072}},
        "notebook": "09_example",
        "test": {"kind": kind, "metric": "latency"},
    }
    return Claim.parse({**values, **changes})


def rule(**values: object) -> dict[str, object]:
    return {"metric": "latency", **values}


def figures(*several: Figure) -> dict[str, Figure]:
    return {figure.metric: figure for figure in several}


def latency(value: float, half_width: float = 0.1, unit: str = "ms") -> Figure:
    return Figure("latency", value, unit, value - half_width, value + half_width, 1_000)


def speedup(low: float, high: float) -> Figure:
    return Figure("speedup", (low + high) / 2, "x", low, high, 1_000)


FASTER = rule(kind="value", effect={"metric": "speedup", "above": 1})


# --- the file ---------------------------------------------------------------------------------------------------------


def test_every_claim_belongs_to_its_notebook() -> None:
    found: dict[str, list[str]] = {}
    for one in load_claims():
        own = found.setdefault(one.notebook, [])
        if (whole := one.id.partition("/")[0]) not in own:
            own.append(whole)
    assert {name: sorted(ids) for name, ids in found.items()} == {
        name: sorted(ids.split()) for name, ids in BY_NOTEBOOK.items()
    }


def test_several_figures_are_a_row_each() -> None:
    claims = {one.id: one for one in load_claims()}
    assert claims["c2.kv_table/512"].stated == 184
    assert claims["c2.kv_table/512"].test.metric == "kv_table/512"
    assert claims["c3.lru1/latency"].unit == "ms"
    assert claims["c3.lru1/hit_rate"].test.effect == Side(metric="lru2_hit_gain", above=0)
    assert claims["c3.lru1/latency"].test.effect == Side(metric="lru2_latency_saved", above=0)
    assert claims["c2.fa3_bandwidth/32768"].conditions["context"] == 32768
    assert claims["c2.fa3_bandwidth/32768"].test.refuted == Side(metric="fa3_bandwidth/32768", below=20)


GOOD = """
  - {id: a, chapter: "1", says: x, stated: 1, unit: s, notebook: n, test: {kind: value, metric: m}}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("claims: [", "claims.yaml"),
        ("claims: {}", "'claims' must be a list"),
        (f"claims:{GOOD}{GOOD}", "twice the same id: a"),
        (f"claims:{GOOD.replace('metric', 'metirc')}", "a: test.metric: Field required"),
        (f"claims:{GOOD.replace('metric', 'metirc')}", "unknown parameter 'test.metirc'; did you mean 'metric'?"),
        (f"claims:{GOOD.replace('notebook', 'notebok')}", "unknown parameter 'notebok'; did you mean 'notebook'?"),
        (f"claims:{GOOD.replace('kind: value', 'kind: ratio')}", "needs an 'effect'"),
        (f"claims:{GOOD.replace('stated: 1', 'figures: {b: {stated: 1, unit: s}}')}", "a: 'unit' beside 'figures'"),
        (f"claims:{GOOD.replace('metric: m', 'metric: m, needs: [gpu]')}", "names no condition of the claim: gpu"),
        (f"claims:{GOOD.replace('metric: m', 'metric: m, effect: {above: 1, below: 2}')}", "one of 'above' and"),
    ],
)
def test_a_malformed_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises(BadParameterError) as caught:
        load_claims(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadParameterError, match="No such file"):
        load_claims(tmp_path / "claims.yaml")


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "name"),
    [
        (latency(10.0), Name.REPRODUCED),
        (latency(8.7), Name.REPRODUCED),  # 10 is 14.9 % above
        (latency(8.6), Name.NOT_REPRODUCED),  # 10 is 16.3 % above
        (latency(11.8), Name.NOT_REPRODUCED),  # 10 is 15.3 % below
        (latency(10.0, half_width=1.1), None),  # too wide to say
        (Figure("latency", 10.0, "ms", n=20), None),  # n too small for an interval
        (latency(10.0, unit="s"), None),
    ],
)
def test_an_absolute_value(measured: Figure, name: Name | None) -> None:
    assert verdict(claim(), figures(measured), CONDITIONS).name == name


@pytest.mark.parametrize(("measured", "name"), [(14.9, Name.REPRODUCED), (15.1, Name.NOT_REPRODUCED)])
def test_percentages_are_held_to_five_points(measured: float, name: Name) -> None:
    share = claim(unit="percent")
    assert verdict(share, figures(latency(measured, unit="percent")), CONDITIONS).name == name


def test_without_the_conditions_an_absolute_value_gives_no_verdict() -> None:
    result = verdict(claim(), figures(latency(10.0)), LAPTOP)
    assert result.name is None
    assert "gpu none (stated A100 80GB); context 2000 (stated 117000–131072)" in result.why


@pytest.mark.parametrize("conditions", [CONDITIONS, LAPTOP])
def test_another_size_in_the_same_direction(conditions: dict[str, object]) -> None:
    result = verdict(claim(test=FASTER), figures(latency(3.0), speedup(1.1, 1.9)), conditions)
    assert result.name == Name.DIRECTION_ONLY
    assert ("stated" in result.why) == (conditions is LAPTOP)


def test_the_stated_size_elsewhere_is_a_direction_only() -> None:
    assert verdict(claim(test=FASTER), figures(latency(10.0), speedup(1.1, 1.9)), LAPTOP).name == Name.DIRECTION_ONLY


@pytest.mark.parametrize("interval", [(0.9, 1.9), (0.4, 0.8)])
def test_an_absent_direction_counts_only_where_conditions_are_met(interval: tuple[float, float]) -> None:
    measured = figures(latency(3.0), speedup(*interval))
    assert verdict(claim(test=FASTER), measured, CONDITIONS).name == Name.NOT_REPRODUCED
    assert verdict(claim(test=FASTER), measured, LAPTOP).name is None


def test_a_direction_needs_an_interval() -> None:
    measured = figures(latency(3.0), Figure("speedup", 4.0, "x", n=12))
    result = verdict(claim(test=FASTER), measured, CONDITIONS)
    assert result.name is None
    assert "n = 12" in result.why


def test_a_direction_needs_its_figure() -> None:
    result = verdict(claim(test=FASTER), figures(latency(3.0)), CONDITIONS)
    assert (result.name, result.why) == (None, "no figure speedup")


def test_a_bound_holds_when_the_whole_interval_is_inside() -> None:
    bound = claim(test=rule(kind="sign", effect={"below": 10}))
    assert verdict(bound, figures(latency(9.0)), CONDITIONS).name == Name.REPRODUCED
    assert verdict(bound, figures(latency(9.0)), LAPTOP).name == Name.DIRECTION_ONLY
    assert verdict(bound, figures(latency(9.95)), CONDITIONS).name == Name.NOT_REPRODUCED


CAUSE = rule(kind="mechanism", effect={"above": 50}, refuted={"below": 20}, needs=["context"])


@pytest.mark.parametrize(
    ("share", "conditions", "name"),
    [
        (60.0, CONDITIONS, Name.REPRODUCED),
        (60.0, LAPTOP, Name.DIRECTION_ONLY),
        (35.0, CONDITIONS, Name.NOT_REPRODUCED),
        (35.0, LAPTOP, None),
        (5.0, CONDITIONS, Name.REFUTED),
        (5.0, {"gpu": "NVIDIA H200", "context": 128_000}, Name.REFUTED),
        (5.0, LAPTOP, None),
    ],
)
def test_a_mechanism(share: float, conditions: dict[str, object], name: Name | None) -> None:
    cause = claim(stated=None, unit=None, test=CAUSE)
    result = verdict(cause, figures(latency(share, unit="percent")), conditions)
    assert result.name == name
    assert ("would refute it under the stated context" in result.why) == (share == 5.0 and conditions is LAPTOP)


@pytest.mark.parametrize(
    ("done", "conditions", "name"), [(1, CONDITIONS, Name.CARRIED_OUT), (1, LAPTOP, None), (0, CONDITIONS, None)]
)
def test_a_procedure(done: int, conditions: dict[str, object], name: Name | None) -> None:
    procedure = claim("procedure", stated=None, unit=None)
    assert verdict(procedure, figures(Figure.exact("latency", done, "")), conditions).name == name


def test_arithmetic_needs_no_conditions() -> None:
    assert verdict(claim("arithmetic"), figures(Figure.exact("latency", 10.0, "ms")), {}).name == Name.REPRODUCED
    assert verdict(claim("arithmetic"), figures(Figure.exact("latency", 16.0, "ms")), {}).name == Name.REFUTED


def test_a_run_may_say_that_it_cannot_test() -> None:
    table_row = next(one for one in load_claims() if one.id == "c2.kernel_table/softmax.sm")
    result = verdict(table_row, figures(Figure.untestable("kernel_table", "GPU counters")), {})
    assert result.name == Name.NOT_TESTABLE
    assert "it would take GPU counters" in result.why


@pytest.mark.parametrize(
    ("stated", "ours", "same"),
    [
        (64, 64, True),
        (64, 66, True),
        (64, 8, False),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100 80GB", "NVIDIA A100-SXM4-40GB", False),
        ({"min": 100}, 131_072, True),
        ({"max": 100}, 101, False),
        ([1, 2], [1, 2], True),
        ([1, 2], [1], False),
        (True, True, True),
        (True, False, False),
        (64, "64", False),
    ],
)
def test_conditions(stated: object, ours: object, same: bool) -> None:
    assert (differences({"it": stated}, {"it": ours}) == {}) is same
    assert differences({"it": stated}, {}) != {}


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_survive_the_file(tmp_path: Path) -> None:
    several = figures(
        Figure("p99", 1.5, "s", 1.2, 1.9, 400, {"context": 2_000, "gpu": "none"}),
        Figure("short", 1.5, "s", n=20),
        Figure.exact("bytes", 23_040, "B"),
        Figure.untestable("sm_active", "GPU counters"),
    )
    assert read_figures(write_figures(RunFolder(tmp_path), several.values())) == several


def test_two_figures_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latency"):
        write_figures(RunFolder(tmp_path), [latency(1.0), latency(2.0)])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Figure("m", float("nan"), "s"),
        lambda: Figure("m", None, "s"),
        lambda: Figure("m", 1.0, "s", 2.0, 1.0),
        lambda: Figure("m", 1.0, "s", ci_low=0.5),
    ],
)
def test_a_figure_is_whole(wrong: Callable[[], Figure]) -> None:
    with pytest.raises(ValueError, match="figure m"):
        wrong()


# --- the ledger -------------------------------------------------------------------------------------------------------


def make_run(outputs: Path, started: str, *several: Figure, **changes: object) -> RunFolder:
    record = {
        "run_id": started,
        "notebook": "09_example",
        "tier": "laptop",
        "status": "completed",
        "started": started,
        "hardware": "laptop",
        "revision": "abc",
        **changes,
    }
    folder = RunFolder(outputs / str(record["notebook"]) / started)
    folder.write_json("run.json", record)
    folder.write_json("hardware.json", {"gpus": []})
    write_figures(folder, several)
    folder.seal()
    return folder


def rows_of(outputs: Path) -> list[Row]:
    return ledger(outputs, [claim(test=FASTER)])


def test_untested_claims_are_rows_too(tmp_path: Path) -> None:
    rows = ledger(tmp_path)
    assert [row.id for row in rows] == [one.id for one in load_claims()]
    assert all(row.verdict is None and row.run is None and row.evidence is None for row in rows)


def test_the_latest_completed_run_of_each_hardware_decides(tmp_path: Path) -> None:
    fast, slow = speedup(1.5, 2.0), speedup(0.5, 0.8)
    make_run(tmp_path, "1", latency(3.0), slow)
    make_run(tmp_path, "2", latency(4.0), fast)
    make_run(tmp_path, "3", latency(5.0), fast, status="kernel died")
    make_run(tmp_path, "4", latency(6.0), fast, tier="smoke")
    make_run(tmp_path, "5", latency(7.0), fast, notebook="08_other")
    make_run(tmp_path, "6", speedup(1.0, 1.1))  # does not speak to the claim
    make_run(tmp_path, "0", latency(2.0), fast, hardware="node")
    laptop, node = rows_of(tmp_path)
    assert (laptop.run, laptop.measured, laptop.verdict) == ("2", 4.0, "direction only")
    assert (node.run, node.measured, node.hardware) == ("0", 2.0, "node")
    assert laptop.ci95 == (3.9, 4.1)
    assert laptop.evidence is not None
    assert laptop.evidence.startswith(f"{tmp_path.name}/09_example/2/metrics/figures.parquet#latency · speedup above 1")
    assert "gpu none (stated A100 80GB)" in laptop.evidence
    assert "code abc" in laptop.evidence


def test_changed_figures_withdraw_the_verdict(tmp_path: Path) -> None:
    make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0))
    folder = make_run(tmp_path, "2", latency(4.0), speedup(1.5, 2.0))
    path = folder.path / "metrics/figures.parquet"
    path.chmod(0o644)
    write_figures(RunFolder(tmp_path / "elsewhere"), [latency(10.0), speedup(3.0, 4.0)]).replace(path)
    (row,) = rows_of(tmp_path)
    assert (row.run, row.verdict, row.measured, row.state) == ("2", None, None, "withdrawn")
    assert row.evidence is not None
    assert "metrics/figures.parquet: changed" in row.evidence


@pytest.mark.parametrize("name", ["parameters.yaml", "sources.json"])
def test_a_change_that_would_hide_staleness_withdraws_the_verdict(tmp_path: Path, name: str) -> None:
    path = make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0)).path / name
    path.write_bytes(b"{}")  # the run was sealed without it, or with another one
    (row,) = rows_of(tmp_path)
    assert row.state == "withdrawn"


def test_the_draft_of_a_copy_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path, ".1-77", latency(3.0), speedup(1.5, 2.0))
    assert [row.state for row in rows_of(tmp_path)] == ["not tested"]


@pytest.mark.parametrize("content", [b"", b"not parquet"])
def test_an_unreadable_file_is_a_withdrawal_not_a_crash(tmp_path: Path, content: bytes) -> None:
    path = make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0)).path / "metrics/figures.parquet"
    path.chmod(0o644)
    path.write_bytes(content)
    assert [row.state for row in rows_of(tmp_path)] == ["withdrawn"]


def test_an_unfinished_folder_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "09_example" / "1"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    (tmp_path / "index.html").write_text("")
    assert [row.state for row in rows_of(tmp_path)] == ["not tested"]


def test_a_published_copy_counts_only_where_the_run_is_not(tmp_path: Path) -> None:
    make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0))
    make_run(tmp_path / "published", "1", latency(3.0), speedup(1.5, 2.0))
    make_run(tmp_path / "published", "2", latency(4.0), speedup(1.5, 2.0), hardware="node")
    laptop, node = rows_of(tmp_path)
    assert laptop.evidence is not None
    assert laptop.evidence.startswith(f"{tmp_path.name}/09_example/1/")
    assert node.evidence is not None
    assert node.evidence.startswith(f"{tmp_path.name}/published/09_example/2/")
    assert len(completed(tmp_path, Present())) == 2


def test_a_published_copy_does_not_stand_in_for_a_run_that_is_here(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0))
    make_run(tmp_path / "published", "1", latency(3.0), speedup(1.5, 2.0))
    record = folder.path / "run.json"
    record.chmod(0o644)
    record.write_text("{")
    assert [row.state for row in rows_of(tmp_path)] == ["not tested"]


def test_a_run_by_other_code_or_an_older_rule_is_stale_and_still_judged(tmp_path: Path) -> None:
    known = claim(test=FASTER)
    make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0), rules={known.id: rule_digest(known)})
    (row,) = rows_of(tmp_path)
    assert (row.verdict, row.is_stale) == ("direction only", True)
    assert "the run did not record its code" in row.stale
    assert not any("rule" in clause for clause in row.stale)
    changed = claim(test=rule(kind="value", effect={"metric": "speedup", "above": 5}))
    (row,) = ledger(tmp_path, [changed])
    assert row.verdict is None
    assert "the rule has changed" in row.stale


def test_the_table_leaves_untested_claims_out_unless_asked(tmp_path: Path) -> None:
    rows = ledger(tmp_path)
    assert table(rows, every=False).row_count == 0
    assert table(rows).row_count == len(rows)


def test_the_table_fits_80_columns(tmp_path: Path) -> None:
    from rich.console import Console

    make_run(tmp_path, "20261129-174900-123-abcd", latency(3.0), speedup(1.5, 2.0), hardware="a CPU, 2 CPUs, no GPU")
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table([*rows_of(tmp_path), *ledger(tmp_path)]))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    words = capture.get()
    for word in ("c9.example", "10 ms", "[2.9, 3.1]", "direction", "1 direction only"):
        assert word in words


def test_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from p99lab.cli import app

    def rows_printed() -> dict[str, dict[str, object]]:
        printed = CliRunner().invoke(app, ["claims", "--json", "--outputs", str(tmp_path)])
        assert printed.exit_code == 0, printed.output
        return {row["id"]: row for row in json.loads(printed.stdout)}

    ratio = Figure("p99_ratio", 3.0, "x", 2.0, 4.0, 400, {})
    folder = make_run(tmp_path, "1", ratio, notebook="01_headline_p99")
    rows = rows_printed()
    expected = {
        *("id", "chapter", "says", "stated", "unit", "inconsistent", "verdict", "measured", "ci95", "n", "hardware"),
        *("run", "evidence", "why", "stale"),
    }
    assert all(set(row) == expected for row in rows.values())
    assert rows["c1.p99_ratio"]["verdict"] == "direction only"
    assert rows["c1.p99_ratio"]["ci95"] == [2.0, 4.0]
    untested = rows["c1.p99_baseline"]
    assert [untested[name] for name in ("verdict", "measured", "ci95", "n", "hardware", "run", "evidence")] == [
        None
    ] * 7

    run_file = folder.path / "run.json"
    run_file.chmod(0o644)
    run_file.write_text(run_file.read_text().replace("abc", "abd"))
    rows = rows_printed()
    assert all(set(row) == expected for row in rows.values())
    withdrawn = rows["c1.p99_ratio"]
    assert (withdrawn["verdict"], withdrawn["measured"], withdrawn["ci95"]) == (None, None, None)
    assert "withdrawn: run.json: changed" in str(withdrawn["evidence"])


def test_a_run_with_parameters_given_by_hand_replaces_none_of_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0))
    make_run(tmp_path, "2", latency(4.0), speedup(1.5, 2.0), by_hand=True)
    monkeypatch.setattr("p99lab.lab.ledger.is_by_hand", lambda folder, record, present: "by_hand" in record)
    assert [row.run for row in rows_of(tmp_path)] == ["1"]
    make_run(tmp_path, "3", latency(4.0), speedup(1.5, 2.0), by_hand=True, hardware="node")
    assert [row.run for row in rows_of(tmp_path)] == ["1", "3"]  # where nothing else speaks, it does


def test_the_table_says_what_decided_and_why_a_verdict_is_withdrawn(tmp_path: Path) -> None:
    from rich.console import Console

    make_run(tmp_path, "1", latency(3.0), speedup(1.5, 2.0))
    tampered = make_run(tmp_path, "2", latency(4.0), speedup(1.5, 2.0), hardware="node").path / "run.json"
    tampered.chmod(0o644)
    tampered.write_text(tampered.read_text().replace("abc", "abd"))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table(rows_of(tmp_path)))
    assert "→ speedup above 1: 1.75 [1.5, 2]" in capture.get()
    assert "withdrawn, 2: run.json: changed" in capture.get()
