"""The drafts of a step, from texts, chances and gain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scheduler.drafts.chances import Chances
from scheduler.drafts.gain import Gain, Offer
from scheduler.drafts.predicted import Predicted
from scheduler.drafts.texts import Proposer
from scheduler.plan import StepPlan
from scheduler.request import Request


class Place(NamedTuple):
    """A row that may have drafts, and how many at most (at least 1)."""

    request: Request
    most: int


class _Rest(NamedTuple):
    """A request is not looked at before its output is so long, for which it had to grow by so many tokens."""

    until: int
    tokens: int


_NO_REST = _Rest(0, 0)
MOST_REST = 16  # tokens
LIKELY = 0.5  # drafts of such a chance are looked at in each step, for they may soon pay


class Drafter:
    """`num_drafts`: of a row, at most. `always`: a step checks all that are proposed, whatever they cost."""

    def __init__(self, proposer: Proposer, num_drafts: int, *, always: bool = False) -> None:
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._gain = None if always else Gain()
        self._chances = Chances()
        self._rests: dict[Request, _Rest] = {}

    def drafts(self, places: Sequence[Place], rows: int, *, mixed: bool) -> list[Sequence[int]]:
        """Of each place, for a step in which `rows` rows decode; `mixed`: beside prefill. A look-up costs time that a
        small model's step cannot spare: requests whose drafts are seldom right and not checked are looked at less."""
        if self._gain is None:
            return [self._proposer.propose(request, min(most, self._num_drafts)).tokens for request, most in places]
        chosen: list[Sequence[int]] = [()] * len(places)
        due = [i for i, (request, _) in enumerate(places) if len(request.output) >= self._rest(request).until]
        if not due:
            return chosen
        proposals, offers = [], []
        for request, most in (places[i] for i in due):
            proposal = self._proposer.propose(request, min(most, self._num_drafts))
            self._chances.watch(request, proposal)
            proposals.append(proposal.tokens)
            offers.append(Offer(len(proposal.tokens), self._chances.of(request, proposal.matched)))
        counts = self._gain.choose(offers, rows, mixed=mixed)
        for i, tokens, offer, count in zip(due, proposals, offers, counts, strict=True):
            request = places[i].request
            likely = offer.drafts > 0 and offer.chance >= LIKELY
            rest = 0 if count or likely else min(MOST_REST, 2 * self._rest(request).tokens + 1)
            self._rests[request] = _Rest(len(request.output) + rest, rest)
            chosen[i] = tokens[:count]
        return chosen

    def drafts_from(self, requests: Iterable[Request]) -> dict[str, int]:
        """Of those requests that are not looked at yet whatever their next step brings, by their ids: how long the
        output must be."""
        rests = ((request, self._rest(request).until) for request in requests)
        return {request.request_id: until for request, until in rests if until > len(request.output) + 1}

    def take(self, request: Request, tokens: Sequence[int]) -> None:
        """What the model itself says may follow the request's output. ValueError if proposals are made otherwise."""
        if not isinstance(self._proposer, Predicted):
            raise ValueError(f"proposals are made by {type(self._proposer).__name__}, not by the model")
        self._proposer.take(request, tokens)

    def observe(self, plan: StepPlan, tokens: int, seconds: float) -> None:
        """How long a step took, and how many tokens came of it."""
        if self._gain is not None and all(row.is_decode and row.samples for row in plan.rows):
            self._gain.observe(len(plan.rows), plan.num_tokens - len(plan.rows), tokens, seconds)

    def end(self, request: Request) -> None:
        """The request has ended."""
        self._chances.end(request)
        self._proposer.end(request)
        self._rests.pop(request, None)

    def _rest(self, request: Request) -> _Rest:
        return self._rests.get(request, _NO_REST)
