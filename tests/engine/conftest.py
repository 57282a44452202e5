"""A tiny engine. What needs torch is imported inside: tests of the base install live in this directory too."""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from p99lab.engine.config import CacheConfig, EngineConfig

if TYPE_CHECKING:
    from p99lab.engine.engine import Engine


@pytest.fixture
def triton() -> None:
    """Triton is there. Skips only where the extra `dev` brings none: elsewhere its absence is an error."""
    if sys.platform == "linux" and platform.machine() == "x86_64":
        importlib.import_module("triton")
    else:
        pytest.importorskip("triton")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a random model: 2 layers, 128 tokens, 512 positions."""
    from tests.engine.tiny_models import save_tiny_model

    path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", path)
    return str(path)


@pytest.fixture
def config(tiny_llama: str) -> EngineConfig:
    return EngineConfig(model=tiny_llama, cache=CacheConfig(page_size=4, num_pages=200))


@pytest.fixture
def engine(config: EngineConfig) -> Iterator[Engine]:
    from p99lab.engine.engine import Engine

    with Engine(config) as engine:
        yield engine
