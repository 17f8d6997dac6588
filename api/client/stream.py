"""The way of events from the engine client to whoever asked: one inbox for all requests of an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from engine import messages as m
from engine.errors import EngineError

Event = m.Tokens | m.Finished | m.Refused | m.Cancelled | m.Failed


class EngineUnavailable(EngineError):
    """No engine to serve this now. `status` is the HTTP status it amounts to."""

    def __init__(self, message: str, status: int = 503, retry_after_s: float | None = 5.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Inbox:
    """Events of some requests in the order in which they came, for one reader."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._error: EngineUnavailable | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._give_up_s = 0.0  # when the reader wants to go on without an event, in the loop's time
        self._timer: asyncio.TimerHandle | None = None

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived()

    def fail(self, error: EngineUnavailable) -> None:
        self._error = error
        self._end_wait()

    def close(self) -> None:
        """The reader wants no more: it gets nothing from now on, without waiting."""
        self._closed = True
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._end_wait()

    async def take(self, timeout_s: float | None = None) -> list[Event]:
        """All that has come since the last call, at least one event; none after `timeout_s` or if the inbox is closed.
        Raises EngineUnavailable, after the events before it, if the engine died."""
        if not (self._events or self._error or self._closed):
            await self._wait(timeout_s)
        if self._error is not None and not self._events and not self._closed:
            raise self._error
        return self.drain()

    def drain(self) -> list[Event]:
        """All that has come since the last call."""
        events, self._events = self._events, []
        return events

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if timeout_s is not None:
            self._give_up_s = loop.time() + timeout_s
            self._set_timer(loop)
        else:
            self._give_up_s = math.inf
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer serves many waits: set and cancelled for every event, timers would cost more than events."""
        if self._timer is not None and self._timer.when() > self._give_up_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_at(self._give_up_s, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._waiter is None or self._give_up_s == math.inf:
            return
        if loop.time() >= self._give_up_s:
            self._end_wait()
        else:
            self._set_timer(loop)

    def _arrived(self) -> None:
        """An event has come."""
        self._end_wait()

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OpenRequest:
    """A request that was sent. Its events, the last one terminal, go to `inbox`. `stop` and `abort` end it, unless it
    has ended; no more events come then."""

    def __init__(self, request_id: str, inbox: Inbox, forget: Callable[[str, m.StopFound | m.Abort], None]) -> None:
        self.request_id = request_id
        self.inbox = inbox
        self.deadline: asyncio.TimerHandle | None = None  # the api's own, for an engine that does not answer
        self._forget = forget

    def stop(self, num_tokens: int) -> None:
        """A stop string was found: the request ends after `num_tokens` output tokens."""
        self._forget(self.request_id, m.StopFound(request_id=self.request_id, num_tokens=num_tokens))

    def abort(self) -> None:
        self._forget(self.request_id, m.Abort(request_id=self.request_id))


def merged(events: Sequence[m.Tokens]) -> m.Tokens:
    """Tokens of one request that came one after another, as one event."""
    first = events[0]
    if len(events) == 1:
        return first
    logprobs = None
    if first.logprobs is not None:
        logprobs = [entry for event in events for entry in event.logprobs or []]
    return m.Tokens(
        request_id=first.request_id,
        tokens=[token for event in events for token in event.tokens],
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
    )
