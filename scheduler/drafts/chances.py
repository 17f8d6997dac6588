"""How likely a proposal's tokens are right, learnt from proposals whether or not a step checked them: what the model
said in their place shows it, so watching costs no step anything."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.drafts.texts import Proposal
from scheduler.request import Request

_PRIOR_RIGHT, _PRIOR_WRONG = 1.0, 1.0  # before anything was seen
_WEIGHT = 4.0  # tokens that what matches of such length are right in general counts for, beside the request's own
_KEEP_REQUEST, _KEEP_LENGTH = 0.9, 0.98  # of older counts, at each new one
LEAST, MOST = 0.01, 0.98


@dataclass
class _Counts:
    right: float = 0.0
    wrong: float = 0.0

    def add(self, right: int, wrong: int, keep: float) -> None:
        self.right = self.right * keep + right
        self.wrong = self.wrong * keep + wrong


@dataclass
class _Watched:
    """A request's counts, and the proposal that the output has not confirmed or refuted yet."""

    counts: _Counts
    proposal: Proposal | None = None
    start: int = 0  # of the proposal in the output


class Chances:
    """The chance that a token is right whose predecessors in the proposal are: by the request, and by the length of
    the match (as a power of two) over all requests."""

    def __init__(self) -> None:
        self._requests: dict[Request, _Watched] = {}
        self._lengths: dict[int, _Counts] = {}

    def watch(self, request: Request, proposal: Proposal) -> None:
        """A proposal was made. One at a time is watched."""
        watched = self._requests.get(request)
        if watched is None:
            watched = self._requests[request] = _Watched(_Counts())
        self._settle(request, watched)
        if watched.proposal is None and proposal.tokens:
            watched.proposal, watched.start = proposal, len(request.output)

    def of(self, request: Request, matched: int) -> float:
        general = self._lengths.get(matched.bit_length())
        right, wrong = _PRIOR_RIGHT, _PRIOR_WRONG
        if general is not None:
            right, wrong = right + general.right, wrong + general.wrong
        chance = right / (right + wrong)
        if (watched := self._requests.get(request)) is not None:
            own = watched.counts
            chance = (own.right + _WEIGHT * chance) / (own.right + own.wrong + _WEIGHT)
        return min(max(chance, LEAST), MOST)

    def end(self, request: Request) -> None:
        if (watched := self._requests.pop(request, None)) is not None:
            self._settle(request, watched)

    def _settle(self, request: Request, watched: _Watched) -> None:
        if watched.proposal is None:
            return
        proposed, said = watched.proposal.tokens, request.output[watched.start :]
        right = 0
        for one, other in zip(proposed, said, strict=False):
            if one != other:
                break
            right += 1
        if right == len(said) < len(proposed):
            return  # the rest is still to be said
        wrong = int(right < len(proposed))
        watched.counts.add(right, wrong, _KEEP_REQUEST)
        self._lengths.setdefault(watched.proposal.matched.bit_length(), _Counts()).add(right, wrong, _KEEP_LENGTH)
        watched.proposal = None
