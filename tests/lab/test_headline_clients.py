"""The headline's clients over HTTP: what is said when a process that they need is killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from p99lab.engine.config import CacheConfig, EngineConfig, ModelConfig
from p99lab.engine.engine import Engine
from p99lab.lab.headline_clients import Asked, ClientsThere, Stretch, clients
from p99lab.lab.parameters import Headline01
from p99lab.probe.client_process import ClientProcessError
from p99lab.probe.workload import ClosedLoad, Workload, make_documents
from p99lab.serving.process import ServerProcessError
from tests.engine.tiny_models import save_tiny_model
from tests.serving.clients import eventually, slow_steps

LONG = ClosedLoad(duration_s=60.0, concurrency=2, cache="mixed")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    save_tiny_model("llama", tmp_path)
    slow_steps(monkeypatch, 0.002)
    config = EngineConfig(model=ModelConfig(name=str(tmp_path)), cache=CacheConfig(page_size=4, num_pages=400))
    with Engine(config) as engine:
        yield engine


def drive_until_killed(engine: Engine, victim: str) -> None:
    """A long load over HTTP, during which the process that executes the module `victim` is killed."""
    workload = Workload(
        num_documents=1, document_tokens=(20, 20), question_tokens=(8, 8), answer_tokens=(8, 8), vocab_size=127
    )
    asked = Asked(workload, make_documents(workload), None, None)
    parameters = Headline01.model_construct(model=engine.config.model.name, transport="http")
    before = psutil.Process().children()
    with clients(parameters, engine, asked) as sending:
        struck = next(each for each in psutil.Process().children() if each not in before and victim in each.cmdline())
        assert isinstance(sending, ClientsThere)

        def strike() -> None:
            eventually(lambda: engine.stats().num_steps > 20)
            struck.kill()

        striking = threading.Thread(target=strike)
        striking.start()
        try:
            sending.drive(LONG, Stretch(workload, 0, None))
        finally:
            striking.join()


def test_a_killed_gateway_ends_the_load_and_is_named(engine: Engine) -> None:
    with pytest.raises(ServerProcessError, match=r"a gateway has ended by itself \(killed by SIGKILL\)"):
        drive_until_killed(engine, "p99lab.serving.gateway")


def test_killed_clients_are_named(engine: Engine) -> None:
    with pytest.raises(ClientProcessError, match="the clients' process was killed by SIGKILL"):
        drive_until_killed(engine, "p99lab.probe.client_process")
