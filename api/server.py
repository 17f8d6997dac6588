"""The HTTP application and the process around it: one uvicorn server, one engine client, a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import types

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError
from api.http import ClientGoneError, error_response
from api.routes import chat, completions, models, system
from api.service import Service
from api.version import project_version
from engine.errors import KtserveError, UserError

log = logging.getLogger("ktserve")
DEFAULT_PORT = 8000


def create_app(service: Service) -> FastAPI:
    """All endpoints over one service."""
    app = FastAPI(title="ktserve", version=project_version(), redirect_slashes=False)
    app.state.service = service
    for family in (chat, completions, models, system):
        app.include_router(family.router())

    async def on_purpose(request: Request, error: Exception) -> Response:
        response = error_response(error)
        if response.status_code >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return response

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = {404: "no such endpoint", 405: "method not allowed"}.get(status, str(error))
        return error_response(ApiError(status, f"{request.method} {request.url.path}: {message}"))

    app.add_exception_handler(KtserveError, on_purpose)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
    return app


def listen(host: str, port: str) -> socket.socket:
    """A bound socket. `port` "auto": 8000, or any free one if that is taken; "0": any free one; else that one.
    Raises UserError."""
    if port == "auto":
        try:
            return _bind(host, DEFAULT_PORT)
        except OSError as error:
            log.warning("port %d: %s; taking a free one", DEFAULT_PORT, error.strerror)
            port = "0"
    if not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--port {port}: 'auto' or a number from 0 to 65535 is expected", "port")
    try:
        return _bind(host, int(port))
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}", "port") from None


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a client on this machine reaches the server."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains: new requests are answered 503, open ones may end. The second ends at once."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=service.config.access_log,
            timeout_graceful_shutdown=5,
            server_header=False,
            lifespan="off",
        )
        super().__init__(config)
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        if self._draining is None:
            self._loop.call_soon_threadsafe(self._drain, sig)
        else:
            self.force_exit = self.should_exit = True

    def _drain(self, sig: int) -> None:
        if self._draining is None:
            timeout = self._service.config.drain_timeout_s
            log.info("%s: draining, at most %g s", signal.Signals(sig).name, timeout)
            self._draining = asyncio.create_task(self._drain_then_exit(timeout))

    async def _drain_then_exit(self, timeout_s: float) -> None:
        await self._service.client.drain(timeout_s)
        self.should_exit = True
