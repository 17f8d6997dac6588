"""One request's events, as the engine client hands them out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from engine import messages as m
from engine.errors import EngineError

Event = m.Tokens | m.Finished | m.Refused | m.Cancelled | m.Failed


class EngineUnavailable(EngineError):
    """No engine to serve this now. `status` is the HTTP status it amounts to."""

    def __init__(self, message: str, status: int = 503, retry_after_s: float | None = 5.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class RequestStream:
    """The events of one request, ending with its terminal event. Use as a context manager: leaving it earlier aborts
    the request. Tokens that arrive while nobody reads are merged into one event."""

    def __init__(self, request_id: str, forget: Callable[[str, m.StopFound | m.Abort], None]) -> None:
        self.request_id = request_id
        self._forget = forget
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._error: EngineUnavailable | None = None
        self._ended = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def fail(self, error: EngineUnavailable) -> None:
        self._error = error
        self._arrived.set()

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next event. Raises EngineUnavailable if the engine died."""
        while not self._events and not self._ended:
            if self._error is not None:
                self._ended = True
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        if self._ended:
            raise StopAsyncIteration
        event = self._events.popleft()
        if not isinstance(event, m.Tokens):
            self._ended = True
            return event
        tokens = [event]
        while self._events and isinstance(following := self._events[0], m.Tokens):
            tokens.append(following)
            self._events.popleft()
        return _merge(tokens) if len(tokens) > 1 else event

    def stop(self, num_tokens: int) -> None:
        """A stop string was found: the request ends after `num_tokens` output tokens; no more events are read."""
        self._end(m.StopFound(request_id=self.request_id, num_tokens=num_tokens))

    def abort(self) -> None:
        """Cancel, unless it has ended."""
        self._end(m.Abort(request_id=self.request_id))

    def _end(self, message: m.StopFound | m.Abort) -> None:
        if not self._ended:
            self._ended = True
            self._arrived.set()
            self._forget(self.request_id, message)


def _merge(events: Sequence[m.Tokens]) -> m.Tokens:
    first = events[0]
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
