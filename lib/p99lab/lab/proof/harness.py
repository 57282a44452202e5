"""lm-eval over a small task of our own, once through a server and once through transformers on the same weights.

The task is made here, out of three lists of pairs: no data set has to be fetched. Log-likelihoods through the server
need its `echo` and `logprobs`: lm-eval sends batches of token ids and reads the prompt's own log-probabilities.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p99lab.errors import P99labError

REQUIREMENTS = (
    "lm-eval[api]==0.4.13",
    "torch==2.13.0",
    "transformers==5.24.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
)
TASK = "p99lab_pairs"
NUM_EXAMPLES = 8  # before each question: all prompts begin alike, as those of a benchmark do
NUM_CHOICES = 4
PAIRS = {
    "The capital of {} is": (
        "France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, Egypt Cairo, Greece Athens, "
        "Russia Moscow, China Beijing, Austria Vienna, Portugal Lisbon, Poland Warsaw, Ireland Dublin, Cuba Havana"
    ),
    "The opposite of {} is": (
        "hot cold, big small, early late, open closed, wet dry, fast slow, light dark, full empty, rich poor, "
        "young old, strong weak, high low, near far"
    ),
    "The young of a {} is called a": (
        "dog puppy, cat kitten, cow calf, horse foal, sheep lamb, goat kid, pig piglet, duck duckling, goose gosling, "
        "lion cub, deer fawn, frog tadpole, kangaroo joey"
    ),
}


class HarnessError(P99labError):
    """lm-eval has failed."""


@dataclass(frozen=True, slots=True)
class Item:
    """What one model makes of one question: each choice's log-likelihood, whether it is greedy, and the mark."""

    loglikelihoods: tuple[float, ...]
    greedy: tuple[bool, ...]
    acc: float


def write_task(folder: Path) -> None:
    """The task's YAML and its questions."""
    folder.mkdir(parents=True)
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in _questions()))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": NUM_EXAMPLES,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task, indent=2))  # JSON is YAML


def through_server(
    python: Path, folder: Path, url: str, model: str, tokenizer: Path, num_concurrent: int
) -> list[Item]:
    """As a user would: `local-completions` against `url` (ending in /v1), the prompts sent as token ids."""
    arguments = {
        "model": model,
        "base_url": f"{url}/completions",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": num_concurrent,
        "max_retries": 1,
    }
    return _evaluate(python, folder, "local-completions", arguments, ["--batch_size", "8"])


def through_transformers(python: Path, folder: Path, directory: Path) -> list[Item]:
    """lm-eval's own `hf` model over the same weights, in float32 on the CPU."""
    arguments = {"pretrained": directory, "dtype": "float32"}
    return _evaluate(python, folder, "hf", arguments, ["--device", "cpu", "--batch_size", "8"])


def _questions() -> Iterator[dict[str, Any]]:
    """The wrong answers to a question are the right ones to its neighbours; the right one's place goes round."""
    for sentence, written in PAIRS.items():
        pairs = [pair.split() for pair in written.split(", ")]
        for number, (subject, _) in enumerate(pairs):
            answer = number % NUM_CHOICES
            choices = [pairs[(number - answer + i) % len(pairs)][1] for i in range(NUM_CHOICES)]
            yield {"question": sentence.format(subject), "choices": choices, "answer": answer}


def _evaluate(
    python: Path, folder: Path, kind: str, arguments: Mapping[str, object], options: Sequence[str]
) -> list[Item]:
    out = folder / f"results-{kind}"
    model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [str(python), "-m", "lm_eval", "run", "--model", kind, "--model_args", model_args, "--tasks", TASK]
    command += ["--include_path", str(folder), "--log_samples", "--output_path", str(out), *options]
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | own | local, cwd=folder, check=False)
    if ran.returncode != 0:
        lines = [line for line in ran.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise HarnessError(f"lm-eval --model {kind} has failed: {lines[-1].strip()}")
    (written,) = out.rglob(f"samples_{TASK}_*.jsonl")
    samples = [json.loads(line) for line in written.read_text().splitlines()]
    return [_item(sample) for sample in sorted(samples, key=lambda sample: int(sample["doc_id"]))]


def _item(sample: Mapping[str, Any]) -> Item:
    answers = [response[0] for response in sample["resps"]]
    return Item(
        loglikelihoods=tuple(float(loglikelihood) for loglikelihood, _ in answers),
        greedy=tuple(str(greedy) == "True" for _, greedy in answers),
        acc=float(sample["acc"]),
    )
