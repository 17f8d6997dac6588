"""What the generating routes share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request

from api.generation import Answer, Piece, merged
from api.service import Service
from api.tenants import Tenant

_PATIENCE_S = 10.0  # how long a stream's status line waits for the engine's first word


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def tenant_of(request: Request) -> Tenant:
    """Raises ApiError 401."""
    return service_of(request).keys.tenant(request.headers.get("authorization"))


def abort_all(answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer.abort()


async def collect(answers: Sequence[Answer]) -> list[Piece]:
    """Each answer as one piece."""
    wholes = [Piece() for _ in answers]
    texts: list[list[str]] = [[] for _ in answers]
    async for index, piece in merged(answers):
        whole = wholes[index]
        texts[index].append(piece.text)
        whole.tokens += piece.tokens
        whole.offsets += piece.offsets
        whole.finish_reason = piece.finish_reason
        whole.prompt_logprobs = whole.prompt_logprobs or piece.prompt_logprobs
        if piece.logprobs is not None:
            whole.logprobs = whole.logprobs or []
            whole.logprobs += piece.logprobs
    for whole, parts in zip(wholes, texts, strict=True):
        whole.text = "".join(parts)
    return wholes


async def first_and_rest(pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[tuple[int, Piece]]:
    """The same pieces, after the first has come: an error before it still decides the HTTP status. Not for ever:
    in a long queue the stream begins without it."""
    first = asyncio.ensure_future(_next(pieces))
    try:
        await asyncio.wait({first}, timeout=_PATIENCE_S)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if first.done():
        first.result()
    return _chain(first, pieces)


async def _chain(
    first: asyncio.Future[tuple[int, Piece]], rest: AsyncIterator[tuple[int, Piece]]
) -> AsyncIterator[tuple[int, Piece]]:
    yield await first
    async for item in rest:
        yield item


async def _next(pieces: AsyncIterator[tuple[int, Piece]]) -> tuple[int, Piece]:
    return await pieces.__anext__()
