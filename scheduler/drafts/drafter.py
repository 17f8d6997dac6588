"""The drafts of a step, from texts, chances and gain."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from scheduler.drafts.chances import Chances
from scheduler.drafts.gain import Gain, Offer
from scheduler.drafts.predicted import Predicted
from scheduler.drafts.texts import Proposer
from scheduler.plan import StepPlan, Wanted
from scheduler.request import Request


class Place(NamedTuple):
    """A row that is due and may have drafts, and how many at most (at least 1)."""

    request: Request
    most: int


class _Rest(NamedTuple):
    """A request is not looked at before its output is so long, for which it had to grow by so many tokens; `taken`: of
    its drafts when it was looked at last."""

    until: int
    tokens: int
    taken: int = 0


_NO_REST = _Rest(0, 0)
MOST_REST = 16  # tokens
LOOK_UPS, LOOK_UPS_MOST = 0.01, 2.0  # of the steps' time for look-ups that save nothing; saved up, at most, in steps
LIKELY = 0.5  # drafts of such a chance are looked at in each step, for they may soon pay, if they cost but a look-up


class Drafter:
    """`num_drafts`: of a row, at most. `always`: a step checks all that are proposed, whatever they cost. `clock`: of
    this thread's time in seconds, in which look-ups are measured."""

    def __init__(
        self,
        proposer: Proposer,
        num_drafts: int,
        *,
        always: bool = False,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._proposer = proposer
        self._num_drafts = num_drafts
        self._costly = isinstance(proposer, Predicted)  # the model computes what it proposes
        self._gain = None if always else Gain()
        self._chances = Chances()
        self._rests: dict[Request, _Rest] = {}
        self._clock = clock
        self._time_left: float | None = None  # for look-ups, in seconds; None: not counted, or before the first step
        self._expected = False  # the next step was waited for because drafts are expected to pay in it

    @property
    def may_look_up(self) -> bool:
        """False while look-ups have taken more than their share of the steps' time and what their drafts have saved,
        except in a step that was waited for to have drafts."""
        return self._expected or self._time_left is None or self._time_left >= 0

    def is_due(self, request: Request) -> bool:
        """A look-up costs time that a small model's step cannot spare: requests whose drafts are seldom right and not
        checked are looked at less."""
        return len(request.output) >= self._rest(request).until

    def drafts(self, places: Sequence[Place], rows: int, *, mixed: bool) -> list[Sequence[int]]:
        """Of each place, for a step in which `rows` rows decode; `mixed`: beside prefill."""
        self._expected = False
        if self._gain is None:
            return [self._proposer.propose(request, min(most, self._num_drafts)).tokens for request, most in places]
        return self._choose(self._gain, places, rows, mixed, in_flight=0)

    def follow(self, places: Sequence[Place], rows: int, *, mixed: bool) -> bool:
        """Whether drafts of one of the places, each of which has a token in flight, are expected to pay behind it."""
        if self._gain is None:
            return True
        self._expected = any(self._choose(self._gain, places, rows, mixed, in_flight=1))
        return self._expected

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What it takes counts as time of look-ups: `drafts`, `follow` and the way to them."""
        began = self._clock()
        yield
        if self._time_left is not None:
            self._time_left -= self._clock() - began

    def _choose(
        self, gain: Gain, places: Sequence[Place], rows: int, mixed: bool, in_flight: int
    ) -> list[Sequence[int]]:
        """The first `in_flight` tokens of each proposal stand for those that the engine is about to deliver."""
        chosen: list[Sequence[int]] = []
        proposals, offers = [], []
        for request, most in places:
            proposal = self._proposer.propose(request, min(most, self._num_drafts) + in_flight)
            self._chances.watch(request, proposal)
            proposals.append(proposal.tokens[in_flight:])
            chance = self._chances.of(request, proposal.matched)
            offers.append(Offer(len(proposals[-1]), chance, chance**in_flight))
        counts = gain.choose(offers, rows, mixed=mixed)
        for (request, _), tokens, offer, count in zip(places, proposals, offers, counts, strict=True):
            likely = offer.drafts > 0 and offer.chance >= LIKELY
            rest = 0 if count or (likely and not self._costly) else min(MOST_REST, 2 * self._rest(request).tokens + 1)
            self._rests[request] = _Rest(len(request.output) + rest, rest, count)
            chosen.append(tokens[:count])
        return chosen

    def wanted(self, requests: Iterable[Request]) -> dict[str, Wanted]:
        """By request id what the model is to propose behind the next step: twice as many as were taken last and one
        more, none while the request rests. Empty: all that it can, or it is not the model that proposes."""
        if self._gain is None or not self._costly:
            return {}
        rests = ((request.request_id, self._rest(request)) for request in requests)
        return {name: Wanted(rest.until, min(2 * rest.taken + 1, self._num_drafts)) for name, rest in rests}

    def take(self, request: Request, tokens: Sequence[int]) -> None:
        """What the model itself says may follow the request's output. ValueError if proposals are made otherwise."""
        if not isinstance(self._proposer, Predicted):
            raise ValueError(f"proposals are made by {type(self._proposer).__name__}, not by the model")
        self._proposer.take(request, tokens)

    def observe(self, plan: StepPlan, tokens: int, seconds: float) -> None:
        """How long a step took, and how many tokens came of it."""
        if self._gain is None or not 0 < seconds < math.inf:
            return
        most, saved = LOOK_UPS_MOST * seconds, 0.0
        if plan.num_decodes == len(plan.rows):
            drafts = plan.num_tokens - len(plan.rows)
            saved = self._gain.observe(len(plan.rows), drafts, tokens, seconds, ahead=plan.ahead)
        if self._costly:  # what the model has proposed is there: nothing is looked up
            return
        left = most if self._time_left is None else self._time_left
        self._time_left = min(most, left + LOOK_UPS * seconds + max(0.0, saved))

    def end(self, request: Request) -> None:
        """The request has ended."""
        self._chances.end(request)
        self._proposer.end(request)
        self._rests.pop(request, None)

    def _rest(self, request: Request) -> _Rest:
        return self._rests.get(request, _NO_REST)
