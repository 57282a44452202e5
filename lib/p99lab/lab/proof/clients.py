"""Proof: clients that others wrote, against `p99lab serve`: the official `openai` package, and lm-eval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from p99lab.engine import model_store
from p99lab.lab.proof import harness, official_client
from p99lab.lab.proof.check import Check
from p99lab.lab.proof.environments import environment
from p99lab.serving.process import server_process

MODEL = "smollm2-135m"
TOLERANCE = 1e-3  # of a log-likelihood, in nats
NUM_CONCURRENT = 4


def checks(work: Path) -> Iterator[Check]:
    """The checks of this part. On first use the model is fetched and lm-eval installed: minutes."""
    directory = model_store.fetch(MODEL)
    yield from official_client.checks(MODEL, directory)
    python = environment("lm-eval", harness.REQUIREMENTS)
    folder = work / "task"
    harness.write_task(folder)
    with server_process([MODEL]) as url:
        ours = harness.through_server(python, folder, url, MODEL, directory, NUM_CONCURRENT)
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
