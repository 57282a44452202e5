from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from p99lab.errors import BadParameterError
from p99lab.probe.command import ProbeOptions, article_options, parse_span, probe, to_csv, to_rows, write
from p99lab.probe.records import read_parquet

pytestmark = pytest.mark.light


@pytest.fixture
def endpoint(serve: Any) -> Iterator[str]:
    """A small OpenAI-compatible server in a thread of its own; it remembers which documents it has seen."""
    with closing(asyncio.new_event_loop()) as loop:
        seen: set[str] = set()

        async def behave(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            document = body["prompt"].split("\n\nQuestion ")[0]
            num_prompt, num_cached = len(body["prompt"]) // 4, len(document) // 4 if document in seen else 0
            seen.add(document)
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
            for number in range(body["max_tokens"]):
                await asyncio.sleep(0.002)
                finish = "length" if number + 1 == body["max_tokens"] else None
                choice = {"text": "a", "finish_reason": finish}
                writer.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            counts = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
            details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
            writer.write(b"data: " + json.dumps({"choices": [], "usage": {**counts, **details}}).encode() + b"\n\n")
            writer.write(b"data: [DONE]\n\n")

        ready: threading.Event = threading.Event()
        stop = asyncio.Event()
        urls: list[str] = []

        async def main() -> None:
            async with serve(behave) as served:
                urls.append(served.url)
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        ready.wait(10)
        yield urls[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def options(target: str, **changes: Any) -> ProbeOptions:
    few = {"target": target, "document_tokens": (100, 200), "answer_tokens": (4, 4), "requests": 40, "timeout_s": 30.0}
    return ProbeOptions.parse({**few, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"cache": "cold"}, {"load": "open", "rate": 200.0}, {"load": "open", "rate": 200.0, "arrivals": "gamma"}],
)
def test_a_probe_of_an_endpoint(endpoint: str, changes: dict[str, Any], tmp_path: Path) -> None:
    result = probe(options(endpoint, **changes))
    shape = result.as_dict()
    assert shape["target"]["transport"] == "http"
    assert shape["e2e"]["n"] == shape["steady_window"]["num_requests"]
    assert shape["counts"]["measured"] == 40
    assert shape["hit_rates"]["verdict"] == "as declared"
    assert shape["hit_rates"]["cached_share"] == pytest.approx(0.0 if "cache" in changes else 0.75, abs=0.25)
    write(result, tmp_path / "made" / "here")
    assert len(read_parquet(tmp_path / "made" / "here" / "requests.parquet")) == len(result.run.records)
    assert json.loads((tmp_path / "made" / "here" / "summary.json").read_bytes())["e2e"]["p50"]["value"] > 0.005
    assert "ttft" in (tmp_path / "made" / "here" / "latency.hlog").read_text()
    assert to_csv(result).startswith("metric,figure,value_s,low_s,high_s,n,effective_n,reason\nttft,p50,0.")
    assert [row[0] for row in to_rows(result)][:2] == ["ttft", "itl"]


def test_a_run_whose_cache_was_not_as_declared_is_void(endpoint: str) -> None:
    probe(options(endpoint))
    result = probe(options(endpoint, cache="mixed"))
    assert result.summary.void == ()
    from p99lab.probe.stats import summarise
    from p99lab.probe.workload import ClosedLoad

    declared_cold = summarise(result.run, ClosedLoad(num_requests=40, cache="cold"))
    assert any("declared cold" in reason for reason in declared_cold.void)


def test_the_articles_flags_make_up_the_context() -> None:
    made = article_options("in-process", None, 131_072, 64, 300.0)
    assert made.document_tokens[0] + made.question_tokens[0] + made.answer_tokens[0] == 131_072
    assert made.warmup_share * 300 == pytest.approx(60)
    assert (made.load, made.concurrency, made.cache) == ("closed", 64, "primed")
    assert article_options("in-process", None, 1000, 2, 40.0).warmup_share == 0.25
    with pytest.raises(BadParameterError, match="leaves no document"):
        article_options("in-process", None, 80, 2, 40.0)


def test_spans() -> None:
    assert parse_span("10-20", "--x") == (10, 20)
    assert parse_span("16", "--x") == (16, 16)
    with pytest.raises(BadParameterError, match="--x 'ten' is neither"):
        parse_span("ten", "--x")


# --- the command line -----------------------------------------------------------------------------------------------


def command(*arguments: str, program: str = "main") -> subprocess.CompletedProcess[str]:
    code = f"import sys; from p99lab.cli import {program}; sys.argv[0] = 'p99lab'; {program}()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_json_is_all_that_stdout_gets(endpoint: str) -> None:
    few = ("--target", endpoint, "--document-tokens", "100-200", "--answer-tokens", "4", "--requests", "12")
    done = command("probe", *few, "--output-format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["e2e"]["n"] == 12
    assert done.stderr == ""


def test_the_table_is_readable(endpoint: str, tmp_path: Path) -> None:
    few = ("--target", endpoint, "--document-tokens", "100", "--requests", "40", "--output", str(tmp_path / "o"))
    done = command("probe", *few)
    assert done.returncode == 0, done.stderr
    for word in ("ttft", "itl", "e2e", "n < 368", "cache: declared primed, as declared", "note: closed load"):
        assert word in done.stdout
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [
        "latency.hlog",
        "requests.parquet",
        "summary.json",
    ]


def test_latency_probe_takes_the_articles_flags(endpoint: str) -> None:
    flags = ("--context-length", "400", "--concurrency", "2", "--duration", "2", "--output-format", "json")
    done = command("--target", endpoint, *flags, program="latency_probe")
    assert done.returncode == 0, done.stderr
    shape = json.loads(done.stdout)
    assert shape["options"]["document_tokens"] == [320, 320]
    assert shape["e2e"]["n"] > 10


def closed_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--target", f"http://127.0.0.1:{closed_port()}"], 5, "does not answer"),
        (["--target", "nowhere"], 2, "neither in-process nor a URL"),
        (["--document-tokens", "20-10"], 2, "20-10 is not a range"),
        (["--document-tokens", "many"], 2, "--document-tokens 'many'"),
        (["--load", "open"], 2, "an open load needs a rate"),
        (["--load", "ajar"], 2, "load: "),
        (["--endpoint", "responses"], 2, "endpoint: "),
        (["--output-format", "xml"], 2, "format: "),
        (["--requests", "0"], 2, "requests: "),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(arguments: list[str], exit_code: int, message: str) -> None:
    done = command("probe", *arguments)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert message in done.stderr
    assert done.stderr.startswith("p99lab: ")
    assert done.stderr.count("\n") == 1


def test_nothing_of_the_probe_imports_torch() -> None:
    code = "import p99lab.probe.command, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
