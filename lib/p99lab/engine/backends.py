"""Puts a runner together from what the device, and what is installed, allow."""

from __future__ import annotations

import logging
from functools import cached_property

import numpy as np
import torch

from p99lab.engine.attention.base import AttentionBackend, GraphAttention
from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.config import MAX_NUM_SEQS, AttentionConfig, EngineConfig, GraphsConfig
from p99lab.engine.costs import H200, StepCost
from p99lab.engine.device_memory import max_step_tokens
from p99lab.engine.geometry import Geometry
from p99lab.engine.graphs import StepGraphs, shapes
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.model import LlamaModel
from p99lab.engine.plan import PrefixGroup, Row, StepPlan
from p99lab.engine.request import SamplingParams
from p99lab.engine.runner import ModelRunner, Runner
from p99lab.engine.weights import Weights
from p99lab.errors import BadParameterError

MAX_REHEARSED_TOKENS = 16384  # a larger first step takes seconds, and memory that grows with it was reserved
REHEARSED_ROWS = (1, 2, 4, 8, 16, 32, 64)  # of decode steps: kernels are compiled for as many, up to a power of two
MIN_LONG_TOKENS = 2048  # what a row has seen before, so that each attention kernel has its part

LOGGER = logging.getLogger(__name__)


def make_runner(config: EngineConfig, weights: Weights, pool: KVPool, costs: StepCost | None = None) -> ModelRunner:
    """Model, attention and graphs over the pool.

    On a GPU kernels are compiled, graphs captured and steps of up to 16 384 tokens tried before this returns.

    Args:
        costs: what plans the steps asks too, see `StepCost`; None: nobody has measured the device.

    Raises:
        BadParameterError: the attention backend asked for cannot be used here, or weights and pool leave no room for
            the steps that were asked for.
    """
    try:
        if pool.k.device.type != "cuda":
            return _make_runner(config, weights, pool, costs)[0]
        with torch.cuda.device(pool.k.device):
            runner, ways = _make_runner(config, weights, pool, costs)
            for attention, graphs in ways:
                runner.reconfigure(attention, graphs)
                num_tokens = graphs.max_num_tokens if graphs.enabled else config.scheduler.max_num_batched_tokens
                rehearse(runner, pool, num_tokens, config.scheduler.max_num_seqs)
    except RuntimeError as error:  # ending a capture that ran out of memory fails too, and then says so instead
        if not any(isinstance(one, torch.OutOfMemoryError) for one in (error, error.__context__)):
            raise
        wanted = f"steps of up to {config.scheduler.max_num_batched_tokens} tokens"
        raise BadParameterError(f"{wanted} do not fit beside weights and pool: fewer tokens, or fewer pages") from None
    return runner


def rehearse(runner: Runner, pool: KVPool, max_num_tokens: int, max_num_seqs: int) -> None:
    """Run a step of each kind over pages that nobody holds yet, the largest first.

    What is compiled or loaded at its first use would otherwise be paid by a request, a quarter of a second at a time.
    """
    num_slots = pool.k.shape[1] * pool.page_size
    pages = np.arange(pool.k.shape[1], dtype=np.int32)
    plain, drawn = SamplingParams(), SamplingParams(temperature=1.0)
    truncated = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)

    def row(num_tokens: int, num_computed_tokens: int, sampling: SamplingParams) -> Row:
        num_pages = -(-(num_computed_tokens + num_tokens) // pool.page_size)
        ids = np.zeros(num_tokens, np.int32)
        return Row("rehearsal", 0, ids, num_computed_tokens, pages[:num_pages], True, sampling, 0)

    whole = min(max_num_tokens, MAX_REHEARSED_TOKENS, num_slots)
    few = min(whole, pool.page_size)
    long = max(1, min(num_slots - few, MIN_LONG_TOKENS))
    for rows in (
        [row(whole, 0, plain)],
        [row(few, long, plain)],
        [row(few, long, plain), row(1, long, truncated), row(1, 1, drawn)],
        [row(1, 0, truncated)] * max_num_seqs,
    ):
        runner.execute(StepPlan(0, tuple(rows)))
    for num_rows in REHEARSED_ROWS:
        if num_rows <= max_num_seqs:
            shared = PrefixGroup(tuple(range(num_rows)), 0, long // pool.page_size)
            groups = (shared,) if num_rows > 1 and shared.num_pages else ()
            runner.execute(StepPlan(0, (row(1, long, plain),) * num_rows, groups))


def _make_runner(
    config: EngineConfig, weights: Weights, pool: KVPool, costs: StepCost | None
) -> tuple[ModelRunner, list[tuple[AttentionConfig, GraphsConfig]]]:
    """A runner, and the ways in which it may come to run a step; the last is the one that is configured."""
    model = LlamaModel(weights)
    sampled = torch.zeros(MAX_NUM_SEQS, dtype=torch.int64, device=pool.k.device)
    num_tokens = max(max_step_tokens(config.scheduler, weights.geometry), config.graphs.max_num_tokens)
    attentions = Attentions(pool, weights.geometry, num_tokens, costs)
    attention = attentions.choose(config.attention)
    graphs = None
    if config.graphs.enabled and config.attention.kernels == "spans" and attention is not attentions.reference:
        wanted = shapes(config.scheduler.max_num_seqs, config.graphs.max_num_tokens)
        with torch.inference_mode():
            graphs = StepGraphs(model, attentions.spans, sampled, wanted)
    runner = ModelRunner(model, pool, attention, config.seed, sampled, graphs, attentions.choose)
    ways = [(config.attention, config.graphs.model_copy(update={"enabled": False}))]
    if config.attention.kernels == "spans" and attention is not attentions.reference:
        ways.insert(0, (config.attention.model_copy(update={"kernels": "paged"}), ways[0][1]))  # for scattered pages
    if graphs is not None:
        ways.append((config.attention, config.graphs))
    return runner, ways


class Attentions:
    """The attention backends over one pool, each made when it is first asked for: kernels may have to be compiled.

    `max_num_tokens`: of a step, see `FlashInferAttention`. `costs`: say how spans are cut; None: an H200's do.
    """

    def __init__(self, pool: KVPool, geometry: Geometry, max_num_tokens: int, costs: StepCost | None) -> None:
        self._pool, self._geometry, self._max_num_tokens, self._costs = pool, geometry, max_num_tokens, costs
        self._has_warned = False

    @cached_property
    def reference(self) -> ReferenceAttention:
        return ReferenceAttention(self._pool)

    @cached_property
    def spans(self) -> GraphAttention:
        from p99lab.engine.attention.flashinfer import FlashInferAttention

        pool = self._pool  # of a Hopper GPU: those that are not measured have much the same costs as an H200
        costs = self._costs or StepCost(H200, self._geometry, pool.page_size, pool.k.element_size())
        return FlashInferAttention(pool, self._geometry, costs.segment_tokens, self.paged, self._max_num_tokens)

    @cached_property
    def paged(self) -> AttentionBackend:
        from p99lab.engine.attention.paged import PagedAttention

        return PagedAttention(self._pool, self._geometry)

    def choose(self, config: AttentionConfig) -> AttentionBackend:
        """What the configuration asks for; with `auto` plain torch where that is missing, and one warning on a GPU.

        Raises:
            BadParameterError: FlashInfer is asked for by its name, and cannot be used here.
        """
        missing = self._missing(config)
        if missing is None:
            return self.paged if config.kernels == "paged" else self.spans
        if config.backend == "flashinfer":
            raise BadParameterError(f"attention backend 'flashinfer': {missing}")
        if config.backend == "auto" and self._pool.k.device.type == "cuda" and not self._has_warned:
            self._has_warned = True
            LOGGER.warning("attention in plain torch, which is slow on a GPU: %s", missing)
        return self.reference

    def _missing(self, config: AttentionConfig) -> str | None:
        """Why FlashInfer's kernels are not to be used, in one line; None: they are."""
        if config.backend == "reference":
            return "not asked for"
        device, dtype = self._pool.k.device, self._pool.k.dtype
        if device.type != "cuda":
            return f"it needs a GPU, the device is '{device}'"
        from p99lab.engine.attention.paged import unsupported

        return unsupported(device, dtype, self._geometry)  # whichever kernels: spans leave it some steps
