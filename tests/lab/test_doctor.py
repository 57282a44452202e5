from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from p99lab.cli import app
from p99lab.errors import ModelError
from p99lab.lab import doctor
from p99lab.lab.doctor import Finding
from p99lab.lab.parameters import CONTRACTS
from p99lab.observe import hardware
from p99lab.observe.hardware import Capability

pytestmark = pytest.mark.light


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every package is installed and nothing else runs; its timers are not waited for."""
    monkeypatch.setattr(doctor, "missing_packages", lambda _: [])
    monkeypatch.setattr(doctor, "prepare", lambda *_: SimpleNamespace(parameters=SimpleNamespace(model="m")))
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval: SimpleNamespace(idle=99.0, iowait=0.5, steal=0.0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**35, total=2**35))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**36))
    monkeypatch.setattr(hardware, "capabilities", lambda: [Capability("GPU", False, "no driver", "an NVIDIA GPU")])

    async def prompt() -> Any:
        return np.full(400, 1e-4)

    monkeypatch.setattr(doctor, "sleep_lateness", prompt)


def by_name(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def examined(tmp_path: Path) -> dict[str, Finding]:
    return by_name(doctor.examine(tmp_path))


def test_every_line_has_its_evidence_and_everything_missing_its_remedy(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path)
    assert len({(finding.area, finding.name) for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.found
        assert finding.is_ok or finding.takes, finding.name
    assert set(CONTRACTS) <= by_name(findings).keys()
    assert {"Python", "loopback", "timers", "clock", "other load", "GPU", "cgroup limits"} <= by_name(findings).keys()


@pytest.mark.usefixtures("quiet")
def test_a_quiet_machine_lacks_only_the_gpu(tmp_path: Path) -> None:
    missing = {name for name, finding in examined(tmp_path).items() if not finding.is_ok}
    assert missing <= {"GPU", "model smollm2-135m", "CPU frequency", "CPU quota"}
    assert not any(finding.hinders for finding in doctor.examine(tmp_path))


@pytest.mark.usefixtures("quiet")
def test_what_is_missing_is_said_with_what_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda interval: SimpleNamespace(idle=40.0, steal=7.0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30, total=2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    async def late() -> Any:
        return np.full(400, 0.02)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(doctor, "sleep_lateness", late)
    monkeypatch.setattr(socket, "create_server", refused)
    found = examined(tmp_path)
    for name, part in {
        "other load": "60% of all CPUs busy, 7.0% stolen",
        "memory": "1.0 GiB available",
        "disk for runs": "0.0 GiB free",
        "CPUs": "1 usable",
        "timers": "P99 20.00 [20.00, 20.00]",
        "loopback": "Operation not permitted",
    }.items():
        assert part in found[name].found
        assert found[name].hinders
        assert found[name].takes


@pytest.mark.usefixtures("quiet")
def test_a_quota_and_a_governor_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    governor = tmp_path / "governor"
    governor.write_text("powersave\n")
    monkeypatch.setattr(doctor, "GOVERNOR", governor)
    cpu = {**hardware.fingerprint()["cpu"], "quota_cpus": 1.5}
    monkeypatch.setattr(hardware, "fingerprint", lambda: {"cpu": cpu})
    found = examined(tmp_path)
    assert (found["CPU frequency"].found, found["CPU frequency"].is_ok) == ("governor powersave", False)
    assert "1.5 CPUs" in found["CPU quota"].found
    governor.write_text("performance\n")
    assert examined(tmp_path)["CPU frequency"].is_ok


@pytest.mark.usefixtures("quiet")
def test_a_notebook_says_which_tiers_run_and_what_the_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(notebook: str, tier: str) -> SimpleNamespace:
        if notebook.startswith("01"):
            raise ModelError("model 'm' is not on this machine: p99lab models fetch m")
        return SimpleNamespace(parameters=SimpleNamespace())

    monkeypatch.setattr(doctor, "prepare", prepare)
    found = examined(tmp_path)
    environment, headline = found["00_environment"], found["01_headline_p99"]
    assert (environment.is_ok, environment.found) == (True, "laptop, smoke can run")
    assert environment.takes == "h200: an NVIDIA GPU"
    assert (headline.hinders, headline.found) == (True, "no tier can run")
    assert "laptop, smoke: model 'm' is not on this machine: p99lab models fetch m" in headline.takes
    monkeypatch.setattr(hardware, "capabilities", lambda: [Capability("GPU", True, "1× H200")])
    assert examined(tmp_path)["00_environment"].found == "h200, laptop, smoke can run"


@pytest.mark.usefixtures("quiet")
def test_a_missing_extra_is_named_with_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"engine": ["torch", "gguf"], "serve": ["fastapi"]}
    monkeypatch.setattr(doctor, "missing_packages", lambda extra: absent.get(extra, []))
    found = examined(tmp_path)
    assert found["extra 'serve'"].takes == "pip install '.[serve]' in the checkout"
    assert "missing torch, gguf" in found["extra 'engine'"].found
    assert "smoke: pip install '.[engine]' in the checkout" in found["01_headline_p99"].takes


def test_packages_of_an_extra_are_read_from_the_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = ['pytest>=8; extra == "dev"', "no-such-package<3,>=2; extra == 'dev'", "gone", 'also.gone; extra == "lab"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: stated)
    assert doctor.missing_packages("dev") == ["no-such-package"]
    assert doctor.missing_packages("lab") == ["also.gone"]


def test_timers_are_measured() -> None:
    late_s = asyncio.run(doctor.sleep_lateness(num_sleeps=5, sleep_s=0.002))
    assert late_s.shape == (5,)
    assert np.all(late_s > -0.002)
    assert np.all(late_s < 10)


@pytest.mark.usefixtures("quiet")
def test_strict_fails_only_for_what_hinders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["doctor", "--outputs", str(tmp_path)]
    assert CliRunner().invoke(app, [*arguments, "--strict"]).exit_code == 0
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20, total=2**35))
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--strict"]).exit_code == 1
    (memory,) = (
        row for row in json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout) if row["name"] == "memory"
    )
    assert (memory["is_ok"], memory["is_needed"]) == (False, True)


def test_the_page_shows_every_line_and_markup_is_escaped() -> None:
    findings = [Finding("a", "[red]x", True, "fine"), Finding("b", "y", False, "not there", "a [b]", True)]
    console = Console(width=100)
    with console.capture() as captured:
        console.print(doctor.page(findings))
    text = captured.get()
    assert all(part in text for part in ("[red]x", "fine", "missing", "a [b]", "1 ok, 1 missing; 1 of them"))
    assert " ".join(text.split()).endswith("a run here: y")
