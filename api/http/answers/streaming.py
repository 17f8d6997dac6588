"""Answers on the wire: each family of endpoints has a front that writes them in its form."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError
from api.http.answers.generation import Answers, Update
from api.http.wire import ClientGoneError, as_api_error, until_gone
from engine.errors import EngineError, UserError

log = logging.getLogger("ktserve")
_KEEP_ALIVE_S = 15.0


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class Front(ABC):
    """Writes the answers of one response: `whole`, or as a stream: `begin`, any number of `update`, then `end` or
    `error`, then `close`. What these return may be empty. The defaults are those of OpenAI's streams."""

    media_type: ClassVar[str] = "text/event-stream"
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    close: ClassVar[bytes] = b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, choices: Sequence[Update]) -> Any:
        """The response's body, to be written as JSON."""

    @abstractmethod
    def begin(self) -> bytes: ...

    @abstractmethod
    def update(self, index: int, update: Update) -> bytes:
        """News of choice number `index`."""

    @abstractmethod
    def end(self) -> bytes:
        """All choices have ended."""

    def error(self, error: ApiError) -> bytes:
        return event(error.body())


class EventStream(Response):
    """Answers as a front writes them: one write for all that has come. Comments while nothing comes keep proxies from
    closing the connection. The answers are aborted however it ends."""

    def __init__(self, answers: Answers, front: Front) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=front.media_type)
        del self.headers["content-length"]
        self._answers = answers
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        except ClientGoneError:
            log.debug("a client went away while its answer was streamed")
        finally:
            self._answers.abort()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send_answers(send)
            last = self._front.end()
        except (ApiError, UserError, EngineError) as error:
            last = self._front.error(as_api_error(error))
        await send({"type": "http.response.body", "body": last + self._front.close, "more_body": False})

    async def _send_answers(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        chunk, written = self._front.begin(), clock()
        while True:
            if not chunk and clock() - written >= _KEEP_ALIVE_S:
                chunk = self._front.keep_alive
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                written = clock()
            if self._answers.done:
                return
            updates = await self._answers.take(_KEEP_ALIVE_S)
            chunk = b"".join(self._front.update(index, update) for index, update in updates)
