"""Proposals of a layer of the model itself, which the engine hands over behind each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.drafts.texts import NOTHING, Proposal
from scheduler.request import Request


class _Taken(NamedTuple):
    after: int  # tokens of output that they follow
    tokens: Sequence[int]


class Predicted:
    """A `Proposer` of what it was given last, as long as nothing has followed since."""

    def __init__(self) -> None:
        self._taken: dict[Request, _Taken] = {}

    def take(self, request: Request, tokens: Sequence[int]) -> None:
        """What may follow the request's output."""
        self._taken[request] = _Taken(len(request.output), tokens)

    def propose(self, request: Request, most: int) -> Proposal:
        taken = self._taken.get(request)
        if taken is None or taken.after != len(request.output):
            return NOTHING
        return Proposal(taken.tokens[:most], 0)

    def end(self, request: Request) -> None:
        self._taken.pop(request, None)
