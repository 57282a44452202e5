"""Proof: clients that others wrote, against `p99lab serve`: the official `openai` package, lm-eval and guidellm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from p99lab.engine import model_store
from p99lab.lab.proof import harness, official_client
from p99lab.lab.proof.check import Check
from p99lab.lab.proof.environments import environment
from p99lab.lab.proof.peer_tools import PEERS, Assignment, Measured, PeerError
from p99lab.probe.workload import parse_load
from p99lab.serving.process import server_process

MODEL = "smollm2-135m"
TOLERANCE = 1e-3  # of a log-likelihood, in nats
NUM_CONCURRENT = 4
NUM_REQUESTS, NUM_TOKENS = 20, 8  # guidellm's


def checks(work: Path) -> Iterator[Check]:
    """The checks of this part. On first use the model is fetched, lm-eval and guidellm are installed: minutes."""
    directory = model_store.fetch(MODEL)
    yield from official_client.checks(MODEL, directory)
    python = environment("lm-eval", harness.REQUIREMENTS)
    folder = work / "task"
    harness.write_task(folder)
    with server_process([MODEL]) as url:
        ours = harness.through_server(python, folder, url, MODEL, directory, NUM_CONCURRENT)
        yield from through_guidellm(url, directory, work / "guidellm")
    theirs = harness.through_transformers(python, folder, directory)
    yield from compared(ours, theirs)


def compared(ours: Sequence[harness.Item], theirs: Sequence[harness.Item]) -> Iterator[Check]:
    """The server's answers to each question against those of transformers."""
    name = "lm-eval local-completions against hf"
    found, expected = (f"{sum(item.acc for item in items):.0f} of {len(items)} right" for items in (ours, theirs))
    same = [item.acc for item in ours] == [item.acc for item in theirs]
    yield Check(f"{name}: acc", expected, found, same, f"{harness.NUM_EXAMPLES} examples before each question")
    pairs = list(zip(ours, theirs, strict=True))
    apart = [
        abs(mine - other)
        for item, twin in pairs
        for mine, other in zip(item.loglikelihoods, twin.loglikelihoods, strict=True)
    ]
    found = f"{max(apart):.1e} apart at most, of {len(apart)}"
    yield Check(f"{name}: log-likelihoods", f"within {TOLERANCE:g}", found, max(apart) <= TOLERANCE)
    num_alike = sum(item.greedy == twin.greedy for item, twin in pairs)
    expected, found = f"{len(pairs)} questions alike", f"{num_alike} alike"
    yield Check(f"{name}: which choices are greedy", expected, found, num_alike == len(pairs))


def through_guidellm(url: str, tokenizer: Path, work: Path) -> Iterator[Check]:
    """A short closed load of guidellm's against `url` (ending in /v1); its files go into the new folder `work`."""
    load = parse_load({"kind": "closed", "concurrency": NUM_CONCURRENT, "num_requests": NUM_REQUESTS})
    assignment = Assignment(url.removesuffix("/v1"), MODEL, load, NUM_TOKENS, tokenizer)
    try:
        yield from answered(PEERS["guidellm"].measure(assignment, work))
    except PeerError as error:
        yield Check("guidellm", "measures", "does not", False, str(error))


def answered(measured: Measured) -> Iterator[Check]:
    """Whether every request that guidellm was to send got the whole of its answer, token by token."""
    name = f"guidellm, {NUM_CONCURRENT} streams"
    e2e, ttft = (measured.values.get(metric, np.empty(0)) for metric in ("e2e", "ttft"))
    expected, found = f"{NUM_REQUESTS} answered, 0 failed", f"{len(e2e)} answered, {measured.num_failed} failed"
    yield Check(f"{name}: requests", expected, found, expected == found)
    lengths = sorted(set(measured.num_output_tokens))
    found = f"{sum(measured.num_output_tokens)}, in answers of {', '.join(map(str, lengths)) or 'none'}"
    whole = measured.num_output_tokens == (NUM_TOKENS,) * NUM_REQUESTS
    yield Check(f"{name}: output tokens", f"{NUM_REQUESTS} answers of {NUM_TOKENS}", found, whole)
    streamed = len(ttft) == len(e2e) == NUM_REQUESTS and bool(np.all((ttft > 0.0) & (ttft < e2e)))
    found = f"{len(ttft)}, median {1000 * np.median(ttft):.1f} of {1000 * np.median(e2e):.1f} ms" if streamed else "not"
    yield Check(f"{name}: TTFT", f"{NUM_REQUESTS}, each before its answer's end", found, streamed)
