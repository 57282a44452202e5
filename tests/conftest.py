"""What tests of several parts share."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning OpenMP threads starve busy cores

from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run on CPU tensors


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's background job: processes of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct's directory, fetched into the user's cache on first use. Mark such tests `model`."""
    from p99lab.engine import model_store

    return model_store.fetch("smollm2-135m")
