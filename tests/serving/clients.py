"""What the tests send to a server, and what they read of its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx


def connect(url: str, **headers: str) -> httpx.Client:
    import httpx

    return httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)


def complete(client: httpx.Client, prompt: Any = "one", **fields: Any) -> dict[str, Any]:
    """A completion that must succeed, greedy where nothing else is said."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 8, **fields}
    response = client.post("/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat(client: httpx.Client, content: Any = "hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "ignore_eos": True, "max_tokens": 8, **fields}
    response = client.post("/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(text: str) -> list[Any]:
    """The data of server-sent events; the last is the end mark, left out."""
    *data, last = [json.loads(part[6:]) if part != "data: [DONE]" else None for part in text.split("\n\n") if part]
    assert last is None
    return data


def stream(client: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 8, "stream": True, **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def refused(client: httpx.Client, status: int, path: str = "/completions", **fields: Any) -> dict[str, Any]:
    """The error of a request that must be refused, in the API's shape."""
    response = client.post(path, json={"model": "tiny", **fields})
    assert response.status_code == status, response.text
    return error_of(response)


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every step of every engine takes this much longer."""
    from p99lab.engine.runner import ModelRunner

    launch = ModelRunner.launch

    def slow(self: ModelRunner, plan: Any) -> Any:
        time.sleep(seconds)
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "launch", slow)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("it has not come to be so in 30 seconds")
