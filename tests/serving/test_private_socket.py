"""A socket for this user's processes: who reaches it, and what is left of it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from p99lab.serving import private_socket

pytestmark = pytest.mark.light
LONG_AGO_S = 1_000_000_000
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs handles in /proc")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made; for processes too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        yield server


def bind(server: socket.socket, path: Path) -> None:
    server.bind(str(path))
    server.listen()


@needs_linux
def test_another_process_reaches_it_though_it_has_no_name(folder: Path, server: socket.socket) -> None:
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with private_socket.listening(lambda path: bind(server, path)) as path:
        assert list(folder.iterdir()) == []
        subprocess.run([sys.executable, "-c", code, str(path)], check=True)
        server.accept()[0].close()
    assert not path.exists()


@needs_linux
def test_nothing_is_left_of_one_whose_process_is_killed(folder: Path) -> None:
    code = (
        "import os, signal, socket\n"
        "from p99lab.serving import private_socket\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        "with private_socket.listening(lambda path: (server.bind(str(path)), server.listen())):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert list(folder.iterdir()) == []


def test_a_handle_counts_only_if_another_process_connects_by_it(folder: Path) -> None:
    nobody = folder / "nobody.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(nobody))
        assert not private_socket._is_reached_by_others(nobody)
        server.listen()
        assert private_socket._is_reached_by_others(nobody)
    nobody.unlink()


def test_a_long_path_for_temporary_files_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / ("long" * 25)))
    found: list[Path] = []
    monkeypatch.setattr(private_socket, "_is_reached_by_others", lambda path: False)
    with private_socket.listening(lambda path: (found.append(path), path.touch())):
        assert {len(str(path)) for path in found} == {len("/tmp/p99lab-12345678/engine.sock")}
    assert not any(path.exists() for path in found)


def test_one_that_needs_a_name_has_it_where_only_this_user_may_enter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_socket, "_is_reached_by_others", lambda path: False)
    servers: list[socket.socket] = []

    def listen(path: Path) -> None:
        servers.append(socket.socket(socket.AF_UNIX))
        bind(servers[-1], path)

    with private_socket.listening(listen) as path, socket.socket(socket.AF_UNIX) as client:
        assert path.parent.parent == folder
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        client.connect(str(path))
    for server in servers:
        server.close()
    assert list(folder.iterdir()) == []


def test_what_a_killed_process_left_is_cleared_away_and_nothing_else(folder: Path, server: socket.socket) -> None:
    for name in ("p99lab-dead", "p99lab-young", "p99lab-live", "p99lab-other"):
        (folder / name).mkdir()
    for name in ("p99lab-dead", "p99lab-young"):
        with socket.socket(socket.AF_UNIX) as dead:
            bind(dead, folder / name / "engine.sock")
    bind(server, folder / "p99lab-live" / "engine.sock")
    (folder / "p99lab-other" / "notes.txt").write_text("mine")
    for name in ("p99lab-dead", "p99lab-live"):
        os.utime(folder / name / "engine.sock", (LONG_AGO_S, LONG_AGO_S))
    with (
        socket.socket(socket.AF_UNIX) as own,
        private_socket.listening(lambda path: bind(own, path)),
    ):
        left = {path.name for path in folder.iterdir()}
    assert left >= {"p99lab-young", "p99lab-live", "p99lab-other"}
    assert "p99lab-dead" not in left
