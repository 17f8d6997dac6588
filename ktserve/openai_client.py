"""The client of programs whose sockets block: `ktserve chat --url`, and locust's users, whose sockets gevent makes
cooperative. What measures over asyncio has `loadtests/http.py`."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class AnswerError(Exception):
    """The server answered with an error, or not as the protocol says. `status`: of the answer, or 0; `reason`: what an
    error's body says."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(f"{status}: {reason}" if status else reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible one (`url` with or without /v1) and the key to send, if any. `timeout_s`: of each wait;
    None: of connecting alone, 30 seconds. All methods raise AnswerError or OSError."""

    url: str
    key: str = ""
    timeout_s: float | None = 300.0

    def models(self) -> list[dict[str, Any]]:
        """All that the key may see, a base before its adapters."""
        try:
            return sorted(json.loads(self.get("/v1/models"))["data"], key=lambda model: bool(model.get("parent")))
        except (ValueError, LookupError, TypeError) as error:
            raise AnswerError(f"/v1/models: {error!r}") from None

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        return Exchange(self, "POST", path, body).read()

    def get(self, path: str) -> bytes:
        return Exchange(self, "GET", path).read()

    def stream(self, path: str, body: dict[str, Any]) -> Exchange:
        return Exchange(self, "POST", path, body)


class Exchange:
    """A request on a connection of its own, sent by `read` or the first of `events`."""

    def __init__(self, server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        parts = urlsplit(server.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=server.timeout_s or 30.0)
        self._timeout_s = server.timeout_s
        self._sock: socket.socket | None = None  # http.client forgets it where the server will close
        headers = {"Content-Type": "application/json", "Connection": "close"}
        headers |= {"Authorization": f"Bearer {server.key}"} if server.key else {}
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._request = (method, prefix + path, None if body is None else json.dumps(body), headers)

    def read(self) -> bytes:
        try:
            with self._opened() as response:
                return response.read()
        except http.client.HTTPException as error:
            raise AnswerError(f"no HTTP answer: {error!r}") from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Of a streamed answer, until [DONE]. Closing the iterator closes the connection."""
        try:
            with self._opened() as response:
                for line in response:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield _event(data)
        except http.client.HTTPException as error:
            raise AnswerError(f"no HTTP answer: {error!r}") from None
        raise AnswerError("the stream ended without [DONE]")

    def hang_up(self) -> None:
        """From another thread than the one that reads: its read ends."""
        if self._sock is not None:
            with suppress(OSError):  # it has ended by itself
                self._sock.shutdown(socket.SHUT_RDWR)

    def _opened(self) -> http.client.HTTPResponse:
        self._connection.connect()
        self._sock = self._connection.sock
        self._sock.settimeout(self._timeout_s)
        self._connection.request(*self._request)
        response = self._connection.getresponse()
        if response.status >= 300:
            with response:
                raise AnswerError(_reason(response.read(65536)), response.status)
        return response


def _event(data: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise AnswerError(f"no JSON in an event: {data[:80]!r}") from None
    if "error" in event:
        error = event["error"]
        raise AnswerError(str(error.get("message", error) if isinstance(error, dict) else error))
    return event


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace") or "no reason"
