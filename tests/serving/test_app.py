"""Paths, models, metrics, bodies: what is not about a completion, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from p99lab.engine.engine import Engine
from p99lab.serving.openai_api import app as app_module
from p99lab.serving.openai_api.app import make_app
from p99lab.serving.openai_api.service import Service
from tests.serving.clients import complete, error_of

Ask = Callable[[httpx.AsyncClient], Awaitable[Any]]


@pytest.fixture
def ask(engine: Engine) -> Callable[[Ask], Any]:
    """Run a coroutine function with a client of a fresh application."""

    def run(work: Ask) -> Any:
        async def main() -> Any:
            transport = httpx.ASGITransport(make_app(Service(engine, "tiny")), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await work(client)

        return asyncio.run(main())

    return run


def test_models(ask: Callable[[Ask], Any]) -> None:
    listed = ask(lambda client: client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"], model["max_model_len"]) == ("tiny", "model", "p99lab", 512)
    assert ask(lambda client: client.get("/v1/models/tiny")).json().keys() == model.keys()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/models/tinny", 404, "model_not_found"),
        ("GET", "/v1/model", 404, "unknown_url"),
        ("POST", "/v2/completions", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, None),
        ("GET", "/docs", 404, "unknown_url"),
    ],
)
def test_wrong_paths_have_the_apis_shape(
    ask: Callable[[Ask], Any], method: str, path: str, status: int, code: str | None
) -> None:
    response = ask(lambda client: client.request(method, path))
    assert response.status_code == status
    assert error_of(response)["code"] == code


def test_another_model_is_not_found(ask: Callable[[Ask], Any]) -> None:
    response = ask(lambda client: client.post("/v1/completions", json={"model": "tny", "prompt": "x"}))
    assert response.status_code == 404
    assert "did you mean 'tiny'?" in error_of(response)["message"]


def test_a_body_that_is_too_long_is_not_read_to_its_end(
    ask: Callable[[Ask], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 1 << 20)
    num_sent = 0

    async def body() -> Any:
        nonlocal num_sent
        for _ in range(100):
            num_sent += 1
            yield b"x" * (1 << 16)

    response = ask(lambda client: client.post("/v1/completions", content=body()))
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert response.headers["connection"] == "close"
    assert num_sent < 100


def test_a_defect_is_told_without_its_details(ask: Callable[[Ask], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Service, "encode", broken)
    response = ask(lambda client: client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}))
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "secret" not in response.text


def test_metrics_count_what_was_done(engine: Engine) -> None:
    from p99lab.serving.background import serve_in_thread
    from tests.serving.clients import connect

    before = {metric.name for metric in REGISTRY.collect()}
    with serve_in_thread(engine, model="tiny") as url, connect(url) as client:
        complete(client, "one", n=2, seed=1, max_tokens=5)
        client.post("/completions", json={"model": "tiny"})
        text = client.get(url.removesuffix("/v1") + "/metrics").text
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["p99lab_requests_total", "/v1/completions", "ok"] == 1
    assert found["p99lab_requests_total", "/v1/completions", "bad_request"] == 1
    assert (found["p99lab_prompt_tokens_total",], found["p99lab_generated_tokens_total",]) == (6, 10)
    assert found["p99lab_time_to_first_token_seconds_count",] == 2
    assert found["p99lab_inter_token_latency_seconds_count",] == 8
    assert found["p99lab_e2e_latency_seconds_count",] == 2
    assert found["p99lab_queue_time_seconds_count",] == 2
    assert 0 < found["p99lab_queue_time_seconds_sum",] < found["p99lab_e2e_latency_seconds_sum",]
    assert found["p99lab_pages", "free"] + found["p99lab_pages", "cached"] == 400
    assert (found["p99lab_pages", "active"], found["p99lab_requests_running",]) == (0, 0)
    assert found["p99lab_steps_total",] == engine.stats().num_steps
    assert (found["p99lab_graph_steps_total",], found["p99lab_fallback_steps_total",]) == (0, 0)
    assert (found["p99lab_padded_tokens_total",], found["p99lab_moved_pages_total",]) == (0, 0)
    assert found["p99lab_shared_tokens_total",] == engine.stats().num_shared_tokens
    assert found["p99lab_step_device_seconds_count",] == 0  # a CPU has no clock of its own
    assert found["p99lab_recent_step_seconds", "0.99"] > 0
    assert {metric.name for metric in REGISTRY.collect()} == before  # the process-wide registry is untouched
