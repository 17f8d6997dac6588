"""Calls to the engine: those of a start, and how one is refused."""

from __future__ import annotations

from engine import messages as m
from engine.config import EngineConfig, startup_adapters
from engine.errors import UserError


class CallRefused(UserError):
    """The engine answered a call with an error of the caller's making."""

    def __init__(self, message: str, status: int, field: str | None) -> None:
        super().__init__(message, field)
        self.status = status if status >= 400 else 400


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
