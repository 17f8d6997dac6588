"""The endpoint: reads what decides where a request goes and leaves the choice to Ray Serve's router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.call import Call

# What has its state in one server (files, batches, adapters loaded at run time, metrics) is not over replicas.
_POST = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize", "/detokenize"})
_GET = frozenset({"/health", "/v1/models", "/version"})
_BODY_BYTES = 64 << 20
ENGINES = "engines"  # the deployment of replicas


def asgi() -> FastAPI:
    """For Serve, in the process of the ingress deployment: any path that every replica answers alike."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    application = serve.get_replica_context().app_name
    engines = serve.get_deployment_handle(ENGINES, app_name=application).options(stream=True)

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(request: Request) -> Response:
        path = request.url.path
        if path not in (_POST if request.method == "POST" else _GET):
            return _error(501, f"{request.method} {path} is not served over replicas (docs/scale-out.md)")
        if int(request.headers.get("content-length") or 0) > _BODY_BYTES:
            return _error(413, f"the body is longer than {_BODY_BYTES} bytes")
        query = f"?{request.url.query}" if request.url.query else ""
        call = Call.of(request.method, path + query, request.headers.items(), await request.body())
        parts = engines.remote(call)
        try:
            status, headers = await anext(parts)
        except (RayError, RayServeException) as error:
            return _error(503, f"no replica answered: {type(error).__name__}; ask again")
        return StreamingResponse(_rest(parts, dict(headers)), status_code=status, headers=dict(headers))

    return app


async def _rest(parts: Any, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body. A replica that dies in the middle ends a stream with an error event, as a server alone does, and any
    other answer by closing the connection."""
    named = {name.lower(): value for name, value in headers.items()}
    try:
        async for part in parts:
            yield part
    except (RayError, RayServeException):
        if not named.get("content-type", "").startswith("text/event-stream"):
            raise
        yield b"data: " + _error(503, "the replica ended; ask again").body + b"\n\n"
    finally:
        parts.cancel()  # a client that hung up; nothing where it has ended


def _error(status: int, message: str) -> Response:
    error = {"message": message, "type": "server_error", "param": None, "code": "not_available"}
    return Response(json.dumps({"error": error}), status, media_type="application/json")
