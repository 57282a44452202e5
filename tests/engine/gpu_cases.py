"""What the GPU tests share: tiny models of the shapes that kernels tell apart, loads over them, and a yardstick.

An answer is held against the same weights in float32, computed whole on the CPU: every log-probability that an engine
reports, in the context of the tokens that it has itself chosen, so that near ties make no comparison fail or pass. How
far it may be off is no number out of the air: what bfloat16 alone costs is measured, on the same tokens, with the
reference attention on the engine's device.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.backends import make_runner
from p99lab.engine.config import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    GraphsConfig,
    GroupingConfig,
    ModelConfig,
    SchedulerConfig,
)
from p99lab.engine.engine import Engine
from p99lab.engine.events import Completion
from p99lab.engine.geometry import Geometry
from p99lab.engine.graphs import Captured, StepGraphs
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.model import LlamaModel
from p99lab.engine.model_store import load
from p99lab.engine.plan import InFlight, Row, StepPath, StepPlan, StepResult
from p99lab.engine.request import Logprobs, SamplingParams
from p99lab.engine.runner import Runner
from p99lab.engine.weights import Weights
from tests.engine.pairwise import pairs

VOCAB = 128
NUM_KV_HEADS = 2
MAX_POSITIONS = 8192
MAX_NUM_SEQS = 12
NUM_TOP = 5  # log-probabilities asked for of every token
DECODE_GRAPHS, MIXED_GRAPHS = 16, 96  # tokens of the largest captured step: rows of one token only; prompts too

Prompt = list[int]

RIGS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Devices: the reference backend on a CPU, where the tests' own logic is tested, and FlashInfer on a GPU."""


@dataclass(frozen=True)
class ModelShape:
    """`group`: query heads of a kv head."""

    architecture: str
    head_dim: int
    group: int
    tied: bool

    def save(self, directory: Path) -> None:
        """Write seeded random weights in bfloat16, biases and norms too, and a tokenizer of words w0 … w127."""
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self._config()))
        weights = Weights.allocate(Geometry.from_directory(directory), torch.float32, "cpu")
        generator = torch.Generator().manual_seed(7)
        for name, tensor in weights.by_name():
            tensor.normal_(0.0, 1.0, generator=generator).mul_(_scale(name, tensor)).add_(_mean(name))
        save_file(
            {name: tensor.bfloat16().contiguous() for name, tensor in weights.by_name()},
            directory / "model.safetensors",
        )
        words = {f"w{number}": number for number in range(VOCAB)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))

    def _config(self) -> dict[str, Any]:
        return {
            "model_type": self.architecture,
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": NUM_KV_HEADS * self.group,
            "num_key_value_heads": NUM_KV_HEADS,
            "head_dim": self.head_dim,
            "max_position_embeddings": MAX_POSITIONS,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "eos_token_id": VOCAB - 1,
        }


def _scale(name: str, tensor: torch.Tensor) -> float:
    """Standard deviations under which attention is neither even nor all on one key, and matters for the logits."""
    if name.endswith("norm.weight"):
        return 0.2
    if name.endswith("bias"):
        return 0.5
    gain = 3.0 if name.endswith("o_proj.weight") else 1.5
    return gain / math.sqrt(tensor.shape[1])


def _mean(name: str) -> float:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.5
    return 1.0 if name.endswith("norm.weight") else 0.0


class Reference:
    """A model computed the plain way: sequences whole, all in one step, by the reference attention."""

    def __init__(self, directory: Path, dtype: str, device: str) -> None:
        weights, _ = load(ModelConfig(name=str(directory), dtype=dtype, device=device))
        self._weights, self._model = weights, LlamaModel(weights)

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Prompt]) -> list[torch.Tensor]:
        """For each [len, vocab] float32 on the CPU: row i is what the model expects of token i + 1."""
        device, dtype = self._weights.embedding.device, self._weights.embedding.dtype
        lengths = [len(sequence) for sequence in sequences]
        size = max(lengths)
        attention = ReferenceAttention(KVPool.allocate(self._model.geometry, len(sequences), size, dtype, device))
        attention.plan(StepPlan(0, tuple(_whole(page, sequence) for page, sequence in enumerate(sequences))))
        token_ids = torch.tensor([*itertools.chain(*sequences)], device=device)
        positions = torch.tensor([*itertools.chain(*map(range, lengths))], device=device)
        logits = self._model.logits(self._model.forward(token_ids, positions, attention))
        return list(logits.log_softmax(-1).cpu().split(lengths))


def _whole(page: int, sequence: Prompt) -> Row:
    token_ids = np.array(sequence, np.int32)
    return Row(str(page), page, token_ids, 0, np.array([page], np.int32), True, SamplingParams(), 0)


class Asked(NamedTuple):
    """A request and its answer. `number`: its place in the order in which its engine was asked."""

    prompt: Prompt
    sampling: SamplingParams
    number: int
    answer: Completion


class Judge:
    """Holds a model's answers against the same weights in float32.

    Log-probabilities may be off by twice what bfloat16 alone costs on these very tokens: the root mean square of all
    and that of each request with `MANY` tokens, and the worst. FlashInfer rounds softmax's weights and every partial
    result to bfloat16, where the reference keeps float32: that is what the factor is for. `ROUNDING` is half the
    distance of two bfloat16 logits between 4 and 8, for requests whose tokens happen to cost nothing. (On the CPU,
    where the engine is a bfloat16 reference too, the ratio of all was 0.97 to 1.04.)
    """

    FACTOR, ROUNDING, MANY = 2.0, 2.0**-6, 6

    def __init__(self, directory: Path, device: str) -> None:
        self._exact = Reference(directory, "float32", "cpu")
        self._rounded = Reference(directory, "bfloat16", device)

    def check(self, asked: Sequence[Asked]) -> None:
        """
        Raises:
            AssertionError: a log-probability, a greedy choice or a drawn token is not what the model expects.
        """
        sequences = [one.prompt + one.answer.token_ids for one in asked]
        exact, rounded = self._exact.logprobs(sequences), self._rounded.logprobs(sequences)
        errors, costs = [], []
        for request, expected, yardstick in zip(asked, exact, rounded, strict=True):
            told = [*_told(request)]
            rows, ids = (np.array([one[i] for one in told], np.int64) for i in (0, 1))
            lines = expected[rows, ids].numpy()
            errors.append(np.abs(np.array([value for _, _, value in told]) - lines))
            costs.append(np.abs(yardstick[rows, ids].numpy() - lines))
            assert np.isfinite(errors[-1]).all()
            if len({*rows}) >= self.MANY:
                assert _rms(errors[-1]) <= self.FACTOR * _rms(costs[-1]) + self.ROUNDING
        errors_of_all, costs_of_all = np.concatenate(errors), np.concatenate(costs)
        worst = self.FACTOR * costs_of_all.max() + self.ROUNDING
        assert _rms(errors_of_all) <= self.FACTOR * _rms(costs_of_all)
        assert errors_of_all.max() <= worst
        for request, expected in zip(asked, exact, strict=True):
            for place, token_id in enumerate(request.answer.token_ids):
                line = expected[len(request.prompt) - 1 + place].double().numpy()
                if request.sampling.temperature == 0.0:
                    assert line.max() - line[token_id] <= 2 * worst  # of two that are as near, either may win
                else:
                    _check_drawn(line, token_id, request, place, 2 * worst)


def _told(request: Asked) -> Iterator[tuple[int, int, float]]:
    """(row of the whole sequence, token id, log-probability) of everything that an answer says."""
    scores: list[tuple[int, int, Logprobs]] = []
    for at, score in enumerate(request.answer.prompt_logprobs or ()):
        if score is not None:
            scores.append((at - 1, request.prompt[at], score))
    for at, (token_id, score) in enumerate(zip(request.answer.token_ids, request.answer.logprobs, strict=True)):
        scores.append((len(request.prompt) - 1 + at, token_id, score))
    for row, token_id, score in scores:
        yield row, token_id, score.chosen
        for other, value in score.top:
            yield row, other, value


def _check_drawn(line: NDArray[np.float64], token_id: int, request: Asked, place: int, near: float) -> None:
    """The request's uniform number of this place falls on the token, in the order of ids.

    Every log-probability may be off by half of `near`.
    """
    temperature = request.sampling.temperature
    probs = np.exp((line - line.max()) / temperature)
    probs /= probs.sum()
    before, after = probs[:token_id].sum(), probs[token_id + 1 :].sum()
    number = uniform(request, place)
    shrunk = math.exp(-near / temperature)
    assert before * shrunk <= number <= 1 - after * shrunk


def uniform(request: Asked, place: int, engine_seed: int = 0) -> float:
    """What a request draws for its token at `place`: by its seed, or the engine's and its number, and by the place."""
    seed = request.sampling.seed
    key = (engine_seed, request.number + 1) if seed is None else (seed, 0)
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=place)
    return float(np.random.Generator(generator).random(dtype=np.float32))


def _rms(errors: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(errors**2)))


@dataclass(frozen=True)
class Model:
    """A model on disk and who judges its answers."""

    directory: Path
    device: str
    shape: ModelShape

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.directory, self.device)

    def config(
        self,
        *,
        page_size: int = 16,
        num_pages: int | None = 256,
        prefix_cache: bool = True,
        chunk: int = 64,
        overlap: bool = True,
        reserve_tokens: int = 256,
        grouped: bool = True,
        graphs: int | None = DECODE_GRAPHS,
    ) -> EngineConfig:
        """`graphs`: tokens of the largest captured step; None: none are."""
        return EngineConfig(
            model=ModelConfig(name=str(self.directory), dtype="bfloat16", device=self.device),
            cache=CacheConfig(page_size=page_size, num_pages=num_pages, prefix_cache=prefix_cache),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=chunk,
                max_num_seqs=MAX_NUM_SEQS,
                overlap=overlap,
                reserve_tokens=reserve_tokens,
            ),
            grouping=GroupingConfig(enabled=grouped, decide_by="length", min_shared_tokens=1),
            attention=AttentionConfig(backend="flashinfer" if self.device == "cuda" else "reference"),
            graphs=GraphsConfig(enabled=graphs is not None, max_num_tokens=graphs or DECODE_GRAPHS),
        )


class Models:
    """Models by shape and device, each made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[ModelShape, str], Model] = {}

    def get(self, device: str, shape: ModelShape = ModelShape("llama", 64, 4, tied=False)) -> Model:
        if (shape, device) not in self._made:
            directory = self._directory / f"model-{len(self._made)}"
            shape.save(directory)
            self._made[shape, device] = Model(directory, device, shape)
        return self._made[shape, device]


@dataclass
class Watched:
    """A runner whose plans are kept, or changed before they are run. `replayed`: epochs of those run as graphs."""

    runner: Runner
    tamper: Callable[[StepPlan], StepPlan]
    plans: list[StepPlan] = field(default_factory=list)
    replayed: set[int] = field(default_factory=set)

    def launch(self, plan: StepPlan) -> InFlight:
        self.plans.append(plan)
        return self.runner.launch(self.tamper(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def reconfigure(self, attention: AttentionConfig | None, graphs: GraphsConfig | None) -> None:
        self.runner.reconfigure(attention, graphs)

    @property
    def decode_plans(self) -> list[StepPlan]:
        return [plan for plan in self.plans if plan.num_tokens == len(plan.rows)]


@contextmanager
def watched(
    config: EngineConfig, tamper: Callable[[StepPlan], StepPlan] = lambda plan: plan
) -> Iterator[tuple[Engine, Watched]]:
    """An engine, and what it has its runner do."""
    runners: list[Watched] = []
    prepare = StepGraphs.prepare

    def new_runner(*args: Any) -> Watched:
        runners.append(Watched(make_runner(*args), tamper))
        return runners[0]

    def noted(graphs: StepGraphs, plan: StepPlan, *args: Any) -> Captured | StepPath:
        prepared = prepare(graphs, plan, *args)
        if isinstance(prepared, Captured) and runners:  # without, the runner is being made, and rehearses
            runners[0].replayed.add(plan.epoch)
        return prepared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "prepare", noted)
        with Engine(config, new_runner=new_runner) as engine:
            yield engine, runners[0]


class Session:
    """Asks an engine, and remembers what was asked in which order. `asked` may be emptied at any time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: list[Asked] = []
        self._num_asked = 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams] | SamplingParams) -> list[Asked]:
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        answers = self.engine.generate(prompts, each)
        asked = [self._note(*one) for one in zip(prompts, each, answers, strict=True)]
        self.asked += asked
        return asked

    def add(self, prompt: Prompt, sampling: SamplingParams) -> None:
        """Queue a request; whoever steps answers it. Errors are the engine's; then nothing was asked."""
        answer = Completion("")
        answer.request_id = self.engine.add(prompt, sampling, on_event=answer.add)
        self.asked.append(self._note(prompt, sampling, answer))

    def _note(self, prompt: Prompt, sampling: SamplingParams, answer: Completion) -> Asked:
        self._num_asked += 1
        return Asked(prompt, sampling, self._num_asked - 1, answer)


def greedy(num_tokens: int, prompt_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=prompt_logprobs)


def drawn(num_tokens: int, seed: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(
        max_tokens=num_tokens,
        temperature=0.8,
        seed=seed,
        ignore_eos=True,
        logprobs=NUM_TOP,
        prompt_logprobs=prompt_logprobs,
    )


@dataclass(frozen=True)
class Load:
    """`documents` are read first, then `questions` asked about them."""

    documents: list[Prompt]
    questions: list[Prompt]


class Writer:
    """Random prompts of chosen lengths. `ends`: tokens beyond a page boundary, or None: anywhere in mid-page."""

    def __init__(self, page_size: int, ends: int | None, seed: int = 0) -> None:
        self._page_size, self._ends = page_size, ends
        self._rng = np.random.default_rng(seed)

    def extend(self, prompt: Prompt, num_pages: int) -> Prompt:
        """A prompt that begins with this one and ends after so many full pages, or just before or behind them."""
        ends = int(self._rng.integers(2, self._page_size - 2)) if self._ends is None else self._ends
        return prompt + self._rng.integers(0, VOCAB, num_pages * self._page_size + ends - len(prompt)).tolist()

    def load(self, groups: str) -> Load:
        """`one`: all ask about one document · `nested`: conversations over documents that begin with one system prompt
        · otherwise documents with five questions, two, one, and a prompt of one token alone."""
        if groups == "nested":
            system = self.extend([], 2)
            first, second = self.extend(system, 4), self.extend(system, 3)
            conversation = self.extend(first, 5)
            asked_about = [*[conversation] * 3, *[first] * 2, *[second] * 2, system]
            return Load([system, first, second, conversation], self._questions(asked_about))
        first, second, third = self.extend([], 3), self.extend([], 2), self.extend([], 1)
        if groups == "one":
            return Load([first], self._questions([first] * 6))
        return Load([first, second, third], [*self._questions([*[first] * 5, *[second] * 2, third]), [3]])

    def _questions(self, asked_about: Iterable[Prompt]) -> list[Prompt]:
        """Every third asks for a page more than the others."""
        return [
            self.extend(prompt, len(prompt) // self._page_size + 1 + (number % 3 == 2) + (self._ends == -1))
            for number, prompt in enumerate(asked_about)
        ]


def covering(factors: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Combinations in which every pair of values of every two factors occurs, found without trying all combinations.

    Each begins with the first pair that is missing. The other factors take whatever covers most of the missing pairs,
    and of several such values the one taken least often so far.
    """
    columns = [*factors.values()]
    missing = dict.fromkeys(
        ((i, one), (j, other))
        for (i, some), (j, others) in itertools.combinations(enumerate(columns), 2)
        for one, other in itertools.product(some, others)
    )
    num_taken: Counter[tuple[int, Any]] = Counter()
    while missing:
        chosen: dict[int, Any] = dict(next(iter(missing)))
        for column, values in enumerate(columns):
            if column not in chosen:
                gains = [
                    sum(tuple(sorted((item, (column, value)), key=_place)) in missing for item in chosen.items())
                    for value in values
                ]
                least = [-num_taken[column, value] for value in values]
                chosen[column] = values[max(range(len(values)), key=lambda i: (gains[i], least[i]))]
        row = tuple(chosen[column] for column in range(len(columns)))
        num_taken.update(enumerate(row))
        for pair in pairs(row):
            missing.pop(pair, None)
        yield row


def _place(item: tuple[int, Any]) -> int:
    return item[0]
