"""Notebook 01's arms: what each adds, what the engine is told for it, and which of them a run measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from p99lab.engine.config import AttentionConfig, EngineConfig, GraphsConfig, GroupingConfig, SchedulerConfig
from p99lab.lab.parameters import ArmName, Headline01
from p99lab.probe.workload import CacheState


@dataclass(frozen=True, slots=True)
class Arm:
    """One more measure than the arm before it. A peer is another engine, behind the same clients and transport.

    `brings`: what comes with the measure here, and may have a part in what it gains.
    """

    name: ArmName
    adds: str
    composition: Literal["stock", "chunked"] = "chunked"
    prefix_cache: bool = True
    groups: bool = False
    graphs: bool = False  # and overlap
    built: bool = True
    is_peer: bool = False
    brings: str = ""

    @property
    def cache_state(self) -> CacheState:
        return "primed" if self.prefix_cache else "cold"

    def scheduler(self, parameters: Headline01) -> SchedulerConfig:
        """`stock` takes prompts whole; `chunked` cuts them to `chunk_tokens` a step, or fewer by a step's time."""
        documents, questions, _ = parameters.lengths
        is_stock = self.composition == "stock"
        return SchedulerConfig(
            composition=self.composition,
            max_num_batched_tokens=documents[1] + questions[1] if is_stock else parameters.chunk_tokens,
            max_num_seqs=parameters.max_num_seqs,
            max_step_s=parameters.max_step_s if self.groups else None,  # times are predicted of these kernels alone
            max_hold_s=parameters.max_hold_s if self.groups else 0.0,
            overlap=self.graphs,
        )

    @property
    def grouping(self) -> GroupingConfig:
        return GroupingConfig(enabled=self.groups)

    @property
    def attention(self) -> AttentionConfig:
        """The best plain kernels without groups, those that can read a prefix once with them."""
        return AttentionConfig(kernels="spans" if self.groups else "paged")

    def graphs_config(self, parameters: Headline01) -> GraphsConfig:
        return GraphsConfig(enabled=self.graphs and parameters.on_gpu)

    def engine_config(self, base: EngineConfig, parameters: Headline01) -> EngineConfig:
        """`base`, scheduled as the arm does."""
        parts = {
            "scheduler": self.scheduler(parameters),
            "grouping": self.grouping,
            "attention": self.attention,
            "graphs": self.graphs_config(parameters),
            "cache": base.cache.model_copy(update={"prefix_cache": self.prefix_cache}),
        }
        return base.model_copy(update=parts)


ARMS = (
    Arm("no cache", "every prompt computed whole", composition="stock", prefix_cache=False),
    Arm("stock", "a prefix cache; whole prompts first, decode when none waits", composition="stock"),
    Arm("+chunked", "decode in every step, prompts in chunks beside it"),
    Arm(
        "+shared-prefix groups",
        "a document's keys and values read once a step for all its requests, by kernels that can; a bound on steps",
        groups=True,
        brings="kernels of its own, steps cut to their tiles and bounded in time",
    ),
    Arm(
        "+graphs and overlap",
        "CUDA graphs; the next step planned and launched while one runs",
        groups=True,
        graphs=True,
    ),
    Arm("+tiers and warm-up", "host and disk tiers, documents warmed before their traffic", built=False),
    Arm("+isolation and priority", "lanes of their own for urgent and bulk work", built=False),
    Arm("vLLM", "a peer, not one measure more: its OpenAI server with these flags", is_peer=True),
)
BASELINE: ArmName = "stock"


def arm(name: str) -> Arm:
    return next(arm for arm in ARMS if arm.name == name)


def measured_arms(parameters: Headline01) -> list[Arm]:
    """Those that the run measures, in the order of `ARMS`."""
    return [arm for arm in ARMS if why_not(arm, parameters) is None]


def why_not(arm: Arm, parameters: Headline01) -> str | None:
    """Why the run leaves an arm out; None where it does not."""
    if not arm.built:
        return "not built yet"
    if parameters.arms is not None and arm.name not in parameters.arms:
        return "not run"
    if arm.is_peer and (parameters.vllm_site is None or parameters.vllm_model is None):
        return f"not run: no vLLM {'site' if parameters.vllm_site is None else 'model'} given"
    if arm.is_peer and parameters.transport != "http":
        return "not run: a peer answers over HTTP, and the clients are in the engine's process"
    if arm.graphs and not parameters.on_gpu and parameters.arms is None:
        return "not testable here: takes an NVIDIA GPU"
    return None


def is_whole(arm: Arm, parameters: Headline01) -> bool:
    """Whether all that an arm adds is there once it is measured: there are no CUDA graphs without a GPU."""
    return parameters.on_gpu or not arm.graphs


def here(arm: Arm, parameters: Headline01) -> str:
    """`measured`, without what where something of the arm is not there; else why not."""
    whole = "measured" if is_whole(arm, parameters) else "measured, without CUDA graphs: no GPU"
    return why_not(arm, parameters) or whole


def full_set(parameters: Headline01) -> Arm | None:
    """The last of our own arms that can be measured here, if the run measures it: an arm before it is not the full set.

    Graphs need a GPU; an arm with graphs that was asked for by name counts elsewhere too.
    """
    named = parameters.arms or ()
    own = [arm for arm in ARMS if arm.built and not arm.is_peer]
    last = [arm for arm in own if parameters.on_gpu or not arm.graphs or arm.name in named][-1]
    return last if why_not(last, parameters) is None else None


def long_arms(parameters: Headline01) -> list[Arm]:
    """The arms with requests enough for a P99, and open loads: the baseline, the full set, and peers."""
    full = full_set(parameters)
    return [arm for arm in measured_arms(parameters) if arm.name == BASELINE or arm == full or arm.is_peer]


def between(before: Arm, after: Arm) -> Iterator[Arm]:
    """The arms whose measures `after` has and `before` has not."""
    return (arm for arm in ARMS[ARMS.index(before) + 1 : ARMS.index(after) + 1] if arm.built and not arm.is_peer)
