"""vLLM's own OpenAI server as a peer, in a process of its own: nothing of it is imported here.

It is installed in a folder of its own (`pip install --target`), because its dependencies shadow others; that folder
alone is the child's PYTHONPATH. It dies with the process that started it, and its engine and gateways, which are
processes of their own, die with it.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from p99lab.engine.model_store import cache_dir
from p99lab.errors import BadParameterError, P99labError
from p99lab.serving import child

MODULE = "vllm.entrypoints.cli.main"
MODEL = "peer"  # its name to clients
FLAGS = (
    "--load-format=dummy",
    "--dtype=bfloat16",
    "--max-model-len=131072",
    "--gpu-memory-utilization=0.92",
    "--max-num-seqs=128",
    "--max-num-batched-tokens=8192",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--api-server-count=8",  # one spends 0.1 s on 128K ids: JSON, and at the first token all are spelt out
    "--disable-log-stats",
)
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 15.0
_POLL_S = 0.25
_HEALTH_TIMEOUT_S = 1.0
_DEAD = ("EngineCore failed to start", "EngineDeadError")  # its HTTP server may live on, and never answer
_NOT_THE_CAUSE = ("EngineDeadError", "root cause", "KeyboardInterrupt")
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b.*")
_GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_NAMED = {"SPT_NOENV": "1"}  # else its processes' titles overwrite the environment by which a run's are found
_LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_NOT_INHERITED = ("PYTHONPATH", "CUDA_MODULE_LOADING", "CUDA_FORCE_PTX_JIT")


class PeerError(P99labError):
    """A peer cannot be started: one line that says why."""


@dataclass(frozen=True, slots=True)
class VllmSpec:
    """Where vLLM is, what it serves, and what its server is told besides. `model`: its config and tokenizer."""

    site: Path
    model: Path
    arguments: tuple[str, ...] = FLAGS

    def __post_init__(self) -> None:
        if not (self.site / "vllm").is_dir():
            raise BadParameterError(f"no vLLM in {self.site}: expected the folder of `pip install --target`")
        if not (self.model / "config.json").is_file():
            raise BadParameterError(f"no config.json in {self.model}: vLLM needs a folder with config and tokenizer")

    @property
    def version(self) -> str:
        """The installed release; `unknown` where the folder does not say."""
        found = importlib.metadata.distributions(name="vllm", path=[str(self.site)])
        return next((distribution.version for distribution in found), "unknown")

    def environment(self) -> dict[str, str]:
        """The child's: this process's, with the site in place of its own packages, and no network."""
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        path = f"{self.site / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
        without = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if not (self.site / "flashinfer").is_dir() else {}
        without |= {"VLLM_USE_DEEP_GEMM": "0"} if not (self.site / "deep_gemm").is_dir() else {}
        caches = {"VLLM_CACHE_ROOT": str(cache_dir() / "vllm")}
        own = {"PYTHONPATH": str(self.site), "PATH": path, "PYTHONUNBUFFERED": "1"}
        return {**caches, **kept, **_OFFLINE, **_LOOPBACK, **_NAMED, **without, **own}

    def command(self, port: int) -> list[str]:
        """`child.py` by its path, and without its folder on `sys.path`: p99lab need not be importable over there."""
        tied = [sys.executable, "-P", str(Path(child.__file__)), str(os.getpid()), MODULE]
        served = ["serve", str(self.model), f"--served-model-name={MODEL}", "--seed=0", *self.arguments]
        account = ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]  # cached tokens are reported
        return [*tied, *served, *account, "--host=127.0.0.1", f"--port={port}"]


@contextlib.contextmanager
def vllm_server(spec: VllmSpec, start_timeout_s: float = START_TIMEOUT_S, log: Path | None = None) -> Iterator[str]:
    """Start vLLM, wait until it answers, and yield its URL, which ends in `/v1`. On leaving it is gone.

    Args:
        log: holds what it writes, and nothing else. None: a temporary file does, and stays should it not start.

    Raises:
        PeerError: it ended, its engine did, or it did not answer in time; with the cause and where its log is.
    """
    port, path = _free_port(), log or _temporary_log()
    with (
        path.open("wb") as said,
        subprocess.Popen(
            spec.command(port),
            env=spec.environment(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            process_group=0,
        ) as process,
        _guarded(process),
    ):
        try:
            _await_health(process, port, path, start_timeout_s)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _end(process)
    if log is None:
        path.unlink(missing_ok=True)


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="p99lab-vllm-", suffix=".log")
    os.close(handle)
    return Path(name)


@contextlib.contextmanager
def _guarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Should this process be killed, another one ends the server's group: Linux ties only the server itself to us, and
    its engine would keep the device's memory."""
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(process.pid)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _free_port() -> int:
    """One that is free now; vLLM does not say which it took if it is let choose."""
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _await_health(process: subprocess.Popen[bytes], port: int, log: Path, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise PeerError(f"vLLM ended with exit code {process.returncode}: {_reason(log)}")
        if _is_healthy(port):
            return
        if any(sign in _text(log) for sign in _DEAD):
            raise PeerError(f"vLLM's engine did not start: {_reason(log)}")
        time.sleep(_POLL_S)
    raise PeerError(f"vLLM does not answer after {timeout_s:.0f} s: {_reason(log)}")


def _is_healthy(port: int) -> bool:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_HEALTH_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _reason(log: Path) -> str:
    """The last error of the log that is not the mere consequence of another, else its last line; and the log's name:
    pages quote this, and are not to name folders of the machine."""
    lines = [line.strip() for line in _text(log).splitlines() if line.strip()]
    errors = [match[0] for line in lines if " WARNING " not in line and (match := _ERROR.search(line))]
    causes = [error for error in errors if not any(sign in error for sign in _NOT_THE_CAUSE)]
    return f"{(causes or errors or lines or ['it gave no reason'])[-1]} (log: {log.name})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tell it to end, then end whatever is left of its group: its engine is a process of its own, whose memory is to be
    free when this returns."""
    others: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        others = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    psutil.wait_procs(others, END_TIMEOUT_S)
    process.wait()


def spec_of(site: str | None, model: str | None, arguments: Sequence[str]) -> VllmSpec | None:
    """The peer that two folders name; None where one of them is not given. No arguments: `FLAGS`.

    Raises:
        BadParameterError: there is no vLLM, or no config, in them.
    """
    if site is None or model is None:
        return None
    return VllmSpec(Path(site).expanduser(), Path(model).expanduser(), tuple(arguments) or FLAGS)
