"""vLLM as a peer: how it is started, how it fails, and that nothing of it is left. A stand-in answers for it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import httpx
import psutil
import pytest

from p99lab.errors import BadParameterError
from p99lab.lab.vllm_server import BEST_FLAGS, MODEL, PeerError, VllmSpec, spec_of, vllm_server
from tests.lab.fake_vllm import BROKEN, make_model, make_site


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_it_serves_until_it_is_left(tmp_path: Path, model: Path) -> None:
    before = set(psutil.Process().children())
    with vllm_server(VllmSpec(make_site(tmp_path / "site"), model), 30.0) as url:
        (listed,) = httpx.get(f"{url}/models", trust_env=False).json()["data"]
        (server,) = set(psutil.Process().children()) - before
    assert listed["id"] == MODEL
    assert not server.is_running()


def test_it_takes_its_group_along(tmp_path: Path, model: Path) -> None:
    forking = "import os, sys, time\nif os.fork() == 0:\n    print('child', os.getpid(), flush=True)\ntime.sleep(60)\n"
    starting = vllm_server(VllmSpec(make_site(tmp_path / "site", forking), model), 1.0)
    with pytest.raises(PeerError, match=r"vLLM does not answer after 1 s: child \d+") as caught, starting:
        pass
    child = int(str(caught.value).split()[-1])
    until_s = time.monotonic() + 5.0
    while psutil.pid_exists(child) and time.monotonic() < until_s:  # its new parent has to bury it
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
                break
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_says_why_in_a_line(tmp_path: Path, model: Path) -> None:
    starting = vllm_server(VllmSpec(make_site(tmp_path / "site", BROKEN), model), 30.0)
    reason = r"^vLLM ended with exit code 1: ImportError: no kernels for this GPU$"
    with pytest.raises(PeerError, match=reason), starting:
        pass


def test_its_process_sees_its_own_packages_alone(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    spec = VllmSpec(make_site(tmp_path / "site"), model)
    environment = spec.environment()
    assert environment["PYTHONPATH"] == str(tmp_path / "site")
    assert environment["PATH"].split(os.pathsep)[0] == str(tmp_path / "site" / "bin")
    assert "CUDA_MODULE_LOADING" not in environment
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    (tmp_path / "site" / "flashinfer").mkdir()
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in spec.environment()


def test_what_it_is_told(tmp_path: Path, model: Path) -> None:
    site = make_site(tmp_path / "site")
    best = spec_of(str(site), str(model), [])
    assert best is not None
    assert best.arguments == BEST_FLAGS
    assert "--enable-prompt-tokens-details" in best.command(8000)
    other = spec_of(str(site), str(model), ["--enforce-eager"])
    assert other is not None
    assert other.arguments == ("--enforce-eager",)
    assert spec_of(None, str(model), []) is None


def test_folders_that_are_not_what_they_should_be(tmp_path: Path, model: Path) -> None:
    with pytest.raises(BadParameterError, match="no vLLM in"):
        VllmSpec(tmp_path, model)
    with pytest.raises(BadParameterError, match=r"no config\.json in"):
        VllmSpec(make_site(tmp_path / "site"), tmp_path)
