"""Gateways as processes: several of them, and what their end, or the engine's, means to the other side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from p99lab.engine.config import SchedulerConfig
from p99lab.engine.engine import Engine
from p99lab.engine.runner import ModelRunner
from p99lab.serving import gateways as gateway_processes
from p99lab.serving.gateways import Gateways, serve_from_process
from p99lab.serving.process import ServerProcessError
from tests.serving.clients import complete, connect, eventually, slow_steps
from tests.serving.test_serve_command import serving

ENDLESS: dict[str, Any] = {"model": "tiny", "prompt": "one", "max_tokens": 400, "ignore_eos": True, "stream": True}
GATEWAY = "p99lab.serving.gateway"
ARGUMENTS = ("--served-model-name", "tiny", "--num-pages", "40")


@pytest.fixture
def own_engine(new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    with new_engine() as engine:
        yield engine


def gateways(pid: int, before: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """Those of a process, but not those it had before."""
    children = [process for process in psutil.Process(pid).children() if process not in before]
    return [process for process in children if not has_ended(process) and GATEWAY in process.cmdline()]


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_several_share_a_port_and_follow_the_engine(own_engine: Engine) -> None:
    before = gateways(os.getpid())
    with serve_from_process(own_engine, model="tiny", num_gateways=2) as url:
        assert len(gateways(os.getpid(), before)) == 2
        for _ in range(6):
            with connect(url) as client:
                assert complete(client)["usage"]["completion_tokens"] == 8
        own_engine.reconfigure(SchedulerConfig(max_num_waiting=2))
        with connect(url) as client:
            body = {"model": "tiny", "prompt": "one", "n": 3}
            eventually(lambda: client.post("/completions", json=body).status_code == 400)
            assert "p99lab_steps_total 0.0" in client.get(url.removesuffix("/v1") + "/metrics").text
    assert gateways(os.getpid()) == before
    assert own_engine.generate(["one"])[0].token_ids  # it is open still


def test_several_say_which_of_them_has_answered(own_engine: Engine) -> None:
    """A client whose connection is kept must not stay with one: it would never see what the others have counted."""
    num_asked = {"1": 0.0, "2": 0.0}
    with serve_from_process(own_engine, model="tiny", num_gateways=2) as url, connect(url) as scraper:
        root = url.removesuffix("/v1")
        for _ in range(10):
            with connect(url) as client:
                complete(client)

        def scraped() -> bool:
            for gateway, samples in own_series(scraper.get(root + "/metrics").text).items():
                (num_asked[gateway],) = samples
            return sum(num_asked.values()) == 10

        def healthy() -> bool:
            found.add(scraper.get(root + "/health").json()["gateway"])
            return found == {1, 2}

        found: set[int] = set()
        eventually(scraped)
        eventually(healthy)
        assert "p99lab_steps_total " in scraper.get(root + "/metrics").text
    with serve_from_process(own_engine, model="tiny") as url, connect(url) as client:
        complete(client)
        assert own_series(client.get(url.removesuffix("/v1") + "/metrics").text) == {None: [1.0]}
        assert client.get(url.removesuffix("/v1") + "/health").json() == {"status": "ok"}


def test_each_says_that_the_engine_has_failed_whoever_has_met_it(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: ModelRunner, plan: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(ModelRunner, "launch", failing)
    with serve_from_process(own_engine, model="tiny", num_gateways=2) as url, connect(url) as client:
        health = url.removesuffix("/v1") + "/health"
        assert client.post("/completions", json=ENDLESS).status_code == 500
        statuses: dict[int, str] = {}

        def all_say_so() -> bool:
            response = client.get(health)
            statuses[response.json()["gateway"]] = response.json()["status"]
            return len(statuses) == 2 and all("no room" in status for status in statuses.values())

        eventually(all_say_so)


def own_series(text: str) -> dict[str | None, list[float]]:
    """By gateway, how many completions it says that it has answered."""
    found: dict[str | None, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (sample.name, sample.labels.get("outcome")) == ("p99lab_requests_total", "ok"):
                found.setdefault(sample.labels.get("gateway"), []).append(sample.value)
    return found


def test_a_gateway_that_is_killed_is_reported_on_leaving(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(monkeypatch, 0.005)
    before = gateways(os.getpid())
    server = serve_from_process(own_engine, model="tiny")
    url = server.__enter__()
    with connect(url) as client, client.stream("POST", "/completions", json=ENDLESS) as response:
        parts = response.iter_text()
        next(parts)
        gateways(os.getpid(), before)[0].kill()
        with pytest.raises(httpx.TransportError):
            list(parts)
    eventually(lambda: own_engine.stats().num_running == 0)  # its requests went with it
    with pytest.raises(ServerProcessError, match=r"ended by itself \(killed by SIGKILL\)"):
        server.__exit__(None, None, None)
    own_engine.check()


def test_a_loss_is_told_at_once_and_is_the_error_whatever_clients_have_met(own_engine: Engine) -> None:
    before, lost = gateways(os.getpid()), threading.Event()

    def serve_until_lost() -> None:
        with serve_from_process(own_engine, model="tiny", on_loss=lost.set):
            gateways(os.getpid(), before)[0].kill()
            assert lost.wait(30)
            raise TimeoutError("no answer")

    with pytest.raises(ServerProcessError, match=r"ended by itself \(killed by SIGKILL\)"):
        serve_until_lost()


def test_an_end_that_was_asked_for_is_no_loss(own_engine: Engine) -> None:
    lost = threading.Event()
    with (
        pytest.raises(TimeoutError, match="no answer"),
        serve_from_process(own_engine, model="tiny", on_loss=lost.set),
    ):
        raise TimeoutError("no answer")
    assert not lost.is_set()


@pytest.mark.parametrize("num_stops", [1, 2])
def test_one_that_does_not_end_is_waited_for_no_longer_than_told_and_killed(
    monkeypatch: pytest.MonkeyPatch, num_stops: int
) -> None:
    monkeypatch.setattr(gateway_processes, "SHUTDOWN_GRACE_S", 0.1)
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleeping, stdout=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        running = Gateways([process], drain_timeout_s=0.0 if num_stops == 1 else 600.0)

        def stop() -> None:
            for _ in range(num_stops):
                running.stop()

        later = threading.Timer(0.2, stop)
        later.start()  # `wait` has begun by then, or finds that it was told
        with pytest.raises(ServerProcessError, match="a gateway does not end and is killed"):
            running.wait()
        assert process.poll() is None
        running.end()
        assert process.wait(30) == -signal.SIGKILL
        later.join()
        running.close()


def test_a_server_whose_gateway_is_killed_ends_with_one_line(ascii_llama: str) -> None:
    with serving(ascii_llama, *ARGUMENTS) as (process, _):
        gateways(process.pid)[0].kill()
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 1)
    assert err == "p99lab: a gateway has ended by itself (killed by SIGKILL): its clients' requests are lost\n"


def test_clients_of_an_engine_that_is_killed_are_told_and_its_gateway_ends(ascii_llama: str) -> None:
    with (
        serving(ascii_llama, *ARGUMENTS) as (process, url),
        connect(url) as client,
        client.stream("POST", "/completions", json=ENDLESS) as response,
    ):
        parts = response.iter_text()
        next(parts)
        (gateway,) = gateways(process.pid)
        process.send_signal(signal.SIGKILL)
        try:
            rest = "".join(parts)
        except httpx.TransportError:
            pass
        else:
            assert '"error"' in rest
        eventually(lambda: has_ended(gateway))


def test_a_gateway_that_cannot_begin_says_why(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gateways(os.getpid())
    monkeypatch.setattr("p99lab.serving.gateways.READY", "never said")
    with pytest.raises(ServerProcessError, match="no gateway: ready"), serve_from_process(own_engine):
        pytest.fail("it must not come up")
    assert gateways(os.getpid()) == before
