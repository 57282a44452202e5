"""`p99lab serve` as a process: its one line, its end, and what it says when it cannot begin."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from p99lab.engine.engine import Engine
from p99lab.errors import BadParameterError
from p99lab.serving import child
from p99lab.serving.process import server_process
from p99lab.serving.server import Server
from p99lab.serving.sockets import bind
from tests.serving.clients import connect, events


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`p99lab serve` and its URL, once it is ready."""
    command = child.command("p99lab.cli", ["serve", *arguments, "--port", "0"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving tiny at http://"), process.communicate()
            yield process, line.split(" at ")[1].strip()
        finally:
            process.kill()


def test_sigterm_lets_a_running_answer_finish_and_ends_with_0(ascii_llama: str) -> None:
    body = {"model": "tiny", "prompt": "one", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serving(ascii_llama, "--served-model-name", "tiny", "--num-pages", "40") as (process, url):
        with connect(url) as client, client.stream("POST", "/completions", json=body) as response:
            parts = response.iter_text()
            text = next(parts)
            process.send_signal(signal.SIGTERM)
            text += "".join(parts)
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 0


def test_all_addresses_without_a_key_is_warned_of_and_a_second_signal_ends_it(ascii_llama: str) -> None:
    body = {"model": "tiny", "prompt": "one", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    arguments = (ascii_llama, "--served-model-name", "tiny", "--num-pages", "40", "--host", "0.0.0.0")
    with serving(*arguments) as (process, url):
        here = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.post(f"{here}/completions", json=body, trust_env=False).status_code == 400
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (out, err.count("\n"), process.returncode) == ("", 1, 0)
        assert "--api-key-env" in err


def test_server_process_yields_a_url_and_ends_what_it_started(ascii_llama: str) -> None:
    with server_process([ascii_llama, "--served-model-name", "tiny", "--num-pages", "40"]) as url:
        assert url.endswith("/v1")
        with connect(url) as client:
            assert client.get("/models").json()["data"][0]["max_model_len"] == 512
    with pytest.raises(httpx.ConnectError), connect(url) as client:
        client.get("/models")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = child.command("p99lab.cli", ["serve", *arguments])
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_address_in_use_is_one_line(ascii_llama: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(ascii_llama, "--port", str(port))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"p99lab: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_an_address_that_another_takes_meanwhile_is_one_line(engine: Engine) -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        server = Server(engine, "tiny", second, drain_timeout_s=0.0)
        first.listen()
        with pytest.raises(BadParameterError, match="cannot listen on 127"):
            asyncio.run(server.run(lambda: pytest.fail("it is not ready")))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (("smolm2-135m", "--port", "0"), 4, "did you mean 'smollm2-135m'?"),
        (("--dtype", "int8"), 2, "dtype: "),
        (("--api-key-env", "P99LAB_NOT_SET"), 2, "'P99LAB_NOT_SET' holds no API key"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: tuple[str, ...], exit_code: int, says: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (exit_code, "", 1)
    assert says in done.stderr
