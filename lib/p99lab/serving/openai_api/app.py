"""The application: paths, the key at the door, and every error in the API's shape."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from p99lab.errors import P99labError
from p99lab.serving.openai_api import chat, completions
from p99lab.serving.openai_api.answers import GenerationResponse, Job, Json
from p99lab.serving.openai_api.errors import ApiError, api_error, shutting_down
from p99lab.serving.openai_api.fields import Body, parse_body
from p99lab.serving.openai_api.service import Service
from p99lab.serving.options import OWNER

MAX_BODY_BYTES = 32 << 20  # 128K-token prompts as ids, 32 of them
HEALTH = "/health"
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it


def make_app(service: Service) -> FastAPI:
    """The ASGI application of one service.

    `GET /health` · `GET /metrics` · `GET /v1/models[/ID]` · `POST /v1/completions` · `POST /v1/chat/completions`.
    With a key, everything but `/health` asks for it. Where the service is one of several gateways, the first two say
    which, and end the connection, so that whoever asks again may reach another.
    """
    which: Json = {} if service.gateway is None else {"gateway": service.gateway}
    headers = {"connection": "close"} if which else None
    app = FastAPI(title="p99lab", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, service=service)
    for kind in (ApiError, P99labError, HTTPException, RequestValidationError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _error_handler(service))

    async def health(request: Request) -> Response:
        problem = "the server is shutting down" if service.draining else service.engine.failure
        return _json({"status": str(problem or "ok"), **which}, 503 if problem else 200, headers)

    async def metrics(request: Request) -> Response:
        text = await asyncio.to_thread(service.metrics.render)  # it asks the engine, which may be elsewhere
        return Response(text, media_type=CONTENT_TYPE_LATEST, headers=headers)

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        service.require_model(request.path_params["model"])
        return _json(_model(service))

    app.add_api_route(HEALTH, health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
    app.add_api_route("/v1/models", models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", model, methods=["GET"])
    app.add_api_route(completions.PATH, _answering(service, completions.prepare), methods=["POST"])
    app.add_api_route(chat.PATH, _answering(service, chat.prepare), methods=["POST"])
    return app


def _answering(
    service: Service, prepare: Callable[[Service, Body, float], Awaitable[Job]]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        body = await _read(request)
        arrival_s = service.engine.clock()
        return GenerationResponse(await prepare(service, parse_body(body), arrival_s))

    return answer


async def _read(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413, longer than MAX_BODY_BYTES; the rest is not read.
    """
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            problem = f"the body is longer than {MAX_BODY_BYTES >> 20} MiB"
            raise ApiError(413, problem, code="body_too_large", headers={"connection": "close"})
        parts.append(part)
    return b"".join(parts)


def _error_handler(service: Service) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Answers requests that have failed, and counts them."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            _count(service, request.url.path, "hung_up")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        problem = api_error(error)
        _count(service, request.url.path, _outcome(problem.status))
        return problem.response()

    return handle


def _outcome(status: int) -> str:
    named = {401: "no_key", 429: "queue_full", 503: "unavailable"}
    return named.get(status, "bad_request" if status < 500 else "failed")


def _count(service: Service, path: str, outcome: str) -> None:
    service.metrics.count(path if path in (completions.PATH, chat.PATH) else "other", outcome)


def _model(service: Service) -> Json:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": OWNER,
        "max_model_len": service.context_len,
    }


def _json(value: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


class Gate:
    """Before everything else: asks for the key, turns requests away in a shutdown, and knows how many are inside."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == HEALTH:
            await self._app(scope, receive, send)
            return
        problem = self._problem(scope)
        if problem is not None:
            _count(self._service, scope["path"], _outcome(problem.status))
            await problem.response()(scope, receive, send)
            return
        with self._service.in_flight():
            await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        if not self._has_key(scope):
            problem = "this server needs its API key, as 'Authorization: Bearer …'"
            challenge = {"www-authenticate": "Bearer"}
            return ApiError(401, problem, kind="authentication_error", code="invalid_api_key", headers=challenge)
        return shutting_down() if self._service.draining and scope["method"] == "POST" else None

    def _has_key(self, scope: Scope) -> bool:
        """Compared in constant time, whatever was sent."""
        key = self._service.api_key
        if key is None:
            return True
        scheme, _, sent = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(sent.strip(), key.encode()) and scheme.lower() == b"bearer"
