"""Answers on the wire: each dialect has a response formatter that writes them in its form."""

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
_LEAST_WAIT_S = 0.001


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class ResponseFormatter(ABC):
    """Writes the answers of one response: `whole`, or as a stream: `begin`, any number of `update`, then `end` or
    `error`, then `close`. What these return may be empty. The defaults are those of OpenAI's streams."""

    media_type: ClassVar[str] = "text/event-stream"
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    close: ClassVar[bytes] = b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, choices: Sequence[Update]) -> Any:
        """The response's body, to be written as JSON."""

    def begin(self) -> bytes:
        return b""

    @abstractmethod
    def update(self, index: int, update: Update) -> bytes:
        """News of choice number `index`."""

    @abstractmethod
    def end(self) -> bytes:
        """All choices have ended."""

    def error(self, error: ApiError) -> bytes:
        return event(error.body())


class EventStream(Response):
    """Answers as a formatter writes them: one write for all that has come. Comments while nothing comes keep proxies
    from closing the connection. The answers are aborted however it ends."""

    def __init__(self, answers: Answers, formatter: ResponseFormatter) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=formatter.media_type)
        del self.headers["content-length"]
        self._answers = answers
        self._formatter = formatter
        self._clock = asyncio.get_running_loop().time
        self._unsent = b""
        self._sent_s = 0.0  # when something was sent last, in the loop's time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(scope, receive, self._send(send))
        except ClientGoneError:
            log.debug("a client went away while its answer was streamed")
        finally:
            self._answers.abort()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send_answers(send)
            last = self._formatter.end()
        except (ApiError, UserError, EngineError) as error:
            last = self._formatter.error(as_api_error(error))
        await send({"type": "http.response.body", "body": last + self._formatter.close, "more_body": False})

    async def _send_answers(self, send: Send) -> None:
        clock = self._clock
        self._unsent, self._sent_s = self._formatter.begin(), clock()
        while True:
            if not self._unsent and clock() - self._sent_s >= _KEEP_ALIVE_S:
                self._unsent, self._sent_s = self._formatter.keep_alive, clock()  # which may be empty
            if self._unsent:
                chunk, self._unsent, self._sent_s = self._unsent, b"", clock()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if self._answers.done:
                return
            left_s = max(_LEAST_WAIT_S, self._sent_s + _KEEP_ALIVE_S - clock())
            updates = await self._answers.take(left_s)
            self._unsent += self._written(updates)

    def _written(self, updates: list[tuple[int, Update]]) -> bytes:
        if len(updates) == 1:
            return self._formatter.update(*updates[0])
        return b"".join(self._formatter.update(index, update) for index, update in updates)
