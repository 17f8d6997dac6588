"""Parts of HTTP: bounded bodies, JSON, and work that stops when the client goes away."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.client.stream import EngineUnavailable
from api.errors import ApiError, shortened
from engine.errors import EngineError, UserError

_T = TypeVar("_T")
_MOST_DISCARDED = 64 << 20  # bytes of a body that is too large, which are read nevertheless
_SMALL_BODY = 2**16  # bytes; larger ones are counted
_GONE = "ktserve.gone"  # where a scope has the task that waits for the client to disconnect
_BODIES_HELD = 16  # bodies of the largest size that may be held at the same time


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client sees of an error raised on purpose."""
    match error:
        case ApiError():
            return error
        case EngineUnavailable():
            return ApiError(error.status, str(error), code="engine_unavailable", retry_after_s=error.retry_after_s)
        case UserError():
            return ApiError(getattr(error, "status", 400), str(error), param=error.field)
        case EngineError():
            return ApiError(500, str(error), code="engine_error")
        case _:
            return ApiError(500, "internal error", code="internal_error")


_UNASKED = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")


class Bodies:
    """Reads request bodies of at most `limit` bytes, each within `timeout_s`. All large ones that are held at the
    same time are bounded too; small ones always get in."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._left = _BODIES_HELD * limit

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, counted as held until the context ends. Raises ApiError 413, 408 or 503; ClientGoneError."""
        body = bytearray()
        try:
            try:
                with _Interrupt(asyncio.TimeoutError) as interrupt:
                    timer = asyncio.get_running_loop().call_later(self._timeout_s, interrupt.call)
                    try:
                        await self._fill(body, request)
                    finally:
                        timer.cancel()
            except asyncio.TimeoutError:
                raise ApiError(408, f"the body did not come within {self._timeout_s:g} s", code="timeout") from None
            except ClientDisconnect:
                raise ClientGoneError from None
            yield bytes(body)
        finally:
            if len(body) > _SMALL_BODY:
                size = len(body)
                body.clear()
                self.release(size)

    def hold(self, num_bytes: int) -> None:
        """Count as held until `release`. Raises ApiError 503 if too many are."""
        if num_bytes > self._left:
            raise ApiError(503, "too many large bodies are being held", code="bodies_held", retry_after_s=1.0)
        self._left -= num_bytes

    def release(self, num_bytes: int) -> None:
        """What has been freed."""
        self._left += num_bytes
        _release_memory()

    async def _fill(self, body: bytearray, request: Request) -> None:
        _check_type(request)
        check_encoding(request)
        too_large = ApiError(413, f"the body is larger than {self._limit} bytes", code="body_too_large")
        length = request.headers.get("content-length", "0")
        refused = length.isdecimal() and (len(length) > 18 or int(length) > self._limit)
        if refused and (len(length) > 18 or int(length) > _MOST_DISCARDED or "expect" in request.headers):
            raise too_large
        discarded = 0
        async for chunk in request.stream():
            before = len(body)
            refused = refused or before + len(chunk) > self._limit
            if refused:  # who still sends when the connection is closed does not get to read the answer
                discarded += len(chunk)
                if discarded > _MOST_DISCARDED:
                    break
                continue
            held = len(chunk) if before > _SMALL_BODY else before + len(chunk)
            if before + len(chunk) > _SMALL_BODY:
                self.hold(held)
            body += chunk
        if refused:
            raise too_large


def _release_memory() -> None:
    """Return freed memory to the system (glibc keeps it otherwise)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _check_type(request: Request) -> None:
    """Raises ApiError 415 for a type of body that a page of any origin may send without asking first. `curl -d` and
    some clients name one too; they send no `Origin`, which browsers always do with these."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind in _UNASKED and "origin" in request.headers:
        raise ApiError(415, f"Content-Type: application/json is expected, got {kind}", code="unsupported_media_type")


def check_encoding(request: Request) -> None:
    """Raises ApiError 415 for a body that is compressed."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding: {shortened(encoding)} is not supported, send the body uncompressed"
        raise ApiError(415, message, code="unsupported_media_type")


class ChunkedResponse(Response):
    """JSON in chunks, sent one by one so that others are served in between; large ones count as `bodies` that are held
    until they have been sent. Raises ApiError 503 for too many."""

    def __init__(self, chunks: list[bytes], bodies: Bodies) -> None:
        size = sum(map(len, chunks))
        super().__init__(headers={"content-length": str(size)}, media_type="application/json")
        self._chunks, self._bodies, self._held = chunks, bodies, size if size > _SMALL_BODY else 0
        bodies.hold(self._held)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._chunks.clear()
            if self._held:
                self._bodies.release(self._held)


class _Interrupt:
    """A context that `call` ends from outside: what runs in it is cancelled once, and `error` is raised in its place.

    anyio's scope cancels again at each await until it is left, so that what awaits to clean up would need a shield."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self._task = asyncio.current_task()
        self._called = self._over = False

    def call(self, *_: object) -> None:
        if not self._called and not self._over and self._task is not None:
            self._called = True
            self._task.cancel()

    def __enter__(self) -> _Interrupt:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over = True
        if not self._called or self._task is None:
            return
        if sys.version_info >= (3, 11):
            self._task.uncancel()
        if kind is asyncio.CancelledError:
            raise self._error from None


async def until_gone(scope: Scope, receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """`work`, cancelled when the client disconnects (then ClientGoneError). The body must have been read: from the
    first call on, one task receives for the whole request. It ends with the answer, as servers have it."""
    gone: asyncio.Task[None] | None = scope.get(_GONE)
    if gone is None:
        gone = scope[_GONE] = asyncio.ensure_future(_disconnected(receive))
    if gone.done():
        work.close()
        raise ClientGoneError
    with _Interrupt(ClientGoneError) as interrupt:
        gone.add_done_callback(interrupt.call)
        try:
            return await work
        finally:
            gone.remove_done_callback(interrupt.call)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
