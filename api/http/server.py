"""The process around the HTTP application: one uvicorn server, one engine client, a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import re
import resource
import signal
import socket
import types

import uvicorn
from fastapi import FastAPI

from api.config import ServeConfig
from api.http.connections import Config, Connections
from api.http.middleware import with_headers
from api.http.service import Service
from engine.errors import UserError

log = logging.getLogger("ktserve")
DEFAULT_PORT = 8000
_BACKLOG = 2048
_ACCEPTED_IN_A_TURN = 16  # of the event loop
_ACCEPTED_AT_ONCE = 64  # connections whose descriptors are taken before they are counted
_DESCRIPTORS = 80  # for files, the engine's sockets, ours that listen, and what libraries open
_MOST_CONNECTIONS = 8192
_PORT_IS_TAKEN = (errno.EADDRINUSE, errno.EACCES)
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+")  # as browsers send it


def connections_of(config: ServeConfig) -> Connections:
    """Bounds that this process' limit of descriptors allows. Raises UserError for settings beyond it."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _ACCEPTED_AT_ONCE - _DESCRIPTORS
    most = min(allowed, _MOST_CONNECTIONS) if config.max_connections is None else config.max_connections
    each = max(1, most // 2) if config.max_connections_per_address is None else config.max_connections_per_address
    if most > allowed:
        raise UserError(f"--max-connections {most}: 1 to {allowed} are possible here (ulimit -n)", "max_connections")
    if each > most:
        name = "max_connections_per_address"
        raise UserError(f"--{name.replace('_', '-')} {each} is more than --max-connections {most}", name)
    return Connections(most, each, header_timeout_s=config.header_timeout_s, send_timeout_s=config.send_timeout_s)


def listen(host: str, port: str) -> socket.socket:
    """A listening socket. `port` "auto": 8000, or any free one if that is taken; "0": any free one; else that one.
    Raises UserError."""
    if port == "auto":
        try:
            return _bind(host, DEFAULT_PORT)
        except OSError as error:
            if error.errno not in _PORT_IS_TAKEN:
                raise _cannot_listen(host, DEFAULT_PORT, error) from None
            log.warning("port %d: %s; taking a free one", DEFAULT_PORT, error.strerror)
            port = "0"
    if not port.isdecimal() or int(port) > 65535:
        hint = "; Kubernetes sets KTSERVE_PORT to that for a service named ktserve" if port.startswith("tcp://") else ""
        raise UserError(f"--port {port}: 'auto' or a number from 0 to 65535 is expected{hint}", "port")
    try:
        return _bind(host, int(port))
    except OSError as error:
        raise _cannot_listen(host, int(port), error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    if error.errno in _PORT_IS_TAKEN:
        return UserError(
            f"--port {port}: cannot listen on {host}:{port}: {error.strerror}; without --port a free one is taken",
            "port",
        )
    return UserError(f"--host {host}: cannot listen there: {error.strerror or error}", "host")


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)  # at once: another server may bind a port on which nobody listens yet
    except OSError:
        bound.close()
        raise
    return bound


def repeated(bound: socket.socket) -> list[socket.socket]:
    """The same socket several times: uvloop takes one connection of each in a turn of the event loop, and in a busy
    server, whose turns are long, new clients would wait for a turn each."""
    return [bound, *(bound.dup() for _ in range(_ACCEPTED_IN_A_TURN - 1))]


def is_loopback(bound: socket.socket) -> bool:
    """Whether this machine alone can reach it."""
    address = str(bound.getsockname()[0])
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def check_reach(bound: socket.socket, config: ServeConfig, *, keys: bool) -> None:
    """Raises UserError for a server without keys that other machines can reach."""
    if not (keys or config.open or is_loopback(bound)):
        raise UserError(
            f"--host {config.host}: other machines can reach it and there are no keys: give --tenants or "
            "--api-keys-file (make a key: ktserve keys new), or --open if everybody may use it",
            "host",
        )


def check_origins(config: ServeConfig) -> None:
    """Raises UserError for one that no browser sends."""
    for origin in config.cors_origins:
        if not _ORIGIN.fullmatch(origin):
            raise UserError(f"--cors-origins {origin}: write it as https://example.com, or * for all", "cors_origins")


def url_of(bound: socket.socket) -> str:
    """Where a client on this machine reaches the server."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_root_path(config: ServeConfig) -> None:
    """Raises UserError for one that is no beginning of a path."""
    if config.root_path and not _PREFIX.fullmatch(config.root_path):
        raise UserError(f"--root-path {config.root_path}: write it as /llm, without a slash at its end", "root_path")


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains: new requests are answered 503, open ones may end. The second ends at once,
    and so does the first while the model loads; `ended_by` is its number then."""

    def __init__(self, app: FastAPI, service: Service, connections: Connections, *, on_loopback: bool) -> None:
        config = Config(
            with_headers(app, service.config, on_loopback=on_loopback),
            connections,
            log_config=None,
            access_log=service.config.access_log,
            timeout_graceful_shutdown=5,
            server_header=False,
            backlog=_ACCEPTED_AT_ONCE,
            lifespan="off",
        )
        super().__init__(config)
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self.ended_by = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(_BACKLOG)  # asyncio has set it to the number that it accepts at once

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        if self._draining is None:
            self._loop.call_soon_threadsafe(self._drain, sig)
        else:
            self.force_exit = self.should_exit = True

    def _drain(self, sig: int) -> None:
        if self._service.client.ready is None:
            self.ended_by, self.should_exit = sig, True
        elif self._draining is None:
            timeout = self._service.config.drain_timeout_s
            log.info("%s: draining, at most %g s", signal.Signals(sig).name, timeout)
            self._draining = asyncio.create_task(self._drain_then_exit(timeout))

    async def _drain_then_exit(self, timeout_s: float) -> None:
        await self._service.stop_answering()
        await self._service.client.drain(timeout_s)
        self.should_exit = True
