"""guidellm and aiperf, each in an environment of its own, and what they measure in the probe's words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from p99lab.errors import P99labError
from p99lab.lab.proof.environments import environment
from p99lab.probe.intervals import FloatArray
from p99lab.probe.workload import ClosedLoad, Load, OpenLoad

CONSTRAINTS = ("torch==2.13.0",)
PROMPT_TOKENS = 16
_TOKENIZER = "local/tokenizer"
_REVISION = "0" * 40
_TIMEOUT_S = 900


class PeerError(P99labError):
    """A peer that does not run, or leaves no figures: the reason, in one line."""


@dataclass(frozen=True)
class Assignment:
    """What a peer is to measure. `url`: without `/v1`. `num_tokens`: of each answer. `tokenizer`: a directory."""

    url: str
    model: str
    load: Load
    num_tokens: int
    tokenizer: Path


@dataclass(frozen=True)
class Measured:
    """What a peer's files say, seconds and tokens.

    `values`: one per answered request, of `ttft`, `e2e` and, of answers with more than one token, `tpot`.
    `reported`: the percentiles that the peer itself makes of them, by metric and name.
    `num_output_tokens`: of each answer. `num_failed`: requests without a whole answer.
    """

    values: Mapping[str, FloatArray]
    reported: Mapping[tuple[str, str], float]
    num_output_tokens: tuple[int, ...]
    num_failed: int


@dataclass(frozen=True)
class Peer:
    """`command`: a program and its arguments, which leave files in that folder. `read`: what those files say."""

    name: str
    requirement: str
    command: Callable[[Assignment, Path], list[str]]
    read: Callable[[Path], Measured]

    def programs(self) -> Path:
        """The folder of its programs, in an environment of its own that is made on first use.

        Raises:
            PeerEnvironmentError: the index does not have it, or it does not install.
        """
        return environment(self.requirement.replace("==", "-"), (self.requirement,), CONSTRAINTS).parent

    def measure(self, assignment: Assignment, work: Path) -> Measured:
        """Run it once; its files go into the new folder `work`.

        Raises:
            PeerEnvironmentError: it does not install.
            PeerError: it fails, or leaves no figures.
        """
        program, *arguments = self.command(assignment, work)
        command = [str(self.programs() / program), *arguments]
        work.mkdir(parents=True)
        _put_into_hub(assignment.tokenizer, work / "hub")
        _run(command, f"{self.name} failed", HF_HOME=str(work / "hub"), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
        try:
            return self.read(work)
        except (OSError, KeyError, IndexError, TypeError, orjson.JSONDecodeError) as error:
            raise PeerError(f"{self.name} left no figures: {error!r}") from None


def _guidellm(asked: Assignment, work: Path) -> list[str]:
    load = asked.load
    rate = f"kind=concurrent,streams={load.concurrency}" if isinstance(load, ClosedLoad) else ""
    rate = rate or f"kind={_arrivals(load)},rate={_rate(load)}"
    text = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={asked.num_tokens}"
    return [
        *("guidellm", "run", "--disable-console", "--profile", rate, "--data", text),
        *("--backend", f"kind=openai_http,target={asked.url},model={asked.model},request_format=/v1/completions"),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        *("--tokenizer", f"kind=hf_auto,model={asked.tokenizer}"),
        *("--output", f"kind=json,path={work / 'guidellm.json'}"),
    ]


def _read_guidellm(work: Path) -> Measured:
    benchmark = orjson.loads((work / "guidellm.json").read_bytes())["benchmarks"][0]
    requests = benchmark["requests"]
    answered = requests["successful"]
    values: dict[str, FloatArray] = {}
    reported: dict[tuple[str, str], float] = {}
    for ours, theirs in (
        ("ttft", "time_to_first_token_ms"),
        ("tpot", "inter_token_latency_ms"),
        ("e2e", "request_latency"),
    ):
        scale = 1.0 if ours == "e2e" else 1e-3
        each = [scale * one[theirs] for one in answered if one.get(theirs) is not None]
        if each:
            values[ours] = np.array(each)
            figures = benchmark["metrics"][theirs]["successful"]["percentiles"]
            reported |= {(ours, p): scale * figures[p] for p in ("p50", "p99")}
    num_output_tokens = tuple(int(one["output_metrics"]["text_tokens"]) for one in answered)
    return Measured(values, reported, num_output_tokens, len(requests["errored"]) + len(requests["incomplete"]))


def _aiperf(asked: Assignment, work: Path) -> list[str]:
    load = asked.load
    closed = isinstance(load, ClosedLoad)
    rate = ["--concurrency", str(load.concurrency)] if isinstance(load, ClosedLoad) else []
    rate = rate if closed else ["--request-rate", str(_rate(load)), "--arrival-pattern", _arrivals(load)]
    return [
        *("aiperf", "profile", "--model", asked.model, "--url", asked.url),
        *("--endpoint-type", "completions", "--streaming"),
        *(*rate, "--request-count", str(load.num_requests), "--tokenizer", _TOKENIZER),
        *("--isl", str(PROMPT_TOKENS), "--osl", str(asked.num_tokens)),
        *("--use-server-token-count", "--use-legacy-max-tokens"),
        *("--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--artifact-dir", str(work)),
    ]


def _read_aiperf(work: Path) -> Measured:
    lines = [orjson.loads(line) for line in (work / "profile_export.jsonl").read_bytes().splitlines()]
    each = [line["metrics"] for line in lines if not line.get("error")]
    summary = orjson.loads((work / "profile_export_aiperf.json").read_bytes())
    values: dict[str, FloatArray] = {}
    reported: dict[tuple[str, str], float] = {}
    for ours, theirs in (
        ("ttft", "time_to_first_token"),
        ("tpot", "inter_token_latency"),
        ("e2e", "request_latency"),
    ):
        if found := [one[theirs]["value"] / 1000.0 for one in each if theirs in one]:
            values[ours] = np.array(found)
            reported |= {(ours, p): summary[theirs][p] / 1000.0 for p in ("p50", "p99")}
    num_output_tokens = tuple(int(one["output_sequence_length"]["value"]) for one in each)
    return Measured(values, reported, num_output_tokens, len(lines) - len(each))


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "guidellm": Peer("guidellm", "guidellm==0.8.1", _guidellm, _read_guidellm),
        "aiperf": Peer("aiperf", "aiperf==0.13.0", _aiperf, _read_aiperf),
    }
)


def _rate(load: Load) -> float:
    assert isinstance(load, OpenLoad)
    return load.rate


def _arrivals(load: Load) -> str:
    assert isinstance(load, OpenLoad)
    return load.arrivals


def _put_into_hub(tokenizer: Path, home: Path) -> None:
    """Make a hub's cache with that directory in it: aiperf takes tokenizers from nowhere else without a network."""
    place = home / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    (place / "snapshots").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(_REVISION)
    (place / "snapshots" / _REVISION).symlink_to(tokenizer)


def _run(command: list[str], failure: str, **environment: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | environment, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{failure}: {error}") from None
    if done.returncode != 0:
        said: list[Any] = [
            line.strip(" │") for line in (done.stderr + done.stdout).splitlines() if line.strip(" │╰─╯╭╮")
        ]
        errors = [line for line in said if "rror" in line]
        raise PeerError(f"{failure}: {(errors or said or ['no reason given'])[-1]}")
