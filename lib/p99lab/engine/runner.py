"""Carries out a StepPlan: page copies, one forward pass over all rows, sampling. Holds tensors, decides nothing."""

from __future__ import annotations

import numpy as np
import torch

from p99lab.engine.attention.base import AttentionBackend
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.model import LlamaModel
from p99lab.engine.plan import Logprobs, StepPlan, StepResult
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.engine.sampler import sample, score

NUM_SCORED_AT_ONCE = 256  # prompt tokens whose logits exist at the same time: with 128K words, 0.1 GiB


class ModelRunner:
    """`execute` one plan at a time over a model, a page pool and an attention backend that share a device."""

    def __init__(self, model: LlamaModel, pool: KVPool, attention: AttentionBackend, seed: int) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._seed = seed

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step and wait for its tokens."""
        self._pool.copy_pages(plan.copies)
        self._attention.plan(plan)
        hidden = self._model.forward(*self._inputs(plan), self._attention)  # [T, hidden]
        ends = np.cumsum([row.num_scheduled_tokens for row in plan.rows])
        sampling = [i for i, row in enumerate(plan.rows) if row.samples]
        token_ids: list[int | None] = [None] * len(plan.rows)
        logprobs: list[Logprobs | None] = [None] * len(plan.rows)
        if sampling:
            logits = self._model.logits(hidden[torch.from_numpy(ends[sampling] - 1).to(hidden.device)])  # [R, vocab]
            sampled, asked = sample(logits, [plan.rows[i] for i in sampling], self._seed)
            for i, token_id, logprob in zip(sampling, sampled, asked, strict=True):
                token_ids[i], logprobs[i] = token_id, logprob
        prompt_logprobs = {
            i: self._score(hidden[int(ends[i]) - row.num_scheduled_tokens :], row.target_ids, row.sampling)
            for i, row in enumerate(plan.rows)
            if row.target_ids is not None
        }
        return StepResult(plan.epoch, tuple(token_ids), tuple(logprobs), prompt_logprobs)

    def _score(self, hidden: torch.Tensor, target_ids: IntArray, sampling: SamplingParams) -> tuple[Logprobs, ...]:
        """Log-probabilities of a row's n targets. hidden: [>= n, hidden], from the row's first token on."""
        targets = torch.from_numpy(target_ids.astype(np.int64)).to(hidden.device)
        scores: list[Logprobs] = []
        for start in range(0, len(targets), NUM_SCORED_AT_ONCE):
            some = targets[start : start + NUM_SCORED_AT_ONCE]
            logits = self._model.logits(hidden[start : start + len(some)])  # [<= NUM_SCORED_AT_ONCE, vocab]
            scores += score(logits, some, sampling.prompt_logprobs or 0)
        return tuple(scores)

    def _inputs(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions of the step, [T] int64 each."""
        token_ids = np.concatenate([row.token_ids for row in plan.rows]).astype(np.int64)
        positions = np.concatenate([np.arange(row.num_computed_tokens, row.seq_len) for row in plan.rows])
        device = self._pool.k.device
        return torch.from_numpy(token_ids).to(device), torch.from_numpy(positions).to(device)
