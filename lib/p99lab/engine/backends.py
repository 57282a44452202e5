"""Puts a runner together from what the device, and what is installed, allow."""

from __future__ import annotations

import logging

import torch

from p99lab.engine.attention.base import AttentionBackend
from p99lab.engine.attention.reference import ReferenceAttention
from p99lab.engine.config import MAX_NUM_SEQS, EngineConfig
from p99lab.engine.graphs import StepGraphs, shapes
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.model import LlamaModel
from p99lab.engine.runner import ModelRunner
from p99lab.engine.weights import Weights
from p99lab.errors import BadParameterError

LOGGER = logging.getLogger(__name__)


def make_runner(config: EngineConfig, weights: Weights, pool: KVPool) -> ModelRunner:
    """Model, attention and graphs over the pool.

    Raises:
        BadParameterError: the attention backend asked for cannot be used here.
    """
    model = LlamaModel(weights)
    device = pool.k.device
    sampled = torch.zeros(MAX_NUM_SEQS, dtype=torch.int64, device=device)
    missing = _flashinfer_misses(config, weights, pool)
    if missing is not None:
        if config.attention.backend == "flashinfer":
            raise BadParameterError(f"attention backend 'flashinfer': {missing}")
        if config.attention.backend == "auto" and device.type == "cuda":
            LOGGER.warning("attention in plain torch, which is slow on a GPU: %s", missing)
        attention: AttentionBackend = ReferenceAttention(pool)
        return ModelRunner(model, pool, attention, config.seed, sampled)
    from p99lab.engine.attention.flashinfer import FlashInferAttention

    captured = FlashInferAttention(pool, weights.geometry)
    graphs = None
    if config.graphs.enabled:
        wanted = shapes(config.scheduler.max_num_seqs, config.graphs.max_num_tokens)
        with torch.inference_mode():
            graphs = StepGraphs(model, captured, sampled, wanted)
    return ModelRunner(model, pool, captured, config.seed, sampled, graphs)


def _flashinfer_misses(config: EngineConfig, weights: Weights, pool: KVPool) -> str | None:
    """Why FlashInfer's kernels are not to be used, in one line; None: they are."""
    if config.attention.backend == "reference":
        return "not asked for"
    if pool.k.device.type != "cuda":
        return f"it needs a GPU, the device is '{pool.k.device}'"
    from p99lab.engine.attention.flashinfer import unsupported

    return unsupported(pool.k.device, pool.k.dtype, weights.geometry)
