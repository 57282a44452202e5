"""An engine whose runner is within reach: for steps made by hand, and for documents that nobody computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from p99lab.engine.backends import make_runner
from p99lab.engine.config import AttentionConfig, EngineConfig, GraphsConfig
from p99lab.engine.costs import StepCost
from p99lab.engine.engine import Engine
from p99lab.engine.kv_pool import KVPool
from p99lab.engine.plan import InFlight, StepPlan, StepResult
from p99lab.engine.runner import Runner
from p99lab.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Uncomputed:
    """A step that has ended before it began; every row that samples has sampled token 0."""

    plan: StepPlan

    def result(self) -> StepResult:
        token_ids = tuple(0 if row.samples else None for row in self.plan.rows)
        return StepResult(self.plan.epoch, token_ids, (None,) * len(token_ids))

    def abandon(self) -> None:
        """Nothing runs."""


class BenchRunner:
    """The engine's own `Runner`, which also does what it is told beside the engine, while that has no requests."""

    def __init__(self, runner: Runner, pool: KVPool, attention: AttentionConfig) -> None:
        self.pool = pool
        self._runner = runner
        self._attention = attention
        self._computes = True

    def launch(self, plan: StepPlan) -> InFlight:
        return self._runner.launch(plan) if self._computes else Uncomputed(plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def reconfigure(self, attention: AttentionConfig | None, graphs: GraphsConfig | None) -> None:
        self._runner.reconfigure(attention, graphs)
        self._attention = attention or self._attention

    def fill(self, seed: int) -> None:
        """Random keys and values everywhere: what is read takes the power that computed ones take; zeros take less."""
        generator = torch.Generator(self.pool.k.device).manual_seed(seed)
        for part in (self.pool.k, self.pool.v):
            part.normal_(generator=generator)

    @contextmanager
    def without_computing(self) -> Iterator[None]:
        """Steps in here end at once: the engine enters prompts into its tree whose pages hold whatever they held."""
        self._computes = False
        try:
            yield
        finally:
            self._computes = True

    @contextmanager
    def attending(self, attention: AttentionConfig) -> Iterator[None]:
        """Steps in here attend otherwise."""
        self._runner.reconfigure(attention, None)
        try:
            yield
        finally:
            self._runner.reconfigure(self._attention, None)


@contextmanager
def reachable(config: EngineConfig) -> Iterator[tuple[Engine, BenchRunner]]:
    """An engine and its runner. Errors are the engine's."""
    made: list[BenchRunner] = []

    def new_runner(config: EngineConfig, weights: Weights, pool: KVPool, costs: StepCost | None) -> Runner:
        made.append(BenchRunner(make_runner(config, weights, pool, costs), pool, config.attention))
        return made[-1]

    with Engine(config, new_runner=new_runner) as engine:
        yield engine, made[-1]
