"""Carries out a StepPlan: page copies, one forward pass over all rows, sampling. Holds tensors, decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from p99lab.engine.attention.base import AttentionBackend
from p99lab.engine.config import AttentionConfig, GraphsConfig
from p99lab.engine.graphs import Captured, StepGraphs, resolved
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.model import LlamaModel
from p99lab.engine.plan import InFlight, Logprobs, Row, StepPath, StepPlan, StepResult
from p99lab.engine.request import IntArray
from p99lab.engine.sampler import Scores, choose, score, score_rows
from p99lab.engine.staging import upload
from p99lab.errors import BadParameterError

NUM_SCORED_AT_ONCE = 256  # prompt tokens whose logits exist at the same time: with 128K words, 0.1 GiB


class Runner(Protocol):
    """Executes plans in the order they come. A row may follow one of the plan directly before (see `Row.follows`)."""

    def launch(self, plan: StepPlan) -> InFlight:
        """Begin a step; it need not have ended when the next one is launched.

        What this raises leaves nothing of the step running.
        """
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for its tokens."""
        ...

    def reconfigure(self, attention: AttentionConfig | None, graphs: GraphsConfig | None) -> None:
        """Run the steps that follow otherwise; None: in this as before. No step is in flight.

        Raises:
            BadParameterError: it cannot; nothing has changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Two points in a CUDA stream: where a step begins, and where all that the host wants of it is copied.

    It begins with moving and copying pages, or where it has none with computing: that lists and inputs are brought
    before counts as idle.
    """

    began: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def begin(cls, device: torch.device) -> DeviceSpan | None:
        """None where computing waits for itself."""
        if device.type != "cuda":
            return None
        span = cls(*(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[no-untyped-call]
        span.began.record()
        return span

    def seconds(self) -> float:
        milliseconds: float = self.began.elapsed_time(self.ended)
        return milliseconds / 1e3


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose kernels are in the stream. Tensors are on the host, filled once the step has ended."""

    plan: StepPlan
    sampling: Sequence[int]  # rows
    chosen: torch.Tensor  # one token id for each of these
    scores: Sequence[tuple[Sequence[int], Scores]]  # of some of these each, by their places
    prompt_scores: Mapping[int, Sequence[Scores]]  # by row
    span: DeviceSpan | None
    path: StepPath
    num_padded_tokens: int

    def result(self) -> StepResult:
        self.abandon()
        token_ids: list[int | None] = [None] * len(self.plan.rows)
        logprobs: list[Logprobs | None] = [None] * len(self.plan.rows)
        for row, token_id in zip(self.sampling, self.chosen.tolist(), strict=True):
            token_ids[row] = token_id
        for places, scores in self.scores:
            for place, one in zip(places, scores.as_logprobs(), strict=True):
                logprobs[self.sampling[place]] = one
        prompt = {
            row: tuple(one for part in parts for one in part.as_logprobs()) for row, parts in self.prompt_scores.items()
        }
        device_s = None if self.span is None else self.span.seconds()
        how = (device_s, self.path, self.num_padded_tokens)
        return StepResult(self.plan.epoch, tuple(token_ids), tuple(logprobs), prompt, *how)

    def abandon(self) -> None:
        if self.span is not None:
            self.span.ended.synchronize()  # the step's one host synchronisation


class ModelRunner:
    """A model, a page pool and an attention backend on one device.

    On a GPU `launch` returns as soon as the step is in the stream. Steps replay a graph where one has their shape.

    Args:
        sampled: [max_num_seqs] int64, for what the rows of the latest step have sampled.
        choose: what attends, over the same pool, when it is configured otherwise; raises BadParameterError.
    """

    def __init__(
        self,
        model: LlamaModel,
        pool: KVPool,
        attention: AttentionBackend,
        seed: int,
        sampled: torch.Tensor,
        graphs: StepGraphs | None,
        choose: Callable[[AttentionConfig], AttentionBackend],
    ) -> None:
        self._model = model
        self._pool = pool
        self._device = pool.k.device
        self._attention = attention
        self._seed = seed
        self._sampled = sampled
        self._graphs = self._captured = graphs
        self._wants_graphs = graphs is not None
        self._choose = choose

    def reconfigure(self, attention: AttentionConfig | None, graphs: GraphsConfig | None) -> None:
        """See `Runner`. What was captured at start stays, and is used by steps of the attention that it was for."""
        chosen = self._attention if attention is None else self._choose(attention)
        captured = self._captured if self._captured is not None and self._captured.attention is chosen else None
        if graphs is not None:
            if graphs.enabled and captured is None:
                raise BadParameterError("graphs: none were captured for this attention when the engine started")
            self._wants_graphs = graphs.enabled
        self._attention = chosen
        self._graphs = captured if self._wants_graphs else None

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for its tokens."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        """Put a step into the stream, behind the step before it."""
        try:
            with self._on_device():
                return self._launch(plan)
        except BaseException:
            self._wait()
            raise

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton, events and graphs work on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _launch(self, plan: StepPlan) -> Launched:
        span = DeviceSpan.begin(self._device) if plan.moves or plan.copies else None
        self._pool.move_pages(plan.moves)
        self._pool.copy_pages(plan.copies)
        inputs = _inputs(plan)
        sampling = [i for i, row in enumerate(plan.rows) if row.samples]
        ends = np.cumsum([row.num_scheduled_tokens for row in plan.rows], dtype=np.int32)
        samples = ends[sampling] - 1
        prepared = self._prepare(plan, inputs, samples)
        prompt_scores: dict[int, list[Scores]] = {}
        if isinstance(prepared, Captured):
            span = span or DeviceSpan.begin(self._device)
            logits = prepared.replay(len(samples))
            path, num_padded_tokens = StepPath.GRAPH, prepared.shape.num_tokens - plan.num_tokens
        else:
            path, num_padded_tokens = prepared, 0
            on_device = upload(inputs, self._device)
            span = span or DeviceSpan.begin(self._device)
            hidden = self._forward(*on_device)
            logits = self._logits(hidden, samples)
            prompt_scores = self._score_prompts(plan, hidden)
        chosen, scores = self._sample(logits, [plan.rows[i] for i in sampling], sampling)
        if span is not None:
            span.ended.record()
        return Launched(plan, sampling, chosen, scores, prompt_scores, span, path, num_padded_tokens)

    def _prepare(self, plan: StepPlan, inputs: Sequence[IntArray], samples: IntArray) -> Captured | StepPath:
        """See `StepGraphs.prepare`. Graphs leave no hidden states, which scores of prompts are computed from."""
        if self._graphs is None or any(row.target_ids is not None for row in plan.rows):
            return self._attention.plan(plan)
        return self._graphs.prepare(plan, inputs, samples)

    def _wait(self) -> None:
        """Until the device runs nothing: what of a step was launched before it failed."""
        if self._device.type == "cuda":
            with suppress(Exception):  # a device that has failed says so again
                torch.cuda.synchronize(self._device)

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        return self._model.forward(resolved(token_ids, sources, self._sampled), positions, self._attention)

    def _logits(self, hidden: torch.Tensor, tokens: IntArray) -> torch.Tensor:
        """[R, vocab] float32 of some of the step's tokens, perhaps none."""
        return self._model.logits(hidden[self._index(tokens)]) if len(tokens) else hidden.new_empty(0, 1)

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[Row], places: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[list[int], Scores]]]:
        """Choose, remember for rows that follow, and send to the host: token ids [R], and scores where asked for."""
        if not rows:
            return torch.empty(0, dtype=torch.int64), []
        chosen = choose(logits, rows, self._seed)
        if len(places) == places[-1] + 1:
            self._sampled[: len(places)] = chosen
        else:
            self._sampled[self._index(np.array(places, np.int32))] = chosen
        scores = [(places, scored.to_host()) for places, scored in score_rows(logits, rows, chosen)]
        return chosen.to("cpu", non_blocking=True), scores

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[Scores]]:
        """For each row with targets the log-probabilities of these, NUM_SCORED_AT_ONCE at a time."""
        scores: dict[int, list[Scores]] = {}
        start = 0
        for i, row in enumerate(plan.rows):
            if row.target_ids is not None:
                targets = self._index(row.target_ids)
                scores[i] = [
                    self._score(
                        hidden[start + at :], targets[at : at + NUM_SCORED_AT_ONCE], row.sampling.prompt_logprobs or 0
                    )
                    for at in range(0, len(targets), NUM_SCORED_AT_ONCE)
                ]
            start += row.num_scheduled_tokens
        return scores

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor, num_top: int) -> Scores:
        """hidden: [>= n, hidden], from the token on that predicts the first of the n targets."""
        return score(self._model.logits(hidden[: len(targets)]), targets, num_top).to_host()

    def _index(self, array: IntArray) -> torch.Tensor:
        (index,) = upload([array], self._device)
        return index.long()


def _inputs(plan: StepPlan) -> list[IntArray]:
    """Token ids and positions of the step, and for tokens not known yet the row that samples them; [T] int32 each."""
    rows = plan.rows
    token_ids = np.concatenate([row.token_ids for row in rows])
    lengths = np.array([len(row.token_ids) for row in rows], np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    firsts = np.array([row.num_computed_tokens for row in rows], np.int32)
    positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(firsts - (ends - lengths), lengths)
    sources = np.full(len(token_ids), -1, np.int32)
    for end, row in zip(ends, rows, strict=True):
        if row.follows is not None:
            sources[end - 1] = row.follows
    return [token_ids, positions, sources]
