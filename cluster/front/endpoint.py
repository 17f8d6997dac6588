"""The endpoint's replicas: leaves the choice of one to Ray Serve's router."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from api.errors import ApiError
from api.http.wire import json_response
from cluster.call import DIED, Call
from cluster.front.gateway import application, config_of, error_event
from cluster.replicas.adapters import changes_adapters
from cluster.replicas.metrics import merged

_MOST_TRIES = 8  # of a request that replicas refuse for now
_FRESH_S = 1.0  # so old may be what a front knows of adapters that another front's clients changed
ENGINES, DIRECTORY = "engines", "directory"  # deployments


def asgi(settings: dict[str, Any]) -> Callable[[], ASGIApp]:
    """For Serve, which calls it in the process of the ingress deployment. `settings`: of each replica's server."""

    def build() -> ASGIApp:
        return application(RayReplicas(), config_of(settings))

    return build


class RayReplicas:
    """`Replicas` of `application`, over Ray Serve."""

    def __init__(self) -> None:
        application = serve.get_replica_context().app_name
        self._engines = serve.get_deployment_handle(ENGINES, app_name=application).options(stream=True)
        self._directory = serve.get_deployment_handle(DIRECTORY, app_name=application)
        self._change, self._asked_s = 0, -_FRESH_S

    async def forward(self, call: Call) -> Response:
        """The first replica's answer that is not a refusal for now; if all refuse, the last one's. One replica more is
        asked if the first one's server ended before it answered."""
        changes = changes_adapters(call)
        with _answered():
            call = replace(call, catalogue=await self._newest())
            while True:
                parts = self._engines.remote(call)
                status, headers = await anext(parts)
                named = dict(headers)
                replica = named["x-ktserve-replica"]
                died = named.pop(DIED, None) is not None and not changes and not call.tried
                if not (status == 429 or died) or replica in call.tried or len(call.tried) + 1 >= _MOST_TRIES:
                    break
                parts.cancel()
                call = replace(call, tried=(*call.tried, replica))
            if changes:
                self._asked_s = -_FRESH_S  # whoever was told of a change meets it
                body = b"".join([part async for part in parts])
                return Response(body, status, headers=named)
        return StreamingResponse(_rest(parts, named, call.path), status_code=status, headers=named)

    async def admit(self, call: Call) -> None:
        """A replica says, by its list of models, whether it knows the key."""
        with _answered():
            parts = self._engines.remote(Call("GET", "/v1/models", call.headers, b"", key=call.key))
            status, _ = await anext(parts)
            if status == 200:
                parts.cancel()
                return
            body = b"".join([part async for part in parts])
        error = json.loads(body)["error"]
        raise ApiError(status, error["message"], code=error["code"])

    async def health(self) -> Response:
        """200 while at least one replica is ready."""
        with _answered():
            states = Counter(report.status for report in (await self._directory.reports.remote()).values())
        ready = states["ready"] > 0
        body = {"status": "ready" if ready else "starting", "replicas": dict(states)}
        return json_response(body, 200 if ready else 503)

    async def metrics(self, call: Call) -> Response:
        """Those of all replicas, for whom one replica would tell its own."""
        with _answered():
            parts = self._engines.remote(call)
            status, headers = await anext(parts)
            if status != 200:
                named = dict(headers)
                return StreamingResponse(_rest(parts, named, call.path), status_code=status, headers=named)
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


@contextmanager
def _answered() -> Iterator[None]:
    """Ray's errors as an ApiError 503."""
    try:
        yield
    except (RayError, RayServeException) as error:
        message = f"no replica answered: {type(error).__name__}; ask again"
        raise ApiError(503, message, code="not_available", retry_after_s=1.0) from error


async def _rest(parts: Any, headers: dict[str, str], path: str) -> AsyncIterator[bytes]:
    """The body. A replica that dies in the middle ends a stream with an error event, as a server alone does, and any
    other answer by closing the connection."""
    kind = next((value for name, value in headers.items() if name.lower() == "content-type"), "")
    try:
        async for part in parts:
            yield part
    except (RayError, RayServeException):
        last = error_event(ApiError(503, "the replica ended; ask again", code="not_available"), path, kind)
        if last is None:
            raise
        yield last
    finally:
        parts.cancel()  # a client that hung up; nothing where it has ended
