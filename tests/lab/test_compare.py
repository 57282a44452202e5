from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from p99lab.cli import app
from p99lab.errors import BadParameterError, P99labError
from p99lab.lab import compare as comparing
from p99lab.lab.compare import Comparison, Estimate, Said, Side, better_when, contrast
from p99lab.lab.figures import Figure
from p99lab.lab.run_folder import RunFolder
from p99lab.probe.intervals import percentile
from tests.lab.run_folders import FIRST, MACHINE, SECOND, make_run, tamper

pytestmark = pytest.mark.light

positive = st.floats(1e-3, 1e3)


def estimate(value: float, low: float | None = None, high: float | None = None) -> Estimate:
    return Estimate(value, low, high)


def said(a: Estimate, b: Estimate, unit: str = "s", name: str = "x") -> Said:
    (metric,) = contrast(Side("A", "it", {}, {name: (unit, a)}), Side("B", "it", {}, {name: (unit, b)})).metrics
    return metric.said


def compared(outputs: Path, a: str = FIRST, b: str = SECOND) -> Comparison:
    return comparing.compare(outputs, a, b)


def by_name(comparison: Comparison) -> dict[str, Said]:
    return {metric.name: metric.said for metric in comparison.metrics}


def percentiles(p99: float, arm: str = "stock", metric: str = "e2e", **more: Any) -> dict[str, Any]:
    row = {"arm": arm, "load": "closed", "metric": metric, "void": False}
    return {**row, "p99": p99, "p99 low": 0.95 * p99, "p99 high": 1.1 * p99, **more}


def test_where_nothing_differs_few_are_told_apart() -> None:
    """The rule's own error: P90s of two samples of one distribution, told apart in one of twenty pairs at most."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(400):
        a, b = (percentile(random.lognormal(0.0, 0.5, 200), 0.9) for _ in range(2))
        wrong += said(Estimate(a.value, a.low, a.high), Estimate(b.value, b.low, b.high)) is not Said.CANNOT_TELL
    assert wrong <= 0.07 * 400


def test_what_differs_by_half_is_told_apart() -> None:
    random = np.random.default_rng(1)
    right = 0
    for _ in range(100):
        a, b = (percentile(scale * random.lognormal(0.0, 0.3, 400), 0.9) for scale in (1.5, 1.0))
        right += said(Estimate(a.value, a.low, a.high), Estimate(b.value, b.low, b.high)) is Said.BETTER
    assert right >= 95


@pytest.mark.parametrize(
    ("name", "unit", "direction"),
    [
        ("e2e P99", "s", "lower"),
        ("step", "ms", "lower"),
        ("requests_per_s", "requests/s", "higher"),
        ("copy", "GB/s", "higher"),
        ("hit_rate/128", "percent", "higher"),
        ("cached_share", "", "higher"),
        ("p99_ratio", "x", None),
        ("share_allocation", "percent", None),
    ],
)
def test_which_way_is_better(name: str, unit: str, direction: str | None) -> None:
    assert better_when(name, unit) == direction
    small, large = estimate(1.0, 0.9, 1.1), estimate(2.0, 1.9, 2.1)
    expected = {"lower": Said.WORSE, "higher": Said.BETTER, None: Said.DIFFERS}[direction]
    assert said(small, large, unit, name) is expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (estimate(1.0, 0.9, 1.1), estimate(1.05, 0.95, 1.2), Said.CANNOT_TELL),
        (estimate(1.0, 0.9, None), estimate(0.5, 0.4, 0.6), Said.BETTER),  # A's lower bound is enough
        (estimate(1.0, None, 1.1), estimate(0.5, 0.4, 0.6), Said.CANNOT_TELL),
        (estimate(1.0, None, 1.1), estimate(2.0, 1.8, None), Said.WORSE),
        (estimate(1.0), estimate(9.0), Said.CANNOT_TELL),
        (estimate(0.0, 0.0, 0.0), estimate(0.0, 0.0, 0.0), Said.SAME),
        (estimate(0.0, 0.0, 0.0), estimate(1.0, 0.9, 1.1), Said.CANNOT_TELL),
        (estimate(4.0, 4.0, 4.0), estimate(4.0, 4.0, 4.0), Said.SAME),
        (estimate(4.0, 4.0, 4.0), estimate(5.0, 5.0, 5.0), Said.WORSE),
        (estimate(1.0, 0.0, 1.1), estimate(2.0, 1.8, 2.2), Said.WORSE),
        (Estimate(None, None, None), estimate(1.0, 0.9, 1.1), Said.CANNOT_TELL),
        (Estimate(1.0, 0.9, 1.1, is_void=True), estimate(2.0, 1.9, 2.1), Said.CANNOT_TELL),
    ],
)
def test_what_can_be_told(a: Estimate, b: Estimate, expected: Said) -> None:
    assert said(a, b) is expected


def test_chance_is_counted_over_what_has_intervals() -> None:
    a = {f"m{i}": ("s", estimate(1.0, 0.9, 1.1)) for i in range(40)}
    b = {name: (unit, estimate(1.0 + i / 1e6, 0.9, 1.1)) for i, (name, (unit, _)) in enumerate(a.items())}
    exact = {"count": ("pages", estimate(4.0, 4.0, 4.0)), "bare": ("s", estimate(1.0))}
    found = contrast(Side("A", "it", {}, a | exact), Side("B", "it", {}, b | exact))
    assert (len(found.metrics), found.num_compared, found.num_by_chance) == (42, 40, pytest.approx(2.0))


def test_two_runs(tmp_path: Path) -> None:
    tables = ({"percentiles": [percentiles(p99), percentiles(1.0, arm="full")]} for p99 in (2.0, 1.0))
    figures = ([Figure("p99_e2e_stock", p99, "s", 0.95 * p99, 1.1 * p99, 400)] for p99 in (2.0, 1.0))
    for run_id in (FIRST, SECOND):
        make_run(tmp_path, run_id, tables=next(tables), figures=next(figures))
    found = compared(tmp_path)
    assert by_name(found) == {"stock, closed: e2e P99": Said.BETTER, "full, closed: e2e P99": Said.CANNOT_TELL}
    assert found.unlike == ()  # and the figure that is a percentile of the table is not counted twice


def test_void_arms_and_figures_from_send_give_no_verdict(tmp_path: Path) -> None:
    for run_id, p99 in ((FIRST, 1.0), (SECOND, 2.0)):
        rows = [percentiles(p99, void=run_id == SECOND), percentiles(p99, metric="e2e_from_send")]
        summary = [{"arm": "stock", "load": "closed", "note": "void: too late" if run_id == SECOND else ""}]
        make_run(tmp_path, run_id, tables={"percentiles": rows, "summary": summary}, figures=[])
    found = compared(tmp_path)
    assert found.void == ("B: stock, closed: too late",)
    (metric,) = found.metrics
    assert (metric.name, metric.said, metric.why) == ("stock, closed: e2e P99", Said.CANNOT_TELL, "void in B")


def test_it_says_what_is_not_alike(tmp_path: Path) -> None:
    requests = [{"index": i, "prompt_digest": f"{i:x}"} for i in range(5)]
    make_run(tmp_path, FIRST, tables={"requests": requests}, parameters="seed: 0\nn: 1\n")
    requests[3] = {"index": 3, "prompt_digest": "other"}
    changed = make_run(
        tmp_path,
        SECOND,
        figures=[Figure("p99_ratio", 1.5, "x", 1.3, 1.7, 400), Figure("new", 1.0, "s")],
        tables={"requests": requests},
        parameters="seed: 1\nn: 1\n",
        tier="smoke",
        hardware="H200",
        dirty=True,
        is_sealed=False,
    )
    tamper(changed / "hardware.json", json.dumps({**MACHINE, "id": "other"}).encode())
    RunFolder(changed).seal()
    assert compared(tmp_path).unlike == (
        "hardware: EPYC, 2 CPUs, no GPU → H200",
        "machine: 0123456789ab → other",
        "tier: laptop → smoke",
        "parameters: seed 0 → 1",
        "revision: 0123456789ab → 0123456789ab+",
        "prompts: 1 of the 5 requests that both sent differ",
        "metrics only in A: p99_e2e_stock, warm_lengths_done",
        "metrics only in B: new",
    )


@pytest.mark.parametrize(
    ("parameters", "record", "names"),
    [
        ("document_tokens_max: 9\n", {}, "document_tokens_max"),
        ("concurrency: 2\nopen_share: 0.5\nmodel: m\n", {}, "concurrency, open_share, model"),
        ("seed: 0\n", {"tier": "smoke", "hardware": "H200"}, "tier, hardware"),
    ],
)
def test_what_was_asked_differently_gives_no_verdict(
    tmp_path: Path, parameters: str, record: dict[str, str], names: str
) -> None:
    make_run(tmp_path, FIRST, tables={"percentiles": [percentiles(2.0)]})
    make_run(tmp_path, SECOND, tables={"percentiles": [percentiles(1.0)]}, parameters=parameters, **record)
    arguments = ["runs", "compare", FIRST, SECOND, "--outputs", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert f"no verdict they were asked different things ({names})" in " ".join(done.stdout.split())
    assert set(by_name(compared(tmp_path)).values()) == {Said.NOT_ALIKE}
    assert "1 better" in CliRunner().invoke(app, [*arguments, "--anyway"]).stdout


@pytest.mark.parametrize("parameters", ["seed: 7\n", "seed: 0\nmax_num_seqs: 8\nchunk_tokens: 64\n"])
def test_another_seed_and_what_one_compares_leave_the_verdicts(tmp_path: Path, parameters: str) -> None:
    make_run(tmp_path, FIRST, tables={"percentiles": [percentiles(2.0)]})
    make_run(tmp_path, SECOND, tables={"percentiles": [percentiles(1.0)]}, parameters=parameters, revision="f" * 40)
    assert by_name(compared(tmp_path))["stock, closed: e2e P99"] is Said.BETTER


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    path = make_run(tmp_path, FIRST)
    for other in (FIRST, FIRST[:8], str(path)):
        with pytest.raises(BadParameterError, match=r"one and the same$"):
            compared(tmp_path, FIRST, other)


def test_different_notebooks_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND, "00_environment")
    with pytest.raises(BadParameterError, match=r"a run of 01_headline_p99, .* a run of 00_environment"):
        compared(tmp_path)


def test_changed_and_unfinished_runs_give_no_verdict(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    path = make_run(tmp_path, SECOND, is_sealed=False, status="running")
    with pytest.raises(P99labError, match=r"no verdict: .* was never sealed \(cut off\)"):
        compared(tmp_path)
    RunFolder(path).seal()
    assert compared(tmp_path).metrics
    tamper(path / "parameters.yaml", b"seed: 1\n")
    with pytest.raises(P99labError, match=r"changed after its end \(parameters\.yaml: changed\)"):
        compared(tmp_path)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    path = make_run(tmp_path, SECOND, is_sealed=False)
    tamper(path / "metrics" / "figures.parquet")
    RunFolder(path).seal()
    with pytest.raises(BadParameterError, match=rf"^{SECOND} cannot be read: [^\n]+$"):
        compared(tmp_path)


def probe_folder(path: Path, p99: float, void: tuple[str, ...] = (), digest: str = "d", **options: Any) -> str:
    path.mkdir()
    figure = {"value": p99, "ci95": [0.95 * p99, 1.1 * p99], "n": 400, "effective_n": 400, "reason": None}
    nothing = {**figure, "value": None, "ci95": [None, None]}
    metric = {"unit": "s", "p50": nothing, "p90": nothing, "p99": figure, "p999": nothing, "std": nothing}
    summary = {
        "target": {"name": "http://127.0.0.1", "transport": "http"},
        "options": {"seed": 0, **options},
        "workload_digest": digest,
        "ttft": metric,
        "ttft_from_send": metric,
        "requests_per_s": 4.0,
        "output_tokens_per_s": None,
        "hit_rates": {"cached_share": 0.9},
        "void": list(void),
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return str(path)


def test_two_probes(tmp_path: Path) -> None:
    a, b = probe_folder(tmp_path / "a", 2.0), probe_folder(tmp_path / "b", 1.0, digest="e")
    found = compared(tmp_path, a, b)
    tells = {name: said for name, said in by_name(found).items() if said is not Said.CANNOT_TELL}
    assert tells == {"ttft P99": Said.BETTER}
    assert found.unlike == ("workload digest: d → e",)
    void = probe_folder(tmp_path / "c", 1.0, void=("the client was late",))
    assert set(by_name(compared(tmp_path, a, void)).values()) == {Said.CANNOT_TELL}
    assert compared(tmp_path, a, void).void == ("B: the client was late",)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"seed": 1, "repetition": 2}, Said.BETTER),
        ({"target": "http://elsewhere"}, Said.BETTER),
        ({"rate": 2.0}, Said.NOT_ALIKE),
        ({"answer_tokens": [1, 2]}, Said.NOT_ALIKE),
    ],
)
def test_probes_of_another_workload_or_load(tmp_path: Path, options: dict[str, Any], expected: Said) -> None:
    a, b = probe_folder(tmp_path / "a", 2.0), probe_folder(tmp_path / "b", 1.0, **options)
    assert by_name(compared(tmp_path, a, b))["ttft P99"] is expected
    with pytest.raises(BadParameterError, match="one and the same"):
        compared(tmp_path, a, f"{a}/")


def test_a_probe_is_not_compared_with_a_run(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    with pytest.raises(BadParameterError, match="nothing to compare"):
        compared(tmp_path, FIRST, probe_folder(tmp_path / "a", 1.0))


def test_the_page_and_the_record(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST, tables={"percentiles": [percentiles(2.0)]})
    make_run(tmp_path, SECOND, tables={"percentiles": [percentiles(1.0)]}, parameters="seed: 1\n")
    found = compared(tmp_path)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(comparing.page(found))
    text = captured.get()
    assert "not alike  parameters: seed 0 → 1" in text
    assert "0.500 [0.449, 0.557]" in text
    assert "1 better" in text
    assert "3 of them have intervals: if nothing differed, about" in text
    record = json.loads(json.dumps(found.as_record()))
    assert record["compared"] == 3
    assert record["metrics"][0]["said"] == "better"


def test_the_command(tmp_path: Path) -> None:
    make_run(tmp_path, FIRST)
    make_run(tmp_path, SECOND)
    arguments = ["runs", "compare", FIRST[:8], SECOND[:8], "--outputs", str(tmp_path)]
    assert "2 metrics: 2 cannot tell" in CliRunner().invoke(app, arguments).stdout
    record = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [metric["said"] for metric in record["metrics"]] == ["cannot tell", "cannot tell"]
