"""A run that takes more memory than the GPU has, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.outcomes import MakeJob, assert_ended, run, statuses

pytestmark = pytest.mark.gpu

TOO_MUCH = "import torch; kept = [torch.empty(2**34, dtype=torch.uint8, device='cuda') for _ in range(1000)]"


def test_out_of_gpu_memory_has_a_code_of_its_own(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, TOO_MUCH, "print('after')"), quiet)
    assert_ended(outcome, "out of GPU memory", 32)
    assert statuses(outcome)[-2:] == ["failed", "not run"]


def test_host_memory_that_cannot_be_had_is_an_error_of_its_cell(tmp_path: Path, make_job: MakeJob, quiet: Any) -> None:
    outcome = run(tmp_path, make_job(tmp_path, "import torch; torch.empty(2**60, dtype=torch.uint8)"), quiet)
    assert_ended(outcome, "failed", 10)
