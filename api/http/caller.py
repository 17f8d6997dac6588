"""Finds out who asks, before a route runs, and tells them what is left of their limits."""

from __future__ import annotations

from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.batches.call import TENANT
from api.errors import ApiError
from api.tenants.keys import Keys, authorization_of
from api.tenants.limits import Limits
from api.tenants.record import Tenant


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
            caller = scope.get(TENANT) or await self._service.keys.identify(authorization_of(Headers(scope=scope)))
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
