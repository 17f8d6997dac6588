"""The HTTP application of the endpoint over replicas: bounds and checks what a client sends as one server does, with
that server's own parts, and passes it on. Knows nothing of Ray."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from api.cli.options import convert
from api.config import ServeConfig
from api.endpoints.application import error_response
from api.errors import ApiError
from api.http.middleware import with_headers
from api.http.wire import Bodies, ClientGoneError
from cluster.call import Call
from cluster.front.ingress import ADMISSION, ADMITTED, REFUSED, bounds_header, is_large
from engine.errors import KtserveError
from ktserve.settings import settings_of

log = logging.getLogger("ktserve")
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_HERE = {"origin", "x-request-id", ADMISSION}  # headers that no replica gets as they are
_OF_ONE_SERVER = {  # what has its state in one server: the beginning of its paths, and why
    "/v1/files": "files are kept in one server",
    "/v1/batches": "batches are kept in one server",
    "/v1/live": "the live view is one server's",
    "/v1/plan": "the memory plan is one server's",
    "/v1/responses/": "responses are kept in one server",
}


class Replicas(Protocol):
    """Whoever passes calls on. ApiError 503 if there is nobody to answer."""

    async def forward(self, call: Call) -> Response: ...

    async def admit(self, call: Call) -> None:
        """Raises ApiError 401 if the caller has no key, before the call's body is read."""

    async def health(self) -> Response: ...

    async def metrics(self, call: Call) -> Response: ...


def config_of(settings: Mapping[str, Any]) -> ServeConfig:
    """What lines of the file of `ktserve serve --config` say of HTTP: bounds, origins, prefix. Raises UserError."""
    wanted = ("max_body_bytes", "body_timeout_s", "cors_origins", "root_path")
    known = {setting.name: setting for setting in settings_of(ServeConfig) if setting.name in wanted}
    given = {name.replace("-", "_"): value for name, value in settings.items()}
    return ServeConfig(**{name: convert(known[name], given[name], f"serve: {name}") for name in known if name in given})


def application(replicas: Replicas, config: ServeConfig) -> ASGIApp:
    """Any path is passed on but those of `_OF_ONE_SERVER`; what there is no endpoint for is a replica's to refuse."""
    bodies = Bodies(config.max_body_bytes, config.body_timeout_s)

    async def admission(request: Request) -> Response:
        """To Serve's proxy, before it reads a body."""
        try:
            _check_path(request.scope["path"])
            await replicas.admit(_call(request, b""))
        except KtserveError as error:
            refusal = error_response(error, request.scope["path"])
            refusal.headers[ADMISSION] = REFUSED
            return refusal
        return Response(
            status_code=204, headers={ADMISSION: bounds_header(config.max_body_bytes, config.body_timeout_s)}
        )

    async def answer(request: Request) -> Response:
        path = request.scope["path"]
        if request.method == "OPTIONS" and ADMISSION in request.headers:
            return await admission(request)
        _check_path(path)
        if path == "/health" and request.method == "GET":
            return await replicas.health()
        if request.method == "GET":
            call = _call(request, b"")
            return await (replicas.metrics(call) if path == "/metrics" else replicas.forward(call))
        if is_large(request.headers) and request.headers.get(ADMISSION) != ADMITTED:
            await replicas.admit(_call(request, b""))
        async with bodies.read(request) as body:
            call = _call(request, body)
            if call.continues:
                raise _of_one_server("previous_response_id", "responses are kept in one server", "previous_response_id")
            return await replicas.forward(call)

    async def on_purpose(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope["path"])

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def method(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return error_response(ApiError(status, f"{request.method}: not allowed"), request.scope["path"])

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
        return error_response(error, request.scope["path"])

    app = Starlette(
        routes=[Route("/{path:path}", answer, methods=_METHODS)],
        exception_handlers={
            KtserveError: on_purpose, ClientGoneError: gone, HTTPException: method, Exception: unexpected,
        },
    )  # fmt: skip
    return with_headers(app, config)


def _call(request: Request, body: bytes) -> Call:
    """With the id that the answer will have. The origin of a page stays here, where CORS is answered."""
    query = f"?{request.url.query}" if request.url.query else ""
    kept = [(name, value) for name, value in request.headers.items() if name not in _HERE]
    call = Call.of(request.method, request.scope["path"] + query, kept, body)
    return replace(call, headers=(*call.headers, ("x-request-id", request.state.request_id)))


def _check_path(path: str) -> None:
    """Raises ApiError 501."""
    for beginning, why in _OF_ONE_SERVER.items():
        if path == beginning or path.startswith(beginning.rstrip("/") + "/"):
            raise _of_one_server(path, why)


def _of_one_server(what: str, why: str, param: str | None = None) -> ApiError:
    message = f"{what}: {why}, so it is not served over replicas (docs/scale-out.md)"
    return ApiError(501, message, param=param, code="not_over_replicas")


def error_event(error: ApiError, path: str, kind: str) -> bytes | None:
    """What ends a stream of that content type in the form of the path's api; None: it is no stream."""
    body = bytes(error_response(error, path).body)
    if kind.startswith("application/x-ndjson"):
        return body + b"\n"
    if not kind.startswith("text/event-stream"):
        return None
    return (b"event: error\n" if path.startswith("/v1/messages") else b"") + b"data: " + body + b"\n\n"
