"""What is read from the peers' own files, and how it is held against ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from p99lab.lab.proof import coverage, peer_tools, peers
from p99lab.lab.proof.cases import CASES, ONE_STALL
from p99lab.lab.proof.peer_tools import PEERS, Assignment, Measured, Peer, PeerError
from p99lab.probe.intervals import FloatArray
from p99lab.probe.stats import Summary
from p99lab.probe.workload import Load, parse_load

pytestmark = pytest.mark.light

OPEN = parse_load({"kind": "open", "rate": 20, "num_requests": 40, "arrivals": "constant"})
CLOSED = parse_load({"kind": "closed", "concurrency": 4, "num_requests": 40})


def assignment(load: Load, tokenizer: Path = Path("tokenizer")) -> Assignment:
    return Assignment("http://127.0.0.1:1", "some-model", load, 3, tokenizer)


@pytest.mark.parametrize(
    ("name", "load", "said"),
    [
        ("guidellm", OPEN, "kind=constant,rate=20.0"),
        ("guidellm", CLOSED, "kind=concurrent,streams=4"),
        ("aiperf", OPEN, "--request-rate 20.0 --arrival-pattern constant"),
        ("aiperf", CLOSED, "--concurrency 4"),
    ],
)
def test_each_is_given_the_same_load_and_model(name: str, load: Load, said: str) -> None:
    command = " ".join(PEERS[name].command(assignment(load), Path("work")))
    assert said in command
    assert "some-model" in command
    assert "40" in command


def test_figures_are_read_in_seconds_and_requests_counted(tmp_path: Path) -> None:
    figures = {"p50": 100.0, "p99": 400.0}
    one = {"time_to_first_token": {"value": 100.0}, "request_latency": {"value": 400.0}}
    one["output_sequence_length"] = {"value": 3}
    failed = {"error": {"code": 500}, "metrics": {}}
    lines = [json.dumps(line) for line in ({"metrics": one}, failed)]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(lines) + "\n")
    aiperf = {"time_to_first_token": figures, "request_latency": figures}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(aiperf))
    request = {"time_to_first_token_ms": 100.0, "request_latency": 0.4, "inter_token_latency_ms": None}
    answered = [{**request, "output_metrics": {"text_tokens": 3}}]
    metrics = {
        "request_latency": {"successful": {"percentiles": {"p50": 0.1, "p99": 0.4}}},
        "time_to_first_token_ms": {"successful": {"percentiles": figures}},
    }
    requests = {"successful": answered, "errored": [{}], "incomplete": [], "total": None}
    guidellm = {"benchmarks": [{"metrics": metrics, "requests": requests}]}
    (tmp_path / "guidellm.json").write_text(json.dumps(guidellm))
    for peer in PEERS.values():
        read = peer.read(tmp_path)
        assert {name: values.tolist() for name, values in read.values.items()} == {"ttft": [0.1], "e2e": [0.4]}
        assert (read.reported["ttft", "p50"], read.reported["e2e", "p99"]) == (0.1, 0.4)
        assert (read.num_output_tokens, read.num_failed) == ((3,), 1)


def test_a_peer_that_is_not_there_or_leaves_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tools, "environment", lambda *_: tmp_path / "bin" / "python")
    with pytest.raises(PeerError, match="guidellm failed"):
        PEERS["guidellm"].measure(assignment(OPEN, tmp_path), tmp_path / "one")
    program = tmp_path / "bin" / "silent"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    silent = Peer("silent", "silent==1", lambda *_: ["silent"], PEERS["aiperf"].read)
    with pytest.raises(PeerError, match="silent left no figures"):
        silent.measure(assignment(OPEN, tmp_path), tmp_path / "two")


def verdicts(meeting: peers.Meeting, ours: Summary, values: dict[str, FloatArray], num_failed: int = 0) -> list[bool]:
    made = peers.agreements("x", meeting, ours, Measured(values, {}, (), num_failed))
    return [check.passed for check in made]


def test_agreement_is_within_the_stated_tolerance_and_of_the_same_number() -> None:
    meeting = peers.Meeting("light", CASES["light"].load, ("e2e",))
    ours = coverage.simulated(CASES["light"], 1)
    e2e = {p: ours.metrics["e2e"].percentiles[p].value or 0.0 for p in ("p50", "p99")}
    near, far = np.full(500, e2e["p50"] + 0.004), np.full(500, e2e["p50"] - 0.006)
    near[-20:], far[-20:] = e2e["p99"] - 0.004, e2e["p99"] + 0.006
    assert verdicts(meeting, ours, {"e2e": near}) == [True, True, True]
    assert verdicts(meeting, ours, {"e2e": far}) == [True, False, False]
    assert verdicts(meeting, ours, {"e2e": near[1:]}) == [False, True, True]
    assert verdicts(meeting, ours, {"e2e": near}, num_failed=1) == [False, True, True]
    assert verdicts(meeting, ours, {}) == [False, False, False]


def test_a_gap_between_arrivals_is_allowed_where_a_stall_makes_the_p99_and_nowhere_else() -> None:
    under_stall = peers.Meeting(ONE_STALL, OPEN)
    assert under_stall.tolerance("e2e", "p99")[0] == pytest.approx(0.005 + 1 / 20)
    assert under_stall.tolerance("e2e", "p50")[0] == 0.005
    assert peers.Meeting(ONE_STALL, CLOSED).tolerance("e2e", "p99")[0] == 0.005
    assert peers.Meeting("heavy tail", OPEN).tolerance("e2e", "p99")[0] == 0.005
    assert peers.Meeting("slow first chunk", OPEN).tolerance("tpot", "p99") == (
        0.001,
        "3 ms from the last token to the end of the stream, over 3 gaps",
    )
