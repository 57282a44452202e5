"""The socket that a server listens on. It is bound before anything is loaded, and outlives no process that holds it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from p99lab.errors import BadParameterError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Port 0: any that is free.

    Raises:
        BadParameterError: no such host, or the address is in use or not to be had.
    """
    with contextlib.ExitStack() as undo:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError as error:
            raise BadParameterError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        undo.pop_all()
        return bound


def listen(bound: socket.socket) -> None:
    """
    Raises:
        BadParameterError: another process has begun to listen on the address meanwhile.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise BadParameterError(f"cannot listen on {_address(bound)}: {error.strerror}") from None


def url(bound: socket.socket) -> str:
    """Where clients of the API find it."""
    return f"http://{_address(bound)}/v1"


def is_loopback(bound: socket.socket) -> bool:
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
