"""What uvicorn lacks: bounds on connections, for all and for each client address, and on how long they may idle.

A connection waits (for a request's header) or is busy (with a request). One that waits too long is closed; at a
bound, the one that has waited longest makes room for the new one. So half-open connections hold nobody up, and a
client whose connections are all busy cannot take those of others.
"""

from __future__ import annotations

import asyncio
import http
import logging
import sys
import uuid
from collections.abc import Iterable
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.errors import ApiError
from api.http.fast.chunks import offer_chunks

log = logging.getLogger("ktserve")
_TLS_HANDSHAKE = b"\x16\x03"


class Connections:
    """The books of one server's connections."""

    def __init__(self, most: int, most_per_address: int, *, header_timeout_s: float, send_timeout_s: float) -> None:
        self.header_timeout_s = header_timeout_s
        self.send_timeout_s = send_timeout_s
        self._most = most
        self._most_per_address = most_per_address
        self._open: dict[str, dict[GuardedProtocol, None]] = {}
        self._waiting: dict[GuardedProtocol, None] = {}  # in the order in which they began to
        self._count = 0

    def admit(self, connection: GuardedProtocol) -> bool:
        """Whether there is room, after closing the one that has waited longest if need be."""
        siblings = self._open.get(connection.address, {})
        if len(siblings) >= self._most_per_address and not self._close_one(siblings):
            log.warning("%s has %d connections, all busy; another is refused", connection.address, len(siblings))
            return False
        if self._count >= self._most and not self._close_one(self._waiting):
            log.warning("%d connections are open, all busy; another is refused", self._count)
            return False
        self._open.setdefault(connection.address, {})[connection] = None
        self._count += 1
        return True

    def _close_one(self, among: Iterable[GuardedProtocol]) -> bool:
        held = among if among is self._waiting else set(among)
        for connection in self._waiting:
            if connection in held:
                self.release(connection)
                connection.transport.abort()
                return True
        return False

    def waits(self, connection: GuardedProtocol) -> None:
        self._waiting[connection] = None

    def works(self, connection: GuardedProtocol) -> None:
        self._waiting.pop(connection, None)

    def release(self, connection: GuardedProtocol) -> None:
        self._waiting.pop(connection, None)
        siblings = self._open.get(connection.address, {})
        if connection in siblings:
            del siblings[connection]
            self._count -= 1
            if not siblings:
                del self._open[connection.address]


class Config(uvicorn.Config):
    """uvicorn's settings, and the books that its protocol keeps."""

    def __init__(self, app: Any, connections: Connections, **settings: Any) -> None:
        super().__init__(app, http=GuardedProtocol, ws="none", **settings)
        self.connections = connections


class GuardedProtocol(H11Protocol):
    """One connection. A request's body has a time-out of its own where it is read (`api/http/wire.py`)."""

    config: Config

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._books = self.config.connections
        if self._books.admit(self):
            self._watch()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None and data.startswith(_TLS_HANDSHAKE):
            log.warning("%s began a TLS handshake: this server speaks http, not https", self.address)
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles h11's error, which says what is wrong and names a status."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(ApiError(status, f"this is not a valid HTTP request: {error or msg}", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """An offer to change to HTTP/2 or WebSocket may be passed over in silence; some clients always make one."""

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that has not come as a whole, unless its answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error.body())
            head = [
                f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                f"x-request-id: {uuid.uuid4().hex}",
                "connection: close",
            ]
            self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        if self.cycle is not None:  # its application writes nothing after that
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Note whether the connection waits for a header now; if it does, the clock runs."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy and not self.cycle.response_started:
            offer_chunks(self.scope, self.transport, self.flow)
        if busy and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._books.works(self)
        elif not busy and self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._books.header_timeout_s, self._close)
            self._books.waits(self)

    def _close(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:  # a header has begun
            seconds = self._books.header_timeout_s
            self._refuse(ApiError(408, f"the header did not come within {seconds:g} s", code="timeout"))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._books.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_clock(self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock(self._deadline)
        self._stop_clock(self._stalled)
        self._books.release(self)
        super().connection_lost(exc)

    @staticmethod
    def _stop_clock(clock: asyncio.TimerHandle | None) -> None:
        if clock is not None:
            clock.cancel()
