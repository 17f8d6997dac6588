"""Answers on the wire: each family of endpoints has a front that writes them in its form."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import ApiError
from api.http.answers.generation import Answers, Update
from api.http.chunks import Chunks, chunks_of
from api.http.wire import ClientGoneError, as_api_error, until_gone
from engine.errors import EngineError, UserError

log = logging.getLogger("ktserve")
_KEEP_ALIVE_S = 15.0
_LEAST_WAIT_S = 0.001
_PLACE = uuid.uuid4().hex  # stands in a sample for the text; no client can send it
_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


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


class Frames:
    """Events of which a text alone differs, and the number of the choice: `sample(index, text)` makes one. What stands
    around the text is kept, so an event is one join."""

    def __init__(self) -> None:
        self._around: dict[int, list[bytes]] = {}

    def event(self, index: int, text: str, sample: Callable[[int, str], bytes]) -> bytes:
        """`sample` is always the same: kept here, a front's own would be a cycle that only the collector breaks."""
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = sample(index, _PLACE).split(_encode(_PLACE))
        return _encode(text).join(around)


class EventStream(Response):
    """Answers as a front writes them: one write for all that has come. Comments while nothing comes keep proxies from
    closing the connection. The answers are aborted however it ends.

    Where the connection takes chunks (`api/http/chunks.py`), events are written when they come, without waking the
    task that serves the request; it has the beginning, the end, and the times when the client is slow."""

    def __init__(self, answers: Answers, front: Front) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=front.media_type)
        del self.headers["content-length"]
        self._answers = answers
        self._front = front
        self._clock = asyncio.get_running_loop().time
        self._chunks: Chunks | None = None
        self._unsent = b""
        self._sent_s = 0.0  # when something was sent last, in the loop's time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._chunks = chunks_of(scope)
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
            last = self._front.end()
        except (ApiError, UserError, EngineError) as error:
            last = self._front.error(as_api_error(error))
        await send({"type": "http.response.body", "body": last + self._front.close, "more_body": False})

    async def _send_answers(self, send: Send) -> None:
        clock = self._clock
        self._unsent, self._sent_s = self._front.begin(), clock()
        listener = None if self._chunks is None else self._deliver
        while True:
            if not self._unsent and clock() - self._sent_s >= _KEEP_ALIVE_S:
                self._unsent, self._sent_s = self._front.keep_alive, clock()  # which may be empty
            if self._unsent:
                chunk, self._unsent, self._sent_s = self._unsent, b"", clock()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if self._answers.done:
                return
            left_s = max(_LEAST_WAIT_S, self._sent_s + _KEEP_ALIVE_S - clock())
            updates = await self._answers.take(left_s, listener)
            self._unsent += self._written(updates)

    def _deliver(self) -> bool:
        """Write what has come now. False if that is for the task: at the end, after an error, for a slow client."""
        chunks = self._chunks
        if chunks is None or chunks.blocked:
            return False
        written = self._written(self._answers.take_now())
        if self._answers.done:
            self._unsent = written  # goes with the end, as one write
            return False
        if written:
            chunks.write(written)
            self._sent_s = self._clock()
        return not self._answers.failed

    def _written(self, updates: list[tuple[int, Update]]) -> bytes:
        if len(updates) == 1:
            return self._front.update(*updates[0])
        return b"".join(self._front.update(index, update) for index, update in updates)
