"""What the HTTP layer needs of an engine, whether it runs in the same process or in another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from p99lab.engine.config import EngineConfig
from p99lab.engine.events import TokenEvent
from p99lab.engine.geometry import Geometry
from p99lab.engine.prompts import Prompt
from p99lab.engine.request import IntArray, SamplingParams
from p99lab.engine.stats import EngineStats
from p99lab.engine.tokenizer import Tokenizer
from p99lab.errors import P99labError


class EngineClient(Protocol):
    """`Engine` is one, `RemoteEngine` another. `config` follows the engine's `reconfigure`."""

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def failure(self) -> P99labError | None:
        """Why no request is answered any more; None while the engine can be used. Never waits."""
        ...

    def encode(self, prompt: Prompt) -> IntArray:
        """[num_prompt_tokens] int32; raises as `Engine.encode`."""
        ...

    def stats(self) -> EngineStats:
        """May take a moment where the engine is elsewhere: not to be called between tokens."""
        ...

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, arrival_s: float | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """A request's events as they come; raises as `Engine.stream`. Leaving early cancels it."""
        ...
