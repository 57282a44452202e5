"""vLLM as a peer: how it is started, how it fails, and that nothing of it is left. A stand-in answers for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pytest

from p99lab.errors import BadParameterError
from p99lab.lab.vllm_server import FLAGS, MODEL, PeerError, VllmSpec, spec_of, vllm_server
from tests.lab.fake_vllm import BROKEN, SERVER, make_model, make_site


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of servers that do not start stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_it_serves_until_it_is_left(tmp_path: Path, model: Path) -> None:
    before = set(psutil.Process().children())
    with vllm_server(VllmSpec(make_site(tmp_path / "site"), model), 30.0) as url:
        (log,) = tmp_path.glob("p99lab-vllm-*.log")
        (listed,) = httpx.get(f"{url}/models", trust_env=False).json()["data"]
        started = set(psutil.Process().children()) - before
    assert listed["id"] == MODEL
    assert not log.exists()
    assert len(started) == 2  # the server, and what ends it should this process be killed
    assert not any(process.is_running() for process in started)


def test_it_takes_its_group_along(tmp_path: Path, model: Path) -> None:
    forking = "import os, sys, time\nif os.fork() == 0:\n    print('child', os.getpid(), flush=True)\ntime.sleep(60)\n"
    starting = vllm_server(VllmSpec(make_site(tmp_path / "site", forking), model), 1.0)
    with pytest.raises(PeerError, match=r"vLLM does not answer after 1 s: child \d+ ") as caught, starting:
        pass
    child = int(str(caught.value).partition(" (log: ")[0].split()[-1])
    until_s = time.monotonic() + 5.0
    while psutil.pid_exists(child) and time.monotonic() < until_s:  # its new parent has to bury it
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
                break
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_says_why_in_a_line(tmp_path: Path, model: Path) -> None:
    starting = vllm_server(VllmSpec(make_site(tmp_path / "site", BROKEN), model), 30.0)
    reason = r"^vLLM ended with exit code 1: ImportError: no kernels for this GPU \(log: "
    with pytest.raises(PeerError, match=reason) as caught, starting:
        pass
    log = tmp_path / str(caught.value).removesuffix(")").partition("(log: ")[2]
    assert "no kernels for this GPU" in log.read_text()  # it stays for whoever wants to read all of it


DEAD = """
import time
print("(APIServer pid=6) WARNING 11-30 03:24:49 [system_utils.py:299] errors like `OSError: Too many open files`")
print("(EngineCore pid=7) ERROR 11-30 03:25:02 [core.py:1330] EngineCore failed to start.")
print("(EngineCore pid=7) ERROR 11-30 03:25:02 [core.py:1330] torch.OutOfMemoryError: CUDA out of memory.")
print("(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
time.sleep(60)
"""


def test_an_engine_that_dies_behind_a_living_server_is_not_waited_for(tmp_path: Path, model: Path) -> None:
    log = tmp_path / "vllm.log"
    starting = vllm_server(VllmSpec(make_site(tmp_path / "site", DEAD), model), 30.0, log)
    with pytest.raises(PeerError) as caught, starting:
        pass
    cause = "torch.OutOfMemoryError: CUDA out of memory."
    assert str(caught.value) == f"vLLM's engine did not start: {cause} (log: vllm.log)"
    assert "See root cause above" in log.read_text()


STARTER = """
import os, signal, sys
from pathlib import Path
from p99lab.lab.vllm_server import VllmSpec, vllm_server
site, model, log = map(Path, sys.argv[1:])
with vllm_server(VllmSpec(site, model), 30.0, log) as url:
    os.kill(os.getpid(), signal.SIGKILL)
"""
FORKING = """
import os, sys
if os.fork() == 0:
    os.execv("/bin/sleep", [sys.argv[2], "60"])  # named after the model's folder
"""


def test_its_engine_does_not_outlive_whoever_started_it(tmp_path: Path, model: Path) -> None:
    site = make_site(tmp_path / "site", FORKING + SERVER)
    command = [sys.executable, "-c", STARTER, str(site), str(model), str(tmp_path / "vllm.log")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    until_s = time.monotonic() + 10.0
    while (left := _named(str(tmp_path))) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not left


def _named(text: str) -> list[int]:
    """Processes whose command line holds a text, zombies apart."""
    found = psutil.process_iter(["pid", "cmdline", "status"])
    alive = (each.info for each in found if each.info["status"] != psutil.STATUS_ZOMBIE)
    return [info["pid"] for info in alive if any(text in part for part in info["cmdline"] or ())]


def test_its_process_sees_its_own_packages_alone(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    spec = VllmSpec(make_site(tmp_path / "site"), model)
    environment = spec.environment()
    assert environment["PYTHONPATH"] == str(tmp_path / "site")
    assert environment["PATH"].split(os.pathsep)[0] == str(tmp_path / "site" / "bin")
    assert "CUDA_MODULE_LOADING" not in environment
    assert environment["SPT_NOENV"] == "1"  # a run's processes are found by their environment
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    (tmp_path / "site" / "flashinfer").mkdir()
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in spec.environment()


def test_what_it_is_told(tmp_path: Path, model: Path) -> None:
    site = make_site(tmp_path / "site")
    best = spec_of(str(site), str(model), [])
    assert best is not None
    assert best.arguments == FLAGS
    assert best.version == "unknown"
    (site / "vllm-0.26.0.dist-info").mkdir()
    (site / "vllm-0.26.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    assert best.version == "0.26.0"
    command = best.command(8000)
    assert command[command.index("serve") + 1] == str(model)
    assert "--enable-prompt-tokens-details" in command
    other = spec_of(str(site), str(model), ["--enforce-eager"])
    assert other is not None
    assert other.arguments == ("--enforce-eager",)
    assert spec_of(None, str(model), []) is None


def test_folders_that_are_not_what_they_should_be(tmp_path: Path, model: Path) -> None:
    with pytest.raises(BadParameterError, match="no vLLM in"):
        VllmSpec(tmp_path, model)
    with pytest.raises(BadParameterError, match=r"no config\.json in"):
        VllmSpec(make_site(tmp_path / "site"), tmp_path)
