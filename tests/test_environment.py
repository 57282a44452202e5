"""environment.yml and constraints.txt say nothing that pyproject.toml, the one list of dependencies, does not."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.light

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())
NOT_OURS = ("python", "pip")


def split(requirement: str) -> tuple[str, str]:
    """Normalised name and bound: `Seaborn>=0.13.2` is ("seaborn", ">=0.13.2")."""
    match = re.match(r"([A-Za-z0-9._-]+?)(?:\[.*\])?\s*((?:[<>=!~].*)?)$", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]


def stated() -> dict[str, str]:
    """Every dependency of the base and of all extras, with its bound."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return dict(split(requirement) for group in groups for requirement in group)


def conda_names() -> list[str]:
    return [entry for entry in CONDA["dependencies"] if isinstance(entry, str)]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(split(line) for line in lines if line and not line.startswith("#"))


def release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:4])


def test_channels_and_python() -> None:
    assert CONDA["channels"] == ["conda-forge", "nodefaults"]
    assert "python=3.12" in conda_names()


def test_conda_names_are_dependencies_with_the_same_bound() -> None:
    ours = [split(entry) for entry in conda_names() if split(entry)[0] not in NOT_OURS]
    assert {name for name, _ in ours} == {"jupyterlab", "papermill", "pandas", "seaborn", "nvidia-ml-py"}
    assert {name: bound for name, bound in ours if stated().get(name) != bound} == {}


def test_one_pip_line_with_extras_that_exist() -> None:
    (pip,) = (entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))
    (line,) = pip
    match = re.fullmatch(r"-e \.\[([a-z,]+)\]", line)
    assert match is not None
    assert set(match[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert {"torch", "flashinfer-python"} <= {
        split(requirement)[0]
        for extra in match[1].split(",")
        for requirement in PROJECT["optional-dependencies"][extra]
    }


@pytest.mark.parametrize("extra", [None, "engine", "lab", "serve", "dev"])
def test_what_make_installs_is_pinned_within_bounds(extra: str | None) -> None:
    pins = pinned()
    for requirement in PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]:
        name, bounds = split(requirement)
        assert name in pins, f"{name} has no line in constraints.txt"
        assert pins[name].startswith("==")
        assert "+" not in pins[name], f"{name}: a local version is not on every index"
        for bound in filter(None, bounds.partition(";")[0].split(",")):
            low = bound.startswith(">=")
            assert low or bound.startswith("<"), f"{requirement}: teach this test about {bound}"
            assert (release(pins[name]) >= release(bound)) is low, f"{requirement} against {pins[name]}"
