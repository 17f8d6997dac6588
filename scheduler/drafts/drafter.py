"""The drafts of a step, from texts, chances and gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scheduler.drafts.chances import Chances
from scheduler.drafts.gain import Gain, Offer
from scheduler.drafts.texts import Proposer
from scheduler.plan import StepPlan
from scheduler.request import Request


class Place(NamedTuple):
    """A row that may have drafts, and how many at most (at least 1)."""

    request: Request
    most: int


class Drafter:
    """`num_drafts`: of a row, at most. `always`: a step checks all that are proposed, whatever they cost."""

    def __init__(self, proposer: Proposer, num_drafts: int, *, always: bool = False) -> None:
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._gain = None if always else Gain()
        self._chances = Chances()

    def drafts(self, places: Sequence[Place], rows: int, *, mixed: bool) -> list[Sequence[int]]:
        """Of each place, for a step in which `rows` rows decode; `mixed`: beside prefill."""
        proposals = [self._proposer.propose(request, min(most, self._num_drafts)) for request, most in places]
        if self._gain is None:
            return [proposal.tokens for proposal in proposals]
        offers = []
        for (request, _), proposal in zip(places, proposals, strict=True):
            self._chances.watch(request, proposal)
            offers.append(Offer(len(proposal.tokens), self._chances.of(request, proposal.matched)))
        counts = self._gain.choose(offers, rows, mixed=mixed)
        return [proposal.tokens[:count] for proposal, count in zip(proposals, counts, strict=True)]

    def observe(self, plan: StepPlan, tokens: int, seconds: float) -> None:
        """How long a step took, and how many tokens came of it."""
        if self._gain is not None and all(row.is_decode and row.samples for row in plan.rows):
            self._gain.observe(len(plan.rows), plan.num_tokens - len(plan.rows), tokens, seconds)

    def end(self, request: Request) -> None:
        """The request has ended."""
        self._chances.end(request)
        self._proposer.end(request)
