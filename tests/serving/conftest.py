"""A tiny model that reads and writes ASCII, one token a character, and servers around engines of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from p99lab.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tests.serving import clients

if TYPE_CHECKING:
    import httpx

    from p99lab.engine.engine import Engine

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture(scope="session")
def ascii_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a random model: 128 tokens, the ASCII characters, 512 positions, a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    from tests.engine.tiny_models import save_tiny_model

    path = tmp_path_factory.mktemp("ascii-llama")
    save_tiny_model("llama", path)
    tokenizer = Tokenizer(WordLevel({chr(number): number for number in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(path)


@pytest.fixture(scope="session")
def new_engine(ascii_llama: str) -> Callable[..., Engine]:
    from p99lab.engine.engine import Engine

    def make(**scheduler: Any) -> Engine:
        return Engine(
            EngineConfig(
                model=ModelConfig(name=ascii_llama),
                cache=CacheConfig(page_size=4, num_pages=400),
                scheduler=SchedulerConfig(**scheduler),
            )
        )

    return make


@pytest.fixture(scope="session")
def engine(new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    with new_engine() as engine:
        yield engine


Serve = Callable[..., AbstractContextManager[str]]


def server_of(place: str) -> Serve:
    """What serves an engine of this process: in a `thread` of it, or from a gateway's `process`."""
    from p99lab.serving.background import serve_in_thread
    from p99lab.serving.gateways import serve_from_process

    return serve_in_thread if place == "thread" else serve_from_process


@pytest.fixture(params=["thread", "process"])
def serve(request: pytest.FixtureRequest) -> Serve:
    return server_of(request.param)


@pytest.fixture(scope="session", params=["thread", "process"])
def url(request: pytest.FixtureRequest, engine: Engine) -> Iterator[str]:
    """Where `engine` is served as `tiny`."""
    with server_of(request.param)(engine, model="tiny") as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with clients.connect(url) as client:
        yield client
