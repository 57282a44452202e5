from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from p99lab.errors import BadParameterError, ModelError
from p99lab.probe.client_process import ClientJob, ClientProcess, ClientProcessError, new_event_loop
from p99lab.probe.load import Progress
from p99lab.probe.openai_target import TargetSpec
from p99lab.probe.records import Outcome, Phase
from p99lab.probe.stats import measured, summarise
from p99lab.probe.targets import TargetError
from p99lab.probe.workload import ClosedLoad, Load, OpenLoad, TraceLoad, Workload, digest, make_documents

pytestmark = pytest.mark.light

SMALL = Workload(
    num_documents=2, document_tokens=(100, 120), question_tokens=(20, 24), answer_tokens=(3, 3), vocab_size=997
)


class Endpoint:
    """What the server of these tests was asked, and how long it takes for a token."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.token_s = 0.002

    async def behave(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n")
        for number in range(body["max_tokens"]):
            await asyncio.sleep(self.token_s)
            finish = "length" if number + 1 == body["max_tokens"] else None
            message = {"choices": [{"text": "a", "finish_reason": finish}]}
            writer.write(b"data: " + json.dumps(message).encode() + b"\n\n")
        counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        writer.write(b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\ndata: [DONE]\n\n")


@pytest.fixture
def endpoint(serve: Any) -> Iterator[Endpoint]:
    """In a thread of its own, because a client's process is waited for."""
    served, ready = Endpoint(), threading.Event()
    with closing(asyncio.new_event_loop()) as loop:
        stop = asyncio.Event()

        async def main() -> None:
            async with serve(served.behave) as listening:
                served.url, served.bodies = listening.url, listening.bodies
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        assert ready.wait(10)
        yield served
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture(scope="module")
def clients() -> Iterator[ClientProcess]:
    with ClientProcess() as process:
        yield process


def job(url: str, load: Load, **changes: Any) -> ClientJob:
    return ClientJob(target=TargetSpec(url=url), workload=SMALL, load=load, **changes)


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Ended, whether or not someone has taken note."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
                continue
        return True
    return False


def test_an_open_load_is_driven_from_another_process(endpoint: Endpoint, clients: ClientProcess) -> None:
    load = OpenLoad(rate=100, num_requests=40, warmup_share=0.1)
    told: list[Progress] = []
    began = time.time()
    run = clients.run(job(endpoint.url, load, prime=True), told.append)
    assert len(measured(run.records)) == 40
    assert {r.outcome for r in run.records if r.phase is not Phase.COOLDOWN} == {Outcome.OK}
    assert run.num_cancelled == sum(r.outcome is Outcome.CANCELLED for r in run.records)
    for record in run.records:
        assert record.intended_s is not None
        assert record.send_s >= record.intended_s
        if record.first_token_s is not None:
            assert record.first_byte_s is not None
            assert record.last_byte_s is not None
            assert record.intended_s <= record.first_byte_s <= record.last_byte_s <= record.first_token_s
        assert record.num_prompt_tokens == record.num_prompt_tokens_sent or record.outcome is Outcome.CANCELLED
    assert [len(body["prompt"]) for body in endpoint.bodies[:2]] == list(run.document_tokens)  # primed
    assert run.workload_digest == digest(SMALL, make_documents(SMALL))
    assert run.target == f"{endpoint.url}/v1 (tiny, completions)"
    assert began < run.began_unix_s < time.time()
    assert told
    assert told[-1].latest.index in {record.index for record in run.records}
    assert len(summarise(run, load).metrics["e2e"].percentiles) == 4


def test_requests_cut_off_at_the_end_are_counted(endpoint: Endpoint, clients: ClientProcess) -> None:
    endpoint.token_s = 0.1
    run = clients.run(job(endpoint.url, OpenLoad(rate=50, num_requests=5, warmup_share=0)))
    assert run.num_cancelled >= 5
    assert {r.phase for r in run.records if r.outcome is Outcome.CANCELLED} == {Phase.COOLDOWN}


def test_a_stretch_of_the_queries(endpoint: Endpoint, clients: ClientProcess) -> None:
    load = ClosedLoad(concurrency=2, num_requests=50, warmup_share=0)
    whole = clients.run(job(endpoint.url, load, num_queries=12))
    stretch = clients.run(job(endpoint.url, load, first_query=8, num_queries=4))
    assert [r.index for r in stretch.records] == [8, 9, 10, 11]
    assert [r.prompt_digest for r in stretch.records] == [r.prompt_digest for r in whole.records[8:]]
    other = clients.run(job(endpoint.url, load, num_queries=4, asked=SMALL.model_copy(update={"seed": 1})))
    assert other.workload_digest == whole.workload_digest
    assert {r.prompt_digest for r in other.records}.isdisjoint(r.prompt_digest for r in whole.records)


def test_a_trace_needs_no_documents(endpoint: Endpoint, clients: ClientProcess, tmp_path: Path) -> None:
    row = {"input_length": 700, "output_length": 2, "hash_ids": [1, 2]}
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({**row, "timestamp": 10 * i}) for i in range(10)))
    run = clients.run(job(endpoint.url, TraceLoad(path=tmp_path / "t.jsonl")))
    assert len(run.records) == 10
    assert run.document_tokens == ()
    assert {(r.max_tokens, r.num_prompt_tokens_sent) for r in run.records} == {(2, 700)}


def test_a_tokenizer_is_named(endpoint: Endpoint, clients: ClientProcess) -> None:
    workload = Workload(num_documents=1, document_tokens=(300, 300), question_tokens=(120, 150))
    order = ClientJob(
        target=TargetSpec(url=endpoint.url),
        workload=workload,
        load=ClosedLoad(concurrency=1, num_requests=1, warmup_share=0),
        tokenizer="dummy:smollm2-135m",
    )
    run = clients.run(order)
    assert run.document_tokens == (300,)
    assert (
        run.records[0].num_prompt_tokens == run.records[0].num_prompt_tokens_sent == len(endpoint.bodies[0]["prompt"])
    )


def test_errors_come_as_themselves_and_the_process_goes_on(endpoint: Endpoint, clients: ClientProcess) -> None:
    load, pid = ClosedLoad(num_requests=3), clients.pid
    wrong = TargetSpec(url=endpoint.url, model="tinny")
    with pytest.raises(TargetError, match="did you mean 'tiny'") as caught:
        clients.run(job(endpoint.url, load).model_copy(update={"target": wrong}))
    assert (type(caught.value), caught.value.exit_code) == (TargetError, 5)
    with pytest.raises(TargetError, match="connection refused"):
        clients.run(job("http://127.0.0.1:9", load))
    with pytest.raises(BadParameterError, match="neither serve nor in-process nor a URL") as bad:
        clients.run(job("nowhere", load))
    assert bad.value.exit_code == 2
    with pytest.raises(BadParameterError, match="cannot be read"):
        clients.run(job(endpoint.url, TraceLoad(path=Path("/nowhere"))))
    with pytest.raises(ModelError, match="no model or directory 'nope'"):
        clients.run(job(endpoint.url, load, tokenizer="nope"))
    assert len(measured(clients.run(job(endpoint.url, load)).records)) == 3
    assert clients.pid == pid


def test_a_job_survives_plain_values() -> None:
    order = job("http://h", OpenLoad(arrivals="ramp", rate=1, rate_end=2, duration_s=3), asked=SMALL, num_queries=7)
    assert ClientJob.parse(order.model_dump(mode="json")) == order
    with pytest.raises(BadParameterError, match=r"unknown parameter 'load\.open\.rat'"):
        ClientJob.parse({**order.model_dump(mode="json"), "load": {"kind": "open", "rat": 1}})


def test_it_does_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(new_event_loop()) as loop:
        assert type(loop).__module__.partition(".")[0] == ("uvloop" if find_spec("uvloop") else "asyncio")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with closing(new_event_loop()) as loop:
        assert isinstance(loop, asyncio.SelectorEventLoop)


def test_a_killed_process_is_one_line(endpoint: Endpoint) -> None:
    def kill(progress: Progress) -> None:
        os.kill(clients.pid, signal.SIGKILL)

    with ClientProcess() as clients:
        with pytest.raises(ClientProcessError, match=r"^the clients' process was killed by SIGKILL$") as caught:
            clients.run(job(endpoint.url, ClosedLoad(duration_s=60)), kill)
        assert caught.value.exit_code == 1  # the target is not to blame
        with pytest.raises(ClientProcessError, match="SIGKILL"):
            clients.run(job(endpoint.url, ClosedLoad(num_requests=1)))


def test_what_goes_wrong_while_progress_is_told_ends_the_process(endpoint: Endpoint) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError("a bug")

    with ClientProcess() as clients:
        pid = clients.pid
        with pytest.raises(ZeroDivisionError):
            clients.run(job(endpoint.url, ClosedLoad(duration_s=60)), fail)
        assert gone(pid)


def test_a_cancelled_run_ends_the_process(endpoint: Endpoint) -> None:
    async def main(clients: ClientProcess) -> None:
        begun = asyncio.Event()
        order = job(endpoint.url, ClosedLoad(duration_s=60))
        running = asyncio.create_task(clients.run_async(order, lambda progress: begun.set()))
        await asyncio.wait_for(begun.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    with ClientProcess() as clients:
        pid = clients.pid
        asyncio.run(main(clients))
        assert gone(pid)


PARENT = """
import os, sys
from p99lab.probe.client_process import ClientJob, ClientProcess
with ClientProcess() as clients:
    told = lambda progress: print(clients.pid, flush=True)
    clients.run(ClientJob.parse({order!r}), told)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_parent(endpoint: Endpoint, how: signal.Signals) -> None:
    """Ctrl-C reaches the parent alone: the process has a group of its own."""
    order = job(endpoint.url, ClosedLoad(duration_s=60)).model_dump(mode="json")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(order=order)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert os.getpgid(pid) == pid
    parent.send_signal(how)
    _, errors = parent.communicate(timeout=30)
    assert parent.returncode == -how
    assert ("KeyboardInterrupt" in errors) == (how is signal.SIGINT)
    assert gone(pid)
