"""The engine's configuration, in parts: each subsystem is given its own and sees no other. Plain values throughout."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from p99lab.strict import StrictModel

MAX_NUM_SEQS = 4096  # rows that the runner has room for


class ModelConfig(StrictModel):
    """`name`: a model of `p99lab models list`, a directory, or `dummy:<geometry>`."""

    name: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    seed: int = 0  # of dummy weights


class CacheConfig(StrictModel):
    """The page pool and its tree.

    `num_pages` None: as many as a share of the device's free memory holds. `prefix_cache` off: nothing is found and
    nothing is kept.
    """

    page_size: int = Field(64, ge=1)
    num_pages: int | None = Field(None, ge=2)
    prefix_cache: bool = True


class SchedulerConfig(StrictModel):
    """How a step is put together.

    `stock`: whole prompts, decode only when no admitted prompt waits. `chunked`: decode rows first, then as many prompt
    tokens as `max_num_batched_tokens` leaves. `policy` orders admission and picks preemption's victims. While
    `max_num_waiting` requests wait for their first admission, newcomers are refused (None: never). With `overlap` a
    step is planned and launched while the one before it runs. `max_step_s`: while requests decode, `chunked` gives
    prompts no more of a step than keeps its predicted device time within that (within less while little waits), but for
    tokens that fill tiles which are computed anyway, and a few of the first prompt. `max_hold_s`: for how long a
    waiting request may be passed by others of its urgency whose document has more company. `reserve_tokens`: pages for
    so many tokens that a request may yet sample are taken together with those it needs, where they can be had: side by
    side, they are one span of keys.
    """

    composition: Literal["stock", "chunked"] = "chunked"
    policy: Literal["fcfs", "priority", "deadline"] = "fcfs"
    max_num_batched_tokens: int = Field(2048, ge=1)
    max_num_seqs: int = Field(64, ge=1, le=MAX_NUM_SEQS)
    max_num_waiting: int | None = Field(None, ge=1)
    overlap: bool = False
    max_step_s: float | None = Field(None, gt=0)
    max_hold_s: float = Field(0.0, ge=0)
    reserve_tokens: int = Field(256, ge=0)


class GroupingConfig(StrictModel):
    """Shared-prefix groups: off, or on for prefixes of at least `min_shared_tokens`.

    `decide_by` `cost`: only where the device's cost model says that it pays; `length`: wherever they are long enough,
    which also holds where a device has no cost model.
    """

    enabled: bool = True
    decide_by: Literal["cost", "length"] = "cost"
    min_shared_tokens: int = Field(256, ge=1)


class AttentionConfig(StrictModel):
    """Which kernels attend: `flashinfer` (Hopper GPUs), `reference` (plain torch, anywhere), or `auto`: the first where
    it can be used.

    `kernels`, of FlashInfer's: `spans` reads a prefix that rows share once for all of them and can be captured;
    `paged` are its wrappers as they come, each row over its own page table, and grouping changes nothing.
    """

    backend: Literal["auto", "flashinfer", "reference"] = "auto"
    kernels: Literal["spans", "paged"] = "spans"


class GraphsConfig(StrictModel):
    """Steps of up to `max_num_tokens` tokens as CUDA graphs, captured at start where the attention allows it.

    `enabled` also decides, at any time, whether those are used.
    """

    enabled: bool = True
    max_num_tokens: int = Field(512, ge=1)


class EngineConfig(StrictModel):
    """Everything an engine needs. `model` may be given as its name alone."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    grouping: GroupingConfig = GroupingConfig()
    attention: AttentionConfig = AttentionConfig()
    graphs: GraphsConfig = GraphsConfig()
    seed: int = 0  # of requests that bring none

    @field_validator("model", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
