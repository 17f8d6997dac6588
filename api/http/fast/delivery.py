"""Answers delivered where they arrive: to a connection as chunks, or gathered."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import EventStream, ResponseFormatter
from api.http.fast.chunks import Chunks, chunks_of
from api.http.fast.inbox import ListenedInbox


class ChunkStream(EventStream):
    """Where the connection takes chunks, events are written when they come, without waking the task that serves the
    request; it has the beginning, the end, and the times when the client is slow."""

    def __init__(self, answers: Answers, formatter: ResponseFormatter) -> None:
        super().__init__(answers, formatter)
        self._chunks: Chunks | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._chunks, inbox = chunks_of(scope), self._answers.inbox
        if self._chunks is None or not isinstance(inbox, ListenedInbox):
            return await super().__call__(scope, receive, send)
        with inbox.listened(self._deliver):
            await super().__call__(scope, receive, send)

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


async def whole(answers: Answers) -> list[Update]:
    """As `Answers.whole`: the task is woken for the end alone."""
    if not isinstance(answers.inbox, ListenedInbox):
        return await answers.whole()
    with answers.inbox.listened(answers.take_ahead):
        return await answers.whole()
