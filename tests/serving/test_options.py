"""What a server is started with: checked before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from p99lab.errors import BadParameterError
from p99lab.serving.options import Ready, ServeOptions

pytestmark = pytest.mark.light


def test_the_engine_is_configured_as_asked() -> None:
    options = ServeOptions(model="m", max_num_seqs=3, num_pages=9, max_num_waiting=5, prefix_cache=False)
    config = options.engine_config
    assert (config.model.name, config.cache.num_pages, config.cache.prefix_cache) == ("m", 9, False)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_waiting) == (3, 5)
    assert (options.host, options.name) == ("127.0.0.1", "m")


def test_the_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P99LAB_TEST_KEY", "k")
    options = ServeOptions(api_key_env="P99LAB_TEST_KEY")
    assert options.read_api_key() == "k"
    assert "'k'" not in repr(options)
    assert ServeOptions().read_api_key() is None
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("P99LAB_TEST_KEY")
        else:
            monkeypatch.setenv("P99LAB_TEST_KEY", value)
        with pytest.raises(BadParameterError, match="'P99LAB_TEST_KEY' holds no API key"):
            options.read_api_key()


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(BadParameterError, match="port: "):
        ServeOptions(port=70_000)
    with pytest.raises(BadParameterError, match="composition: "):
        ServeOptions.parse({"composition": "whole"})


def test_a_missing_extra_is_named() -> None:
    program = (
        "import sys\nsys.modules['grpc'] = None\nsys.argv = ['p99lab', 'serve']\nfrom p99lab.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "p99lab serve needs grpc: install the extra 'serve'" in done.stderr


def test_the_ready_line() -> None:
    line = str(Ready("smollm2-135m", "http://127.0.0.1:8000/v1", is_exposed=False))
    assert line == "serving smollm2-135m at http://127.0.0.1:8000/v1"
