"""The endpoint: reads what decides where a request goes and leaves the choice to Ray Serve's router."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.adapters import LOAD, UNLOAD
from cluster.call import Call
from cluster.exposition import merged

# What has its state in one server (files, batches, stored responses, the page) is not over replicas.
_POST = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize", "/detokenize", LOAD, UNLOAD})
_GET = frozenset({"/health", "/metrics", "/v1/models", "/version"})
_BODY_BYTES = 64 << 20
_MOST_TRIES = 8  # of a request that replicas refuse for now
_FRESH_S = 1.0  # so old may be what a front knows of adapters that another front's clients changed
ENGINES, DIRECTORY = "engines", "directory"  # deployments


def asgi() -> FastAPI:
    """For Serve, in the process of the ingress deployment: any path that every replica answers alike."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    front = Front()

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def answer(request: Request) -> Response:
        path = request.url.path
        if path not in (_POST if request.method == "POST" else _GET):
            return _error(501, f"{request.method} {path} is not served over replicas (docs/scale-out.md)")
        if int(request.headers.get("content-length") or 0) > _BODY_BYTES:
            return _error(413, f"the body is longer than {_BODY_BYTES} bytes")
        query = f"?{request.url.query}" if request.url.query else ""
        call = Call.of(request.method, path + query, request.headers.items(), await request.body())
        try:
            if path == "/health":
                return await front.health()
            if path == "/metrics":
                return await front.metrics(call)
            return await front.forward(call)
        except (RayError, RayServeException) as error:
            return _error(503, f"no replica answered: {type(error).__name__}; ask again")

    return app


class Front:
    """Answers for the whole application, by its replicas."""

    def __init__(self) -> None:
        application = serve.get_replica_context().app_name
        self._engines = serve.get_deployment_handle(ENGINES, app_name=application).options(stream=True)
        self._directory = serve.get_deployment_handle(DIRECTORY, app_name=application)
        self._change, self._asked_s = 0, -_FRESH_S

    async def forward(self, call: Call) -> Response:
        """The first replica's answer that is not a refusal for now; if all refuse, the last one's."""
        changes = call.path in (LOAD, UNLOAD)
        call = replace(call, catalogue=await self._newest())
        while True:
            parts = self._engines.remote(call)
            status, headers = await anext(parts)
            named = dict(headers)
            replica = named["x-ktserve-replica"]
            if status != 429 or replica in call.tried or len(call.tried) + 1 >= _MOST_TRIES:
                break
            parts.cancel()
            call = replace(call, tried=(*call.tried, replica))
        if changes:
            self._asked_s = -_FRESH_S  # whoever was told of a change meets it
            body = b"".join([part async for part in parts])
            return Response(body, status, headers=named)
        return StreamingResponse(_rest(parts, named), status_code=status, headers=named)

    async def health(self) -> Response:
        """200 while at least one replica is ready."""
        states = Counter(report.status for report in (await self._directory.reports.remote()).values())
        ready = states["ready"] > 0
        body = {"status": "ready" if ready else "starting", "replicas": dict(states)}
        return Response(json.dumps(body), 200 if ready else 503, media_type="application/json")

    async def metrics(self, call: Call) -> Response:
        """Those of all replicas, for whom one replica would tell its own."""
        parts = self._engines.remote(call)
        status, headers = await anext(parts)
        if status != 200:
            return StreamingResponse(_rest(parts, dict(headers)), status_code=status, headers=dict(headers))
        parts.cancel()
        reports = await self._directory.reports.remote()
        page = merged({replica: report.metrics for replica, report in reports.items()})
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _newest(self) -> int:
        """The number of the last change of adapters."""
        if time.monotonic() - self._asked_s >= _FRESH_S:
            self._change = await self._directory.number.remote()
            self._asked_s = time.monotonic()
        return self._change


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
