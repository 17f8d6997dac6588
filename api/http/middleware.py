"""What goes with every request and answer: who asks, the request's id, what is left of limits, notes about fields."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.batches.call import TENANT
from api.bodies.values import REQUEST_ID
from api.config import ServeConfig
from api.errors import ApiError
from api.logs import current_request
from api.prepare.job import Prepared
from api.tenants.keys import Keys, authorization_of
from api.tenants.limits import Limits
from api.tenants.record import Tenant
from api.tracing import current_trace

log = logging.getLogger("ktserve")
_MOST_NAMES = 256  # that are logged; clients choose names
_MOST_NOTED = 1000  # characters of the header
_LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"  # origins of pages of this machine
_SERVER = re.compile("https?://[^/]*", re.IGNORECASE)


class UnknownFields:
    """Logs each name of a field that nobody knows once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < _MOST_NAMES:
                self._logged.add(name)
                log.warning("requests carry the unknown field %a; it is ignored (--unknown-fields)", name)


def note(request: Request, prepared: Prepared) -> None:
    """Say in the answer's `warnings` header what of the request had no effect."""
    notes = [ascii(remark)[1:-1] for remark in prepared.remarks]
    notes += [f"unknown field {name!a} is ignored" for name in prepared.unknown]
    notes += [f"{name!a} has no effect" for name in prepared.unused]
    if notes:
        request.state.warnings = "; ".join(notes)[:_MOST_NOTED].strip()  # HTTP allows no blank at an end


def answer_id(request: Request, prefix: str, wanted: str | None) -> str:
    """The answer's id, made of the client's for the request: the body's, else the header's, else a new one."""
    if wanted is not None:
        request.state.request_id = wanted
        current_request.set(wanted)
    return f"{prefix}{request.state.request_id}"


class RequestNotes:
    """Middleware: `x-request-id` (the client's, if it is one, else a new one) and `warnings` on every answer. HEAD is
    answered as GET; the server leaves the body out. A path may have the server before it, as those to proxies have,
    and `root_path`, under which a proxy publishes the server; `root_path` alone leads to the page below it."""

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        state = {"request_id": given if re.fullmatch(REQUEST_ID, given) else uuid.uuid4().hex}
        current_request.set(state["request_id"])
        current_trace.set(Headers(scope=scope).get("traceparent"))
        method = "GET" if scope["method"] == "HEAD" else scope["method"]

        async def with_notes(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]
                if "warnings" in state:
                    headers["warnings"] = state["warnings"]
            await send(message)

        path = _SERVER.sub("", scope["path"], 1) or "/" if not scope["path"].startswith("/") else scope["path"]
        if self._root_path and path == self._root_path:
            await RedirectResponse(f"{path}/", 308)(scope, receive, with_notes)
            return
        if self._root_path and path.startswith(f"{self._root_path}/"):
            path = path.removeprefix(self._root_path)
        await self._app({**scope, "method": method, "path": path, "state": state}, receive, with_notes)


def with_headers(app: ASGIApp, config: ServeConfig, *, on_loopback: bool = False) -> ASGIApp:
    """The application with what every answer carries, faults included. `on_loopback`: other machines cannot reach it,
    and pages of this one may call it."""
    app = RequestNotes(app, config.root_path)
    if not (config.cors_origins or on_loopback):
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.cors_origins,
        allow_origin_regex=_LOOPBACK if on_loopback else None,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "warnings", "retry-after"],
    )


class _Tenants(Protocol):
    keys: Keys
    limits: Limits


class Callers:
    """ASGI middleware. A wrong key is an error only where a route asks for the caller."""

    def __init__(self, app: ASGIApp, service: _Tenants) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        caller: Tenant | ApiError
        try:
            caller = scope.get(TENANT) or self._service.keys.tenant(authorization_of(Headers(scope=scope)))
        except ApiError as error:
            caller = error
        scope.setdefault("state", {})["caller"] = caller

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and isinstance(caller, Tenant):
                headers = MutableHeaders(scope=message)
                for name, value in self._service.limits.headers(caller).items():
                    headers[name] = value
            await send(message)

        return await self._app(scope, receive, with_limits)


def caller_of(scope: Scope) -> Tenant:
    """Raises ApiError 401."""
    caller = scope["state"]["caller"]
    if isinstance(caller, Tenant):
        return caller
    raise caller
