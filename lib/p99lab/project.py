"""Where the project's own files lie: in a checkout, or inside an installed wheel. Imports nothing but the errors."""

from __future__ import annotations

import os
from pathlib import Path

from p99lab.errors import BadParameterError

ROOT_VARIABLE = "P99LAB_ROOT"


def root() -> Path:
    """The directory that holds `params/` and `notebooks/`.

    `$P99LAB_ROOT` where it is set, else the checkout this package runs from, else the copy inside the wheel.

    Raises:
        BadParameterError: `$P99LAB_ROOT` names a directory without `params/`.
    """
    package = Path(__file__).resolve().parent
    chosen = os.environ.get(ROOT_VARIABLE)
    if chosen:
        if not _is_root(Path(chosen)):
            raise BadParameterError(f"{ROOT_VARIABLE}={chosen} holds no params/ directory")
        return Path(chosen).resolve()
    checkout = package.parent.parent
    return checkout if _is_root(checkout) and (checkout / "pyproject.toml").is_file() else package / "_project"


def params_dir() -> Path:
    """Parameters, claims and model geometries."""
    return root() / "params"


def notebooks_dir() -> Path:
    """The notebooks, without outputs."""
    return root() / "notebooks"


def outputs_dir() -> Path:
    """Where runs are written: beside a checkout's notebooks, or under the working directory of an installed p99lab."""
    return (root() if (root() / "pyproject.toml").is_file() else Path.cwd()) / "outputs"


def _is_root(directory: Path) -> bool:
    return (directory / "params").is_dir()
