"""Calls to the engine: those that wait, those of a start, and how one is refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeAlias

from engine import messages as m
from engine.config import EngineConfig, startup_adapters
from engine.errors import UserError

Call: TypeAlias = m.LoadAdapter | m.UnloadAdapter | m.Tune | m.GetStats | m.GetLive | m.Drain


class CallRefused(UserError):
    """The engine answered a call with an error of the caller's making."""

    def __init__(self, message: str, status: int, field: str | None) -> None:
        super().__init__(message, field)
        self.status = status if status >= 400 else 400


class Calls:
    """Those that wait for their replies."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[m.Reply]] = {}
        self._ids = itertools.count(1)

    def new_id(self) -> int:
        return next(self._ids)

    async def reply(self, call_id: int, send: Callable[[], None]) -> m.Reply:
        """What is answered to what `send` sends, or the error of `fail`."""
        future: asyncio.Future[m.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        send()
        try:
            return await future
        finally:
            del self._waiting[call_id]

    def answer(self, reply: m.Reply) -> None:
        """One that nobody waits for any more is dropped."""
        future = self._waiting.get(reply.call_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail(self, error: Exception) -> None:
        """All of them, for the engine has ended."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def checked(reply: m.Reply) -> m.Reply:
    """Raises CallRefused for an error."""
    if not reply.ok:
        raise CallRefused(reply.error or "the engine gave no reason", reply.status, reply.field)
    return reply


def startup_loads(config: EngineConfig) -> dict[str, m.LoadAdapter]:
    """`--adapters` as calls, by name. Raises UserError."""
    return {
        name: m.LoadAdapter(
            call_id=0,
            name=name,
            path=path,
            expert_scaling=config.expert_scaling,
            expert_b_layout=config.expert_b_layout,
            pinned=name in config.pinned_adapters,
        )
        for name, path in startup_adapters(config)
    }
