"""One answer: the engine's tokens become text, cut at stop strings, with log-probabilities and a finish reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from api.errors import ApiError
from api.metrics import Metrics
from api.stops import StopMachine
from api.stream import EngineUnavailable, RequestStream
from api.text.detokenize import Detokenizer
from engine import messages as m
from engine.errors import EngineError


@dataclass
class Piece:
    """What came since the last piece. `offsets`: where each token's text begins in the answer, in characters, when
    stop strings and held-back bytes are left aside. The last piece has a `finish_reason`."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[m.TokenLogprobs] | None = None
    prompt_logprobs: list[m.TokenLogprobs | None] | None = None
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """Reads one request's stream. Iterate for pieces; `abort` when they are no longer wanted.

    `detokenizer` None: no text, tokens only. `drop_output`: only the prompt was asked about (max_tokens 0).
    """

    def __init__(
        self,
        stream: RequestStream,
        detokenizer: Detokenizer | None,
        stops: Sequence[str],
        metrics: Metrics,
        *,
        prompt_tokens: int,
        drop_output: bool = False,
    ) -> None:
        self._stream = stream
        self._detokenizer = detokenizer
        self._stops = StopMachine(stops) if stops else None
        self._metrics = metrics
        self._drop_output = drop_output
        self._began = self._last = time.monotonic()
        self._length = 0  # characters the detokeniser has given
        self._done = False
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.num_tokens = 0

    def abort(self) -> None:
        if not self._done:
            self._done = True
            self._stream.abort()
            self._count("cancelled")

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        """Raises ApiError if the request was refused, cancelled or failed; EngineUnavailable if the engine died."""
        if self._done:
            raise StopAsyncIteration
        try:
            event = await self._stream.__anext__()
        except EngineUnavailable:
            self._done = True
            self._count("unavailable")
            raise
        if isinstance(event, m.Tokens):
            return self._push(event)
        self._done = True
        if isinstance(event, m.Finished):
            self.cached_tokens = event.cached_tokens
            return self._finish(event.reason)
        self._count("refused" if isinstance(event, m.Refused) else "failed")
        raise _error(event)

    def _push(self, event: m.Tokens) -> Piece:
        self._observe(len(event.tokens))
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        piece = Piece(prompt_logprobs=event.prompt_logprobs)
        if self._drop_output:
            return piece
        logprobs = event.logprobs
        if logprobs is not None and len(logprobs) != len(event.tokens):
            self.abort()
            raise EngineError(f"{len(logprobs)} log-probabilities came with {len(event.tokens)} tokens")
        for token in event.tokens:
            piece.tokens.append(token)
            piece.offsets.append(self._length)
            if self._detokenizer is None:
                continue
            piece.text += self._show(self._detokenizer.push(token))
            if self._stops is not None and self._stops.found:
                break
        self.num_tokens += len(piece.tokens)
        if logprobs is not None:
            piece.logprobs = logprobs[: len(piece.tokens)]
        if self._stops is not None and self._stops.found:
            self._done = True
            self._stream.stop(self.num_tokens)
            self._count("stop")
            piece.finish_reason = "stop"
        return piece

    def _finish(self, reason: str) -> Piece:
        piece = Piece(finish_reason=reason)
        if self._detokenizer is not None and not self._drop_output:
            piece.text = self._show(self._detokenizer.finish())
            if self._stops is not None:
                if self._stops.found:
                    piece.finish_reason = "stop"
                piece.text += self._stops.finish()
        self._count(piece.finish_reason or reason)
        return piece

    def _show(self, text: str) -> str:
        self._length += len(text)
        return text if self._stops is None else self._stops.push(text)

    def _observe(self, tokens: int) -> None:
        now = time.monotonic()
        if self.num_tokens == 0:
            self._metrics.ttft.observe(now - self._began)
        elif tokens:
            for _ in range(tokens):
                self._metrics.itl.observe((now - self._last) / tokens)
        self._last = now

    def _count(self, outcome: str) -> None:
        self._metrics.finished(
            outcome,
            seconds=time.monotonic() - self._began,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_tokens,
        )


def _error(event: m.Refused | m.Cancelled | m.Failed) -> ApiError:
    match event:
        case m.Refused():
            return ApiError(
                event.status, event.message, param=event.field, code=event.code, retry_after_s=event.retry_after_s
            )
        case m.Cancelled(reason="timeout"):
            return ApiError(504, "the request took longer than the server allows", code="timeout")
        case m.Cancelled():
            return ApiError(503, f"the request was cancelled ({event.reason})", code="cancelled")
        case m.Failed():
            return ApiError(500, f"request {event.request_id} failed: {event.message}", code="engine_error")


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """(number of the answer, piece) of several answers as they come. The first error ends it; the caller aborts."""
    waiting = {asyncio.ensure_future(answer.__anext__()): i for i, answer in enumerate(answers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    piece = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(answers[index].__anext__())] = index
                yield index, piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
