"""What a gateway is started with, and the line that it writes once it is up or has failed."""

from __future__ import annotations

from pydantic import Field

from p99lab.strict import StrictModel

READY = "ready"
FAILED = "failed: "


class GatewayConfig(StrictModel):
    """`address`: of the engine's socket. `listening_fd`: an inherited socket on which clients are accepted. `gateway`:
    this one's number from 1, where several share that socket.

    It goes through a pipe: the key is on no command line and in no environment.
    """

    address: str
    listening_fd: int = Field(ge=0)
    model: str
    drain_timeout_s: float = Field(ge=0)
    api_key: str | None = None
    gateway: int | None = Field(None, ge=1)
