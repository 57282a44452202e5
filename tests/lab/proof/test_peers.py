"""What is read from the peers' own files, and how it is held against ours."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from p99lab.lab.proof import coverage, peers
from p99lab.lab.proof.cases import CASES
from p99lab.lab.proof.peer_tools import PEERS, Measured, Peer, PeerError
from p99lab.probe.workload import Load, parse_load

pytestmark = pytest.mark.light

OPEN = parse_load({"kind": "open", "rate": 20, "num_requests": 40, "arrivals": "constant"})
CLOSED = parse_load({"kind": "closed", "concurrency": 4, "num_requests": 40})


@pytest.mark.parametrize(
    ("name", "load", "said"),
    [
        ("guidellm", OPEN, "kind=constant,rate=20.0"),
        ("guidellm", CLOSED, "kind=concurrent,streams=4"),
        ("aiperf", OPEN, "--request-rate 20.0 --arrival-pattern constant"),
        ("aiperf", CLOSED, "--concurrency 4"),
    ],
)
def test_each_is_given_the_same_load(name: str, load: Load, said: str) -> None:
    command = " ".join(PEERS[name].command("http://127.0.0.1:1", load, 3, Path("tokenizer"), Path("work")))
    assert said in command
    assert "40" in command


def test_figures_are_read_in_seconds(tmp_path: Path) -> None:
    figures = {"p50": 100.0, "p99": 400.0}
    one = {"time_to_first_token": {"value": 100.0}, "request_latency": {"value": 400.0}}
    failed = {"error": {"code": 500}, "metrics": {}}
    lines = [json.dumps(line) for line in ({"metrics": one}, failed)]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(lines) + "\n")
    aiperf = {"time_to_first_token": figures, "request_latency": figures}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(aiperf))
    requests = [{"time_to_first_token_ms": 100.0, "request_latency": 0.4, "inter_token_latency_ms": None}]
    metrics = {
        "request_latency": {"successful": {"percentiles": {"p50": 0.1, "p99": 0.4}}},
        "time_to_first_token_ms": {"successful": {"percentiles": figures}},
    }
    guidellm = {"benchmarks": [{"metrics": metrics, "requests": {"successful": requests}}]}
    (tmp_path / "guidellm.json").write_text(json.dumps(guidellm))
    for peer in PEERS.values():
        read = peer.read(tmp_path)
        assert {name: values.tolist() for name, values in read.values.items()} == {"ttft": [0.1], "e2e": [0.4]}
        assert (read.reported["ttft", "p50"], read.reported["e2e", "p99"]) == (0.1, 0.4)


def test_a_peer_that_is_not_there_or_leaves_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P99LAB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PeerError, match="guidellm failed"):
        PEERS["guidellm"].measure("http://127.0.0.1:1", OPEN, 1, tmp_path, tmp_path / "one")
    silent = Peer("silent", "silent==1", lambda *_: ["silent"], PEERS["aiperf"].read)
    program = silent.directory / "bin" / "silent"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(PeerError, match="silent left no figures"):
        silent.measure("http://127.0.0.1:1", OPEN, 1, tmp_path, tmp_path / "two")


def test_agreement_is_within_the_stated_tolerance_and_of_the_same_number() -> None:
    meeting = peers.Meeting("light", CASES["light"].load, ("e2e",))
    ours = coverage.simulated(CASES["light"], 1)
    e2e = ours.metrics["e2e"].percentiles
    values = np.full(500, e2e["p50"].value + 0.004)
    values[-20:] = e2e["p99"].value * 1.2
    passed = [check.passed for check in peers.agreements("x", meeting, ours, Measured({"e2e": values}, {}))]
    assert passed == [True, True, False]
    nothing = Measured({}, {})
    assert [check.passed for check in peers.agreements("x", meeting, ours, nothing)] == [False, False, False]
