"""`p99lab bench cpu`: this engine beside transformers, same weights, dtype and threads, interleaved in one run.

Three figures, each the median of `repeats` repeats that alternate between the two: prefill of one prompt, one decode
step of one request behind it, and the generated tokens per second of several short questions over few shared documents.
The documents are primed on both sides; transformers takes the questions one by one, each with a deep copy of its
document's DynamicCache made outside the clock. The floors are arithmetic over rates measured in the same run: FLOPs of
the matrix products over the rate of a large one, bytes of the weights over the rate at which memory can be read.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from p99lab.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.geometry import Geometry
from p99lab.engine.model_store import resolve
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.errors import BadParameterError
from p99lab.lab.bench.rows import BenchRow


@dataclass(frozen=True, slots=True)
class CpuBench:
    """Sizes, in tokens. The defaults are the ones the project's bars are stated for."""

    model: str = "smollm2-135m"
    context_len: int = 2048
    num_decode_steps: int = 16
    num_documents: int = 2
    num_questions: int = 8
    question_len: int = 32
    answer_len: int = 32
    repeats: int = 5
    threads: int = 2


def run(bench: CpuBench | None = None) -> list[BenchRow]:
    """Measure and return one row per figure.

    Raises:
        ModelError: the model is not there.
    """
    bench = bench or CpuBench()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(bench.threads)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames `past_key_values` to `cache`
            return _run(bench)
    finally:
        torch.set_num_threads(threads_before)


def _run(bench: CpuBench) -> list[BenchRow]:
    ours, peer = Ours(bench), Peer(bench)
    with ours.engine:
        vocab_size = ours.engine.geometry.vocab_size
        documents, questions = _token_ids(bench, vocab_size)
        ours.prime(documents)
        peer.prime(documents)
        prefill: list[tuple[float, float]] = []
        decode: list[tuple[float, float]] = []
        shared: list[tuple[float, float]] = []
        generator = np.random.default_rng(1)
        for repeat in range(bench.repeats + 1):
            prompt = generator.integers(100, vocab_size, bench.context_len, dtype=np.int32)
            ours_prefill, ours_decode = ours.prefill_and_decode(prompt)
            peer_prefill, peer_decode = peer.prefill_and_decode(prompt)
            rates = ours.shared_questions(documents, questions), peer.shared_questions(documents, questions)
            if repeat > 0:  # the first warms both up
                prefill.append((ours_prefill, peer_prefill))
                decode.append((ours_decode, peer_decode))
                shared.append(rates)
        geometry = ours.engine.geometry
    flop_rate, byte_rate = _flop_rate(), _byte_rate()
    prefill_floor = _prefill_flops(geometry, bench.context_len) / flop_rate
    decode_floor = _weight_bytes(geometry) / byte_rate
    return [
        _row(f"prefill of {bench.context_len} tokens", "s", prefill, prefill_floor),
        _row(f"decode step, 1 request at {bench.context_len}", "s", decode, decode_floor),
        _row(
            f"{bench.num_questions} questions over {bench.num_documents} shared documents",
            "tokens/s",
            shared,
            _shared_floor(bench, geometry, flop_rate, byte_rate),
        ),
    ]


class Ours:
    """This engine's side of the bench."""

    def __init__(self, bench: CpuBench) -> None:
        self._bench = bench
        self.engine = Engine(
            EngineConfig(
                model=ModelConfig(name=bench.model),
                cache=CacheConfig(num_pages=512),
                scheduler=SchedulerConfig(max_num_batched_tokens=bench.context_len, max_num_seqs=bench.num_questions),
            )
        )

    def prime(self, documents: list[IntArray]) -> None:
        self.engine.generate(documents, SamplingParams(max_tokens=1))

    def prefill_and_decode(self, prompt: IntArray) -> tuple[float, float]:
        """Seconds to the first token, and the median seconds of the steps after it."""
        began_s = time.perf_counter()
        self.engine.add(prompt, SamplingParams(max_tokens=1 + self._bench.num_decode_steps, ignore_eos=True))
        self.engine.step()
        prefill_s = time.perf_counter() - began_s
        steps = [_timed(self.engine.step) for _ in range(self._bench.num_decode_steps)]
        return prefill_s, statistics.median(steps)

    def shared_questions(self, documents: list[IntArray], questions: list[IntArray]) -> float:
        """Generated tokens per second of all questions at once."""
        self.engine.forget_except(documents)
        prompts = [np.concatenate([documents[i % len(documents)], question]) for i, question in enumerate(questions)]
        params = SamplingParams(max_tokens=self._bench.answer_len, ignore_eos=True)
        seconds = _timed(lambda: self.engine.generate(prompts, params))
        return len(questions) * self._bench.answer_len / seconds


class Peer:
    """The same through transformers: its SDPA attention, its DynamicCache, its `generate`."""

    def __init__(self, bench: CpuBench) -> None:
        from transformers import AutoModelForCausalLM

        self._bench = bench
        directory = resolve(bench.model)
        if not isinstance(directory, Path):
            raise BadParameterError("transformers needs a model with weights, not a dummy")
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = model.eval()
        self._model.generation_config.pad_token_id = 0
        self._primed: list[Any] = []

    def prime(self, documents: list[IntArray]) -> None:
        """Keep each document's cache; a question goes on from a copy of it."""
        self._primed = [self._forward(document)[1] for document in documents]

    def prefill_and_decode(self, prompt: IntArray) -> tuple[float, float]:
        began_s = time.perf_counter()
        token, cache = self._forward(prompt)
        prefill_s = time.perf_counter() - began_s
        steps = []
        for _ in range(self._bench.num_decode_steps):
            began_s = time.perf_counter()
            token, cache = self._forward(np.array([token], np.int32), cache)
            steps.append(time.perf_counter() - began_s)
        return prefill_s, statistics.median(steps)

    def shared_questions(self, documents: list[IntArray], questions: list[IntArray]) -> float:
        seconds = 0.0
        for i, question in enumerate(questions):
            which = i % len(documents)
            prompt = _batch_of_one(np.concatenate([documents[which], question]))
            cache = copy.deepcopy(self._primed[which])
            seconds += _timed(functools.partial(self._generate, prompt, cache))
        return len(questions) * self._bench.answer_len / seconds

    def _generate(self, prompt: torch.Tensor, cache: Any) -> None:
        length = self._bench.answer_len
        out = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=length,
            min_new_tokens=length,
        )
        if out.shape[1] != prompt.shape[1] + length:
            raise RuntimeError(
                f"transformers generated {out.shape[1] - prompt.shape[1]} tokens, {length} were asked for"
            )

    def _forward(self, token_ids: IntArray, cache: Any = None) -> tuple[int, Any]:
        out = self._model(_batch_of_one(token_ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax()), out.past_key_values


def _token_ids(bench: CpuBench, vocab_size: int) -> tuple[list[IntArray], list[IntArray]]:
    generator = np.random.default_rng(0)
    lengths = [bench.context_len] * bench.num_documents + [bench.question_len] * bench.num_questions
    drawn = [generator.integers(100, vocab_size, length, dtype=np.int32) for length in lengths]
    return drawn[: bench.num_documents], drawn[bench.num_documents :]


def _batch_of_one(token_ids: IntArray) -> torch.Tensor:
    return torch.from_numpy(token_ids.astype(np.int64))[None]


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _weight_bytes(geometry: Geometry) -> int:
    """fp32 bytes of all weights that one decode step reads."""
    return 4 * (_matmul_weights(geometry) + geometry.vocab_size * geometry.hidden_size)


def _matmul_weights(geometry: Geometry) -> int:
    """Weights of all layers' matrix products, the output head apart."""
    q_and_o = 2 * geometry.num_q_heads * geometry.head_dim
    k_and_v = 2 * geometry.num_kv_heads * geometry.head_dim
    return geometry.num_layers * geometry.hidden_size * (q_and_o + k_and_v + 3 * geometry.intermediate_size)


def _prefill_flops(geometry: Geometry, num_tokens: int) -> float:
    """Matrix products and causal attention (half the square) of `num_tokens` tokens."""
    attention = 2 * 2 * geometry.num_layers * geometry.num_q_heads * geometry.head_dim * num_tokens**2 / 2
    return 2.0 * _matmul_weights(geometry) * num_tokens + attention


def _shared_floor(bench: CpuBench, geometry: Geometry, flop_rate: float, byte_rate: float) -> float:
    """Tokens per second if questions run at the matmul rate and every decode step reads the weights once."""
    num_tokens = bench.num_questions * bench.question_len
    attention = 4.0 * geometry.num_layers * geometry.num_q_heads * geometry.head_dim * num_tokens * bench.context_len
    prefill_s = (2.0 * _matmul_weights(geometry) * num_tokens + attention) / flop_rate
    step_s = _weight_bytes(geometry) / byte_rate
    return bench.num_questions * bench.answer_len / (prefill_s + (bench.answer_len - 1) * step_s)


def _flop_rate(size: int = 2048) -> float:
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    return 2 * size**3 / min(_timed(lambda: torch.mm(a, b)) for _ in range(5))


def _byte_rate() -> float:
    """Bytes per second of reading (summing) more memory than any cache holds."""
    memory = torch.ones(64 << 20)
    memory.sum()
    return memory.nbytes / min(_timed(memory.sum) for _ in range(5))


def _row(name: str, unit: str, pairs: list[tuple[float, float]], floor: float) -> BenchRow:
    """Medians of both sides. Seconds are better when fewer, rates when more."""
    ours, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
    more_is_better = unit != "s"
    return BenchRow(
        name=name,
        value=ours,
        unit=unit,
        floor=floor,
        ratio_to_floor=floor / ours if more_is_better else ours / floor,
        peer="transformers",
        peer_value=peer,
        ratio_to_peer=ours / peer if more_is_better else peer / ours,
    )
