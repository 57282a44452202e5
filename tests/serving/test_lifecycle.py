"""Requests that end early, and servers that do: what is freed, what is answered, what is waited for."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from p99lab.engine.engine import Engine
from p99lab.engine.runner import ModelRunner
from p99lab.errors import AccountingError
from tests.serving.clients import complete, connect, error_of, events, eventually, slow_steps
from tests.serving.conftest import Serve

LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "one",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
SLOW_S = 0.005


@pytest.fixture
def own_engine(new_engine: Callable[..., Engine]) -> Iterator[Engine]:
    with new_engine() as engine:
        yield engine


def is_free(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == stats.num_active_pages == 0


def send(url: str, body: dict[str, Any]) -> socket.socket:
    """Post a completion and read nothing of its answer."""
    address = httpx.URL(url)
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content)
    connection = socket.create_connection((address.host, address.port))
    connection.sendall(head + content)
    return connection


class Stream(threading.Thread):
    """A streamed completion in a thread of its own; `begun` once its first chunk is here."""

    def __init__(self, client: httpx.Client, **fields: Any) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.text = ""
        self._client = client
        self._fields = fields
        self.start()

    def run(self) -> None:
        with self._client.stream("POST", "/completions", json={**LONG, **self._fields}) as response:
            for part in response.iter_text():
                self.text += part
                self.begun.set()

    def end(self) -> list[Any]:
        self.join(60)
        assert not self.is_alive()
        return events(self.text) if "[DONE]" in self.text else [json.loads(p[6:]) for p in self.text.split("\n\n") if p]


@contextmanager
def one_waiting(engine: Engine, serve: Serve) -> Iterator[tuple[httpx.Client, Stream, Stream]]:
    """A client of a server whose engine runs one request at a time: its stream that runs, and its stream that waits."""
    with serve(engine, model="tiny") as url, connect(url) as client:
        running = Stream(client)
        assert running.begun.wait(30)
        waiting = Stream(client, max_tokens=2)
        eventually(lambda: engine.stats().num_waiting == 1)
        yield client, running, waiting


@pytest.mark.parametrize("fields", [{}, {"n": 3, "seed": 1}, {"stream": False}, {"stream": False, "n": 3}])
def test_a_client_that_hangs_up_frees_its_pages(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], serve: Serve
) -> None:
    slow_steps(monkeypatch, SLOW_S)
    with serve(own_engine, model="tiny") as url:
        connection = send(url, {**LONG, **fields})
        eventually(lambda: own_engine.stats().num_steps > 5)
        connection.close()
        eventually(lambda: is_free(own_engine))
        assert own_engine.stats().num_steps < LONG["max_tokens"]
        own_engine.check()
        with connect(url) as client:
            metrics = client.get(url.removesuffix("/v1") + "/metrics").text
    assert 'p99lab_requests_total{outcome="hung_up",path="/v1/completions"} 1.0' in metrics


def test_a_full_queue_is_429_with_retry_after(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    slow_steps(monkeypatch, SLOW_S)
    with (
        new_engine(max_num_seqs=1, max_num_waiting=1) as engine,
        one_waiting(engine, serve) as (client, running, waiting),
    ):
        for stream in (True, False):
            response = client.post("/completions", json={**LONG, "stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "1")
            assert error_of(response)["code"] == "queue_full"
        response = client.post("/completions", json={**LONG, "n": 2})
        assert response.status_code == 400  # would never fit
        assert len(running.end()) > 1
        assert waiting.end()[-1]["choices"][0]["finish_reason"] == "length"
        assert complete(client)["usage"]["completion_tokens"] == 8
        assert is_free(engine)


def test_a_batch_of_which_one_is_refused_leaves_nothing_behind(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    slow_steps(monkeypatch, SLOW_S)
    with (
        new_engine(max_num_seqs=1, max_num_waiting=3) as engine,
        one_waiting(engine, serve) as (client, running, waiting),
    ):
        response = client.post("/completions", json={**LONG, "n": 3, "stream": False})
        assert response.status_code == 429
        eventually(lambda: engine.stats().num_waiting == 1)
        running.end()
        waiting.end()
        assert is_free(engine)
        engine.check()


def test_health_says_that_the_engine_has_failed_though_no_request_has_met_it(own_engine: Engine, serve: Serve) -> None:
    with serve(own_engine, model="tiny") as url, connect(url) as client:
        health = url.removesuffix("/v1") + "/health"
        assert client.get(health).status_code == 200
        own_engine.fail(AccountingError("a page too many"))
        eventually(lambda: client.get(health).status_code == 503)
        assert "a page too many" in client.get(health).json()["status"]


def test_health_says_that_the_engine_is_closed(own_engine: Engine, serve: Serve) -> None:
    with serve(own_engine, model="tiny") as url, connect(url) as client:
        health = url.removesuffix("/v1") + "/health"
        own_engine.close()
        eventually(lambda: client.get(health).status_code == 503)
        assert client.get(health).json()["status"] == "the engine is closed"


def test_a_failed_step_is_an_error_before_and_in_a_stream_and_at_health(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    launch, left = ModelRunner.launch, iter(range(9, -1, -1))

    def failing(self: ModelRunner, plan: Any) -> Any:
        if next(left, 0) == 0:
            raise MemoryError("no room")
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", failing)
    with serve(own_engine, model="tiny") as url, connect(url) as client:
        assert client.get(url.removesuffix("/v1") + "/health").json() == {"status": "ok"}
        *_, last = Stream(client).end()
        assert last["error"]["code"] == "engine_failed"
        for stream in (True, False):
            response = client.post("/completions", json={**LONG, "stream": stream})
            assert response.status_code == 500
            assert "no room" in error_of(response)["message"]
        health = client.get(url.removesuffix("/v1") + "/health")
        assert health.status_code == 503
        assert "no room" in health.json()["status"]


def test_a_request_cancelled_by_the_engines_owner_is_an_error(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    slow_steps(monkeypatch, SLOW_S)
    with serve(own_engine, model="tiny") as url, connect(url) as client:
        stream = Stream(client)
        assert stream.begun.wait(30)
        own_engine.quiesce()
        *_, last = stream.end()
        assert last["error"]["code"] == "cancelled"


def test_leaving_waits_for_what_runs_and_turns_the_rest_away(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    slow_steps(monkeypatch, SLOW_S)
    refusals: list[httpx.Response] = []
    health: list[httpx.Response] = []
    with connect("http://127.0.0.1") as client:

        def knock(url: str) -> None:
            while not health or health[-1].status_code == 200:
                health.append(client.get(url.removesuffix("/v1") + "/health"))
                time.sleep(0.01)
            refusals.append(client.post(url + "/completions", json=LONG))

        with serve(own_engine, model="tiny", drain_timeout_s=60) as url:
            client.base_url = httpx.URL(url)
            stream = Stream(client, max_tokens=200)
            assert stream.begun.wait(30)
            knocking = threading.Thread(target=knock, args=(url,))
            knocking.start()
            eventually(lambda: bool(health))
        assert stream.end()[-1]["choices"][0]["finish_reason"] == "length"
        knocking.join(60)
    assert (health[0].status_code, health[-1].status_code) == (200, 503)
    assert refusals[0].status_code == 503
    assert error_of(refusals[0])["code"] == "shutting_down"
    assert "retry-after" in refusals[0].headers


def test_what_outlasts_the_drain_is_cancelled_with_an_error(
    own_engine: Engine, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    slow_steps(monkeypatch, SLOW_S)
    client = connect("http://127.0.0.1")
    with serve(own_engine, model="tiny", drain_timeout_s=0.1) as url:
        client.base_url = httpx.URL(url)
        stream = Stream(client)
        assert stream.begun.wait(30)
    *_, last = stream.end()
    client.close()
    assert last["error"]["code"] == "shutting_down"
    eventually(lambda: is_free(own_engine))
    assert own_engine.stats().num_steps < LONG["max_tokens"]
    assert own_engine.generate(["one"])  # the engine is the caller's, and open


def test_the_key_is_asked_for_everywhere_but_at_health(own_engine: Engine, serve: Serve) -> None:
    with serve(own_engine, model="tiny", api_key="s3cret-ö") as url:
        root = url.removesuffix("/v1")
        for sent in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            with connect(url, **sent) as client:
                for response in (
                    client.get("/models"),
                    client.post("/completions", json=LONG),
                    client.get(root + "/metrics"),
                    client.get(root + "/nothing"),
                ):
                    assert response.status_code == 401
                    assert error_of(response)["code"] == "invalid_api_key"
                    assert "s3cret" not in response.text
                assert client.get(root + "/health").status_code == 200
        with httpx.Client(
            base_url=url, headers={"authorization": "Bearer s3cret-ö".encode()}, trust_env=False
        ) as client:
            assert complete(client)["usage"]["completion_tokens"] == 8
            assert "no_key" in client.get(root + "/metrics").text
