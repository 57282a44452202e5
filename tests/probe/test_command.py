from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from p99lab.cli import main
from p99lab.commands.figures import figure_table
from p99lab.errors import BadParameterError
from p99lab.probe.command import probe
from p99lab.probe.intervals import Figure
from p99lab.probe.options import ProbeOptions, article_options, parse_span
from p99lab.probe.output import to_csv
from p99lab.probe.tables import cell, probe_rows
from p99lab.probe.workload import ClosedLoad, OpenLoad, TraceLoad

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
def test_a_probe_of_an_endpoint(endpoint: str, changes: dict[str, Any]) -> None:
    result = probe(options(endpoint, **changes))
    shape = result.as_dict()
    assert (shape["target"]["transport"], shape["target"]["clients"]) == ("http", "in a process of their own")
    assert shape["e2e"]["n"] == shape["steady_window"]["num_requests"]
    assert shape["counts"]["measured"] == 40
    assert shape["hit_rates"]["verdict"] == "as declared"
    assert shape["hit_rates"]["cached_share"] == pytest.approx(0.0 if "cache" in changes else 0.75, abs=0.25)
    assert to_csv(result).startswith("metric,figure,value_s,low_s,high_s,n,effective_n,reason\nttft,p50,0.")
    assert [row[0] for row in probe_rows(result)][:2] == ["ttft", "itl"]
    assert list(shape)[:3] == ["target", "void", "notes"]
    assert list(shape)[-1] == "options"


def test_a_run_whose_cache_was_not_as_declared_is_void(endpoint: str) -> None:
    probe(options(endpoint))
    result = probe(options(endpoint, cache="mixed"))
    assert result.summary.void == ()
    from p99lab.probe.stats import summarise

    declared_cold = summarise(result.run, ClosedLoad(num_requests=40, cache="cold"))
    assert any("declared cold" in reason for reason in declared_cold.void)


def test_the_articles_flags_make_up_the_context() -> None:
    made = article_options("in-process", None, 131_072, 64, 300.0)
    assert made.document_tokens[0] + made.question_tokens[0] + made.answer_tokens[0] == 131_072
    assert made.warmup_share * 300 == pytest.approx(60)
    assert (made.load, made.concurrency, made.cache_state) == ("closed", 64, "primed")
    assert article_options("in-process", None, 1000, 2, 40.0).warmup_share == 0.25
    with pytest.raises(BadParameterError, match="leaves no document"):
        article_options("in-process", None, 80, 2, 40.0)


def test_options_make_the_load_that_they_ask_for(tmp_path: Path) -> None:
    closed = ProbeOptions().load_spec
    assert isinstance(closed, ClosedLoad)
    assert (closed.duration_s, closed.cache) == (30.0, "primed")
    ramp = ProbeOptions.parse({"load": "open", "rate": 1, "rate_end": 5, "arrivals": "ramp", "duration_s": 9}).load_spec
    assert isinstance(ramp, OpenLoad)
    assert (ramp.arrivals, ramp.rate_end) == ("ramp", 5.0)
    trace = ProbeOptions.parse({"load": "trace", "trace": tmp_path / "t.jsonl", "speedup": 2}).load_spec
    assert isinstance(trace, TraceLoad)
    assert (trace.speedup, trace.duration_s, trace.cache) == (2.0, None, "mixed")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"load": "open"}, "an open load needs a rate"),
        ({"rate": 2.0}, "a closed load has no rate: add --load open"),
        ({"load": "trace"}, "a trace load needs a file"),
        ({"trace": "t.jsonl"}, "a trace load needs a file"),
        ({"load": "open", "rate": 1.0, "arrivals": "ramp"}, "--arrivals ramp --rate-end RATE"),
        ({"load": "open", "rate": 1.0, "arrivals": "ramp", "rate_end": 2.0, "requests": 9}, "takes: --duration"),
        ({"load": "open", "rate": 1.0, "rate_end": 2.0}, "only a ramp has one"),
        ({"load": "closed", "arrivals": "ramp", "rate_end": 2.0}, "only a ramp has one"),
    ],
)
def test_options_that_do_not_fit_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        _ = ProbeOptions.parse(values).load_spec


def test_a_repetition_asks_other_questions_about_the_same_documents() -> None:
    first, again = ProbeOptions(), ProbeOptions(repetition=1)
    assert first.workload == again.workload == first.asked
    assert again.asked.seed not in (first.seed, ProbeOptions(repetition=2).asked.seed)


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        (Figure(0.0062, 0.00573, 0.0123, 400, 400), "6.2\n5.73–12.3"),
        (Figure(0.0062, 0.00573, None, 400, 100), "6.2\n≥ 5.73"),
        (Figure(0.0062, None, 0.0123, 400, 400), "6.2\n≤ 12.3"),
        (Figure(0.0062, None, None, 400, 1), "6.2"),
        (Figure(0.9996, None, None, 400, 1), "1000"),
        (Figure(None, None, None, 40, 40), "n < 368"),
        (Figure(None, None, None, 400, 400), "failed"),
    ],
)
def test_a_figure_in_the_table(figure: Figure, shown: str) -> None:
    assert cell("p99", figure) == shown


def test_spans() -> None:
    assert parse_span("10-20", "--x") == (10, 20)
    assert parse_span("16", "--x") == (16, 16)
    with pytest.raises(BadParameterError, match="--x 'ten' is neither"):
        parse_span("ten", "--x")


def test_a_table_is_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    wide = ["12345", *["123456\n100000–150000"] * 4]
    figure_table([["queue_time", *wide, "200000", "1000\n900–1100"]])
    said = capsys.readouterr().out
    assert said.count("100000–150000") == 4
    assert max(map(len, said.splitlines())) > 80


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
    assert {"latency.hlog", "requests.parquet", "summary.csv", "summary.json"} <= {
        path.name for path in (tmp_path / "o").iterdir()
    }
    assert " cancelled" in done.stdout


def test_a_void_result_says_so_first_and_fails_only_when_asked_to(endpoint: str) -> None:
    asked = {"document_tokens": (100, 100), "answer_tokens": (2, 2), "requests": 12, "cache": "cold"}
    assert probe(options(endpoint, **asked)).summary.void == ()  # a line of its own before each document
    few = ("--target", endpoint, "--document-tokens", "100", "--answer-tokens", "2", "--requests", "12")
    for strict, exit_code in (((), 0), (("--strict",), 6)):
        done = command("probe", *few, "--cache", "cold", *strict)
        assert done.returncode == exit_code, done.stderr
        assert done.stdout.startswith("VOID: these figures must not be used: declared cold, but")
        assert done.stdout.count("declared cold, but") == 1


def test_a_sweep_from_the_command_line_and_a_merge_of_its_points(endpoint: str, tmp_path: Path) -> None:
    few = ("--target", endpoint, "--document-tokens", "100", "--answer-tokens", "4", "--requests", "40")
    slo = ("--sweep", "20,40", "--slo-ms", "2000", "--slo-quantile", "p90", "--output", str(tmp_path / "s"))
    done = command("probe", *few, *slo)
    assert done.returncode == 0, done.stderr
    assert "capacity: 4 clients" in done.stderr
    assert "sweep: 2 rates, about" in done.stderr
    for word in ("goodput: ", "saturation: ", "capacity: ", "SLO: P90 of e2e ≤ 2000 ms", "p90 e2e (ms)"):
        assert word in done.stdout
    assert {"sweep.json", "sweep.csv", "capacity", "rate-20", "rate-40"} <= {p.name for p in (tmp_path / "s").iterdir()}
    assert json.loads((tmp_path / "s" / "rate-20" / "summary.json").read_bytes())["options"]["rate"] == 20.0
    folders = [str(tmp_path / "s" / name) for name in ("rate-20", "rate-40")]
    merged = command("merge", *folders, "--force", "--output-format", "json", "--output", str(tmp_path / "m"))
    assert merged.returncode == 0, merged.stderr
    assert json.loads(merged.stdout)["e2e"]["n"] == sum(
        json.loads((Path(folder) / "summary.json").read_bytes())["e2e"]["n"] for folder in folders
    )
    assert (tmp_path / "m" / "latency.hlog").exists()
    shown = command("merge", *folders, "--force").stdout
    for word in (f"target: {endpoint}", "requests: ", "merged: 2 runs", "e2e, sent"):
        assert word in shown


@pytest.mark.parametrize(
    ("number", "exit_code", "how"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("kept", [False, True])
def test_an_interrupted_probe_ends_at_once_and_says_what_is_left(
    endpoint: str, tmp_path: Path, number: signal.Signals, exit_code: int, how: str, kept: bool
) -> None:
    few = ("--target", endpoint, "--document-tokens", "100", "--answer-tokens", "4", "--requests", "9999")
    code = "import sys; from p99lab.cli import main; sys.argv[0] = 'p99lab'; main()"
    folder = ("--output", str(tmp_path / "o")) if kept else ()
    words = [sys.executable, "-c", code, "probe", *few, *folder, "--sweep", "1,2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline().startswith("capacity: ")
        started = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (exit_code, "")
    left = f"what was measured whole is in {tmp_path / 'o'}" if kept else "nothing was kept"
    assert err.splitlines()[-1] == f"p99lab: {how}: {left}"
    assert "Traceback" not in err
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_a_signal_that_is_ignored_stays_so(endpoint: str) -> None:
    few = ("--target", endpoint, "--document-tokens", "100", "--answer-tokens", "2", "--requests", "12")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from p99lab.commands import probe; from p99lab.probe import command; measure = command.probe\n"
        "def interrupted(*args): signal.raise_signal(signal.SIGINT); return measure(*args)\n"
        "command.probe = interrupted\n"
        "from p99lab.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "probe", *few], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


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
        (["--target", "nowhere"], 2, "neither serve nor in-process nor a URL"),
        (["--document-tokens", "20-10"], 2, "document_tokens: 20-10 is not a range of at least 1 token\n"),
        (["--document-tokens", "many"], 2, "--document-tokens 'many'"),
        (["--load", "open"], 2, "an open load needs a rate"),
        (["--load", "open", "--rate", "1", "--arrivals", "ramp"], 2, "--rate-end RATE"),
        (["--api-key-env", "P99LAB_NOT_SET"], 2, "the environment variable 'P99LAB_NOT_SET' holds no API key"),
        (["--load", "ajar"], 2, "load: "),
        (["--endpoint", "responses"], 2, "endpoint: "),
        (["--output-format", "xml"], 2, "format: "),
        (["--requests", "0"], 2, "requests: "),
        (["--rate", "2"], 2, "add --load open"),
        (["--load", "trace"], 2, "--trace FILE"),
        (["--load", "trace", "--trace", "nowhere.jsonl", "--target", "http://127.0.0.1:1"], 2, "nowhere.jsonl"),
        (
            ["--load", "trace", "--trace", "nowhere.jsonl", "--model", "no-such-model"],
            2,
            "nowhere.jsonl cannot be read",
        ),
        (["--load", "trace", "--trace", "nowhere.jsonl", "--requests", "9", "--model", "no-such-model"], 2, "nowhere"),
        (["--sweep", "fast"], 2, "--sweep 'fast'"),
        (["--sweep", "1,2", "--load", "open", "--rate", "2"], 2, "--sweep chooses the rates"),
        (["--output", "."], 2, ". is not empty: name another --output, or add --overwrite"),
        (["merge", ".", "elsewhere"], 2, ". holds no result of a probe"),
        (["--slo-ms", "200"], 2, "--slo-ms is for --sweep"),
        (["--sweep", "1,2", "--slo-ms", "200", "--slo-metric", "tpot"], 2, "slo.metric: "),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(
    arguments: list[str],
    exit_code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["p99lab", *(["probe"] if arguments[0].startswith("-") else []), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (exit_code, "")
    assert message in said.err
    assert said.err.startswith("p99lab: ")
    assert said.err.count("\n") == 1


def test_help_shows_computed_defaults_and_exit_codes() -> None:
    said = " ".join(command("probe", "--help").stdout.replace("│", " ").split())
    for word in ("30 without --requests", "600; 120 in a sweep", "--strict makes that 6", "[default: serve]"):
        assert word in said


def test_nothing_of_the_probe_imports_torch() -> None:
    code = "import p99lab.probe.command, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
