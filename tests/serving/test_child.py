"""Children that do not outlive their parent, and a server that does not come up."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from p99lab.serving import child
from p99lab.serving.process import ServerProcessError, server_process

pytestmark = pytest.mark.light


def test_a_child_is_the_module_with_its_arguments() -> None:
    command = child.command("json.tool", ["--compact"])
    done = subprocess.run(command, input='{"a": 1}', capture_output=True, text=True, check=True)
    assert done.stdout == '{"a":1}\n'


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_a_child_ends_when_its_parent_is_killed() -> None:
    program = (
        "import subprocess, sys, time\n"
        "from p99lab.serving import child\n"
        "process = subprocess.Popen(child.command('http.server', ['--bind', '127.0.0.1', '0']))\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stderr is not None
    pid = int(parent.stdout.readline())
    while "http.server" not in psutil.Process(pid).cmdline() or not psutil.Process(pid).net_connections():
        time.sleep(0.02)  # until it is what it becomes
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.stdout.close()
    parent.stderr.close()


def test_a_server_that_does_not_come_up_says_why() -> None:
    before = set(psutil.Process(os.getpid()).children(recursive=True))
    with (
        pytest.raises(ServerProcessError, match=r"^no server after \d+ s: composition: .*'whole'"),
        server_process(["--composition", "whole"]),
    ):
        pytest.fail("it must not come up")
    assert set(psutil.Process(os.getpid()).children(recursive=True)) == before


def test_importing_it_needs_no_extra() -> None:
    program = "import sys, p99lab.serving.process; sys.exit(bool({'torch', 'fastapi', 'uvicorn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
