"""HTTP pieces: bounded bodies, JSON, server-sent events, and work that stops when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError
from api.stream import EngineUnavailable
from engine.errors import EngineError, UserError

log = logging.getLogger("ktserve")
_T = TypeVar("_T")
_KEEP_ALIVE_S = 15.0


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


def described(kind: type[BaseModel]) -> dict[str, Any]:
    """For a route's `openapi_extra`: the body's schema, nested ones written out."""
    schema = kind.model_json_schema()
    nested = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            name = str(node.get("$ref", "")).removeprefix("#/$defs/")
            return nested[name] if name in nested else {key: inline(value) for key, value in node.items()}
        return [inline(value) for value in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(schema)}}}}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_response(error: Exception) -> Response:
    api_error = as_api_error(error)
    return json_response(api_error.body(), api_error.status, api_error.headers())


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


async def read_body(request: Request, limit: int) -> bytes:
    """Raises ApiError 413 as soon as more than `limit` bytes are announced or have come."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """`work`, cancelled when the client disconnects (then ClientGoneError). The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Server-sent events from `events`; `close` is called however it ends. An error that `events` raises on purpose
    is sent as an event; "data: [DONE]" is the last one in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        except ClientGoneError:
            log.debug("a client went away while its answer was streamed")
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._with_keep_alive():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (ApiError, UserError, EngineError) as error:
            body = event(as_api_error(error).body())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _with_keep_alive(self) -> AsyncIterator[bytes]:
        """Comments while nothing comes, so that proxies keep the connection."""
        following: asyncio.Future[bytes] = asyncio.ensure_future(_next(self._events))
        try:
            while True:
                await asyncio.wait({following}, timeout=_KEEP_ALIVE_S)
                if not following.done():
                    yield b": keep-alive\n\n"
                    continue
                try:
                    chunk = following.result()
                except StopAsyncIteration:
                    return
                following = asyncio.ensure_future(_next(self._events))
                yield chunk
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await events.__anext__()
