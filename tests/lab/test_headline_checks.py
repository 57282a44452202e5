"""What a run is refused for before a kernel starts: what its machine, or any machine, cannot do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p99lab.errors import BadParameterError
from p99lab.lab import headline_checks
from p99lab.lab.job import Job, check_here
from p99lab.lab.parameters import CONTRACTS, Headline01, load
from p99lab.observe import hardware
from tests.lab.fake_vllm import make_model, make_site


def headline(*overrides: str, tier: str = "smoke") -> Headline01:
    parameters = load(CONTRACTS["01_headline_p99"], tier, overrides)
    assert isinstance(parameters, Headline01)
    return parameters


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    site, model = make_site(tmp_path / "site"), make_model(tmp_path / "model")
    return f"vllm_site={site}", f"vllm_model={model}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["arms=[vLLM]"], "arms: vLLM needs vllm_site and vllm_model"),
        (["arms=[+tiers and warm-up]"], "arms: +tiers and warm-up is not built yet"),
        (
            ["arms=[+isolation and priority, vLLM]"],
            "arms: +isolation and priority is not built yet; vLLM needs vllm_site and vllm_model",
        ),
        (
            ["open_arms=[stock, +chunked]"],
            "open_arms: +chunked cannot get open loads, of this run's arms stock, +shared-prefix groups can",
        ),
        (["arms=[+chunked]", "open_arms=[stock]"], "stock cannot get open loads, of this run's arms none can"),
        (["threads=4"], "threads: 4 are more than the 3 CPUs that can be used here"),
        (["device=cuda"], "device=cuda needs an NVIDIA GPU, and there is none here"),
        (["vllm_site=/nonexistent", "vllm_model=/nonexistent"], "no vLLM in /nonexistent"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch, overrides: list[str], says: str) -> None:
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    with pytest.raises(BadParameterError) as caught:
        headline_checks.check(headline(*overrides))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_peer_alone_needs_a_transport(folders: tuple[str, str]) -> None:
    with pytest.raises(BadParameterError, match="arms: vLLM needs transport=http"):
        headline_checks.check(headline("arms=[vLLM]", *folders))


@pytest.mark.parametrize(
    "overrides", [[], ["arms=[stock, vLLM, +tiers and warm-up]"], ["open_arms=[]"], ["threads=3"], ["arms=[+chunked]"]]
)
def test_what_can_be_measured_in_part_is_not_refused(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    headline_checks.check(headline(*overrides))


def test_a_whole_run_with_its_peer_and_gpu_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[str, str]
) -> None:
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    headline_checks.check(headline(*folders, "open_arms=[vLLM, stock, +graphs and overlap]", tier="h200"))


def job(notebook: str, tier: str, *overrides: str) -> Job:
    contract = CONTRACTS[notebook]
    return Job(Path(), contract, tier, load(contract, tier, overrides))


@pytest.mark.parametrize(
    ("notebook", "tier", "overrides", "says"),
    [
        ("00_environment", "h200", (), "tier h200 of 00_environment needs an NVIDIA GPU"),
        ("01_headline_p99", "h200", (), "device=cuda needs an NVIDIA GPU"),
        ("99_ledger", "laptop", ("outputs=/nonexistent",), "outputs: /nonexistent is no directory of runs"),
    ],
)
def test_a_job_that_this_machine_cannot_do(
    monkeypatch: pytest.MonkeyPatch, notebook: str, tier: str, overrides: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)
    with pytest.raises(BadParameterError, match=says):
        check_here(job(notebook, tier, *overrides))


@pytest.mark.parametrize(("notebook", "tier"), [("00_environment", "laptop"), ("99_ledger", "h200")])
def test_a_job_that_takes_no_gpu(monkeypatch: pytest.MonkeyPatch, notebook: str, tier: str) -> None:
    monkeypatch.setattr(hardware, "has_gpu", lambda: False)
    check_here(job(notebook, tier))
