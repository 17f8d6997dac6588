"""A request to the application from inside the process: the same routes and checks, without a connection."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message

from api.tenants.record import Tenant

log = logging.getLogger("ktserve")
TENANT = "ktserve.tenant"  # where a scope names whom such a request is for


@dataclass
class Response:
    """`status` 0: there was none."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


async def call(app: ASGIApp, path: str, body: bytes, tenant: Tenant) -> Response:
    """Cancelled, it ends the request as a client that closes its connection does."""
    sent = [{"type": "http.request", "body": body, "more_body": False}]
    response, ended = Response(), asyncio.Event()

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await ended.wait()  # this client never closes the connection
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {key.lower(): value for key, value in message["headers"]}
        else:
            response.body += message.get("body", b"")

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": None, "server": None, TENANT: tenant,
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    except Exception:  # the application has answered 500 and logged it; it raises again for the server's sake
        if response.status < 500:
            raise
    finally:
        ended.set()
    return response
