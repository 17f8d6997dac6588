"""What Ray Serve's HTTP proxy lacks: it reads a body as fast as it comes and holds all of it, whoever sends it. Before
a large body is read here, the front is asked whether its sender has a key and how large it may be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.endpoints.application import error_response
from api.errors import ApiError
from api.http.wire import Bodies, ClientGoneError

PROXY_SETTING, PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "cluster.front.ingress.middlewares"
ADMISSION = "x-ktserve-admission"  # a header between the proxy and the front
ASKED, ADMITTED, REFUSED = "asked", "admitted", "refused"  # its values; of the front's consent, the bounds
_SMALL = 1 << 16  # bytes of a body that is passed on unasked
_CONNECTION = {b"content-length", b"transfer-encoding", b"expect", b"access-control-request-method"}
_DISCARD_S = 60.0


def middlewares() -> list[Middleware]:
    """Serve's proxies find it by `PROXY_SETTING` in their environment."""
    return [Middleware(BoundedBodies)]


def is_large(headers: Mapping[str, str]) -> bool:
    """Whether the body is, or may be, as its length is not known."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" in headers or not (length.isdecimal() and len(length) < 9 and int(length) <= _SMALL)


def bounds_header(max_body_bytes: int, timeout_s: float) -> str:
    """The front's consent, read by `BoundedBodies`."""
    return f"{max_body_bytes} {timeout_s}"


class BoundedBodies:
    """ASGI middleware of Serve's proxy, for all applications on it. Requests of others than ours pass unchanged; they
    are asked by OPTIONS, which changes nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bounds, self._bodies = "", Bodies(0, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if ADMISSION in headers:  # who deploys asks whether this is here
            await Response(status_code=204)(scope, receive, send)
        elif not is_large(headers):
            await self._app(scope, receive, send)
        else:
            answer = await self._ask(scope)
            if answer.said is None:
                await self._app(scope, receive, send)
            elif answer.said == REFUSED:
                await self._refuse(answer.messages, scope, receive, send)
            else:
                await self._read(answer, scope, receive, send)

    async def _ask(self, scope: Scope) -> _Answer:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _CONNECTION]
        headers.append((ADMISSION.encode(), ASKED.encode()))
        messages: list[Message] = []
        said: str | None = None
        sent = False

        async def nothing() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # until the proxy, which waits for a disconnect, is cancelled
            sent = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def note(message: Message) -> None:
            nonlocal said
            if message["type"] == "http.response.start":
                said = Headers(raw=message["headers"]).get(ADMISSION)
            if said is not None:
                messages.append(message)

        await self._app({**scope, "method": "OPTIONS", "headers": headers}, nothing, note)
        return _Answer(said, messages)

    async def _refuse(self, messages: list[Message], scope: Scope, receive: Receive, send: Send) -> None:
        """With the front's answer, after some of the body, so that its sender gets to read it."""
        try:
            with contextlib.suppress(ApiError):
                async with Bodies(0, _DISCARD_S).read(Request(scope, receive)):
                    pass
        except ClientGoneError:
            return
        for message in messages:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["connection"] = "close"
                del headers[ADMISSION]
            await send(message)

    async def _read(self, answer: _Answer, scope: Scope, receive: Receive, send: Send) -> None:
        """The whole body, then the application. It counts as held until the answer begins: then the front has it."""
        assert answer.said is not None
        if answer.said != self._bounds:  # the first, or of an update
            limit, timeout_s = answer.said.split()
            self._bounds, self._bodies = answer.said, Bodies(int(limit), float(timeout_s))
        async with contextlib.AsyncExitStack() as held:
            try:
                unread = [await held.enter_async_context(self._bodies.read(Request(scope, receive)))]
            except ApiError as error:
                response = error_response(error, scope["path"])
                response.headers.update(answer.of_every_answer())
                await response(scope, receive, send)
                return
            except ClientGoneError:
                return

            async def whole() -> Message:
                if not unread:
                    return await receive()
                return {"type": "http.request", "body": unread.pop(), "more_body": False}

            async def release(message: Message) -> None:
                await held.aclose()
                await send(message)

            mark = (ADMISSION.encode(), ADMITTED.encode())
            await self._app({**scope, "headers": [*scope["headers"], mark]}, whole, release)


class _Answer(NamedTuple):
    """`said`: the header's value; None of an application that is not ours, whose messages are not kept."""

    said: str | None
    messages: list[Message]

    def of_every_answer(self) -> dict[str, str]:
        """Headers that the front puts on errors too: the request's id, CORS."""
        headers = Headers(raw=self.messages[0]["headers"])
        return {n: v for n, v in headers.items() if n in ("x-request-id", "vary") or n.startswith("access-control-")}
