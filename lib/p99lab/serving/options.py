"""What a server is started with. Checked without torch and FastAPI, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from p99lab.engine.config import (
    AttentionConfig,
    CacheConfig,
    EngineConfig,
    GraphsConfig,
    ModelConfig,
    SchedulerConfig,
)
from p99lab.errors import BadParameterError
from p99lab.strict import StrictModel

OWNER = "p99lab"  # of the models that it lists: by this a client knows the server


class ServeOptions(StrictModel):
    """One server. `api_key_env` names an environment variable: the key itself is on no command line and in no record.

    `drain_timeout`: seconds that running requests have when the server is told to end. `gateways`: processes that take
    HTTP requests; the engine has one of its own beside them. On a GPU steps overlap. The rest is as in `EngineConfig`.
    """

    model: str = "smollm2-135m"
    served_model_name: str | None = Field(None, min_length=1)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int = Field(2048, ge=1)
    num_pages: int | None = Field(None, ge=2)
    max_num_waiting: int = Field(256, ge=1)
    prefix_cache: bool = True
    composition: Literal["stock", "chunked"] = "chunked"
    policy: Literal["fcfs", "priority", "deadline"] = "fcfs"
    max_step_s: float | None = Field(None, gt=0)
    attention: Literal["auto", "flashinfer", "reference"] = "auto"
    graphs: bool = True
    api_key_env: str | None = None
    drain_timeout: float = Field(30.0, ge=0)
    gateways: int = Field(1, ge=1, le=64)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model

    @property
    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(name=self.model, dtype=self.dtype, device=self.device),
            cache=CacheConfig(num_pages=self.num_pages, prefix_cache=self.prefix_cache),
            scheduler=SchedulerConfig(
                composition=self.composition,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                max_num_waiting=self.max_num_waiting,
                policy=self.policy,
                max_step_s=self.max_step_s,
                overlap=self.device != "cpu",
            ),
            attention=AttentionConfig(backend=self.attention),
            graphs=GraphsConfig(enabled=self.graphs),
        )

    def read_api_key(self) -> str | None:
        """The key, from the environment; None: clients need none.

        Raises:
            BadParameterError: the variable is not set, or empty.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise BadParameterError(f"the environment variable '{self.api_key_env}' holds no API key")
        return key


@dataclass(frozen=True, slots=True)
class Ready:
    """A server takes requests. `is_exposed`: from other machines too, without a key."""

    model: str
    url: str
    is_exposed: bool

    def __str__(self) -> str:
        return f"serving {self.model} at {self.url}"
