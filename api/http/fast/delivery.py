"""Answers delivered where they arrive: to a connection as chunks, or gathered."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive, Scope, Send

from api.client.stream import Inbox
from api.http import fast
from api.http.answers.generation import Answers, Update
from api.http.answers.streaming import EventStream, ResponseFormatter
from api.http.fast.chunks import Chunks, chunks_of


def new_inbox() -> Inbox:
    return ListenedInbox() if fast.ENABLED else Inbox()


class ListenedInbox(Inbox):
    """In place of ending a wait, a listener is called, once for all that comes in one turn of the event loop. It may
    `drain` the inbox, and says whether to wait on. What it raises is raised where the reader waits."""

    def __init__(self) -> None:
        super().__init__()
        self._listener: Callable[[], bool] | None = None
        self._context: contextvars.Context | None = None  # the listener's
        self._called = False

    @contextmanager
    def listened(self, listener: Callable[[], bool]) -> Iterator[None]:
        """`listener` is called during the waits of the context, in the context variables of now."""
        self._listener, self._context = listener, contextvars.copy_context()
        try:
            yield
        finally:
            self._listener = self._context = None  # a cycle otherwise, if the listener holds the inbox

    def _arrived(self) -> None:
        if self._listener is None:
            super()._arrived()
        elif self._waiter is not None and not self._called:
            self._called = True
            self._waiter.get_loop().call_soon(self._call, context=self._context)

    def _call(self) -> None:
        self._called = False
        if self._waiter is None or self._waiter.done() or self._listener is None:
            return  # the reader goes on, and takes what has come
        try:
            waits_on = self._listener()
        except Exception as error:  # noqa: BLE001 - raised where the reader waits
            if not self._waiter.done():
                self._waiter.set_exception(error)
        else:
            if not waits_on:
                self._end_wait()


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
