"""Refusals and failures in the shape that clients of the OpenAI API expect."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from p99lab.errors import BadParameterError, EngineClosedError, EngineFailedError, P99labError, QueueFullError

RETRY_AFTER_S = 1
MAX_MESSAGE_LEN = 500  # a wrong value is quoted, and may be a whole document


class ApiError(Exception):
    """What a client is told, with the HTTP status of it.

    `kind` is the body's `type`, `param` the field at fault, `code` a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE_LEN else f"{message[: MAX_MESSAGE_LEN - 1]}…"
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def shutting_down() -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
    return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down", headers=headers)


def api_error(error: Exception) -> ApiError:
    """What a client is told of any error; of one nobody foresaw, only that it happened."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"retry-after": str(RETRY_AFTER_S)}
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
        case EngineFailedError():
            return ApiError(500, str(error), kind="server_error", code="engine_failed")
        case EngineClosedError():
            return ApiError(503, str(error), kind="server_error", code="engine_closed")
        case BadParameterError():
            return ApiError(400, str(error))
        case HTTPException(status_code=404):
            return ApiError(404, "there is nothing at this path", code="unknown_url")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
        case RequestValidationError():
            return ApiError(400, " · ".join(str(problem.get("msg")) for problem in error.errors()))
        case P99labError():
            return ApiError(500, str(error), kind="server_error")
    return ApiError(500, "the server has failed at this request", kind="server_error", code="internal_error")
