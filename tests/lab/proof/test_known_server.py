"""The known server over the protocol, and on a virtual clock."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from p99lab.lab.proof import virtual_clock
from p99lab.lab.proof.known_server import Answers, KnownServer
from p99lab.lab.proof.laws import Erlang, Independent

pytestmark = pytest.mark.light


def law(mean_s: float = 0.1) -> Independent:
    return Independent(Erlang(mean_s, 4), np.random.default_rng(1), Erlang(mean_s / 10, 4))


def asked(method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and content of the answer."""
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    asyncio.run(KnownServer(law(0.001))({"type": "http", "method": method, "path": path}, receive, send))
    return messages[0]["status"], b"".join(message.get("body", b"") for message in messages).decode()


def events(answer: tuple[int, str]) -> list[Any]:
    data = [line.removeprefix("data: ") for line in answer[1].splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def test_completions_stream_a_chunk_per_token_and_the_usage_where_asked() -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(asked("POST", "/v1/completions", body))
    assert [bool(chunk["choices"][0]["text"]) for chunk in chunks] == [True] * 4
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def test_chat_streams_deltas() -> None:
    body = {"messages": [{"role": "user", "content": "two words"}], "max_completion_tokens": 2}
    chunks = events(asked("POST", "/v1/chat/completions", body))
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == [" so", " so"]


def test_models_are_listed_and_other_paths_are_not_found() -> None:
    assert [model["id"] for model in json.loads(asked("GET", "/v1/models")[1])["data"]] == ["known"]
    assert asked("GET", "/v2")[0] == 404


def test_a_virtual_clock_moves_as_it_is_slept_and_not_otherwise() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(1800))
        return [began, loop.time()]

    assert virtual_clock.run(main) == pytest.approx([0.0, 3600.0])


def test_tokens_come_at_the_times_of_the_law() -> None:
    async def main() -> list[float]:
        await asyncio.sleep(5.0)  # the law's clock starts with the first request
        loop = asyncio.get_running_loop()
        return [loop.time() - 5.0 async for _ in Answers(law()).tokens(3)]

    assert virtual_clock.run(main) == pytest.approx(law().token_times_s(0.0, 3))
