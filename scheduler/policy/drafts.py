"""Draft tokens: guesses at a request's next tokens, which one step checks all at once.

A row with k drafts computes 1 + k positions and samples after each. Drafts are kept as far as they equal what was
sampled, and one sampled token follows them: 1 .. k + 1 tokens a step, the same ones as without drafts.
"""

from __future__ import annotations

from typing import Protocol

from scheduler.request import Request

_SIZES = (4, 2)  # lengths of the n-grams that are looked up, the longest first
_CATCH_UP = 4096  # tokens indexed in one call, so that a long prompt does not hold up the step


class Proposer(Protocol):
    """Asked once a step for each request that decodes and has no token in flight."""

    def propose(self, request: Request) -> list[int]:
        """Guesses at the tokens that follow prompt and output; any number, the scheduler cuts them to what fits."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...


class NgramProposer:
    """Prompt lookup: what followed the last tokens where they stood before, in the prompt or the output.

    Memory: two dictionary entries a token; time: a constant a token, as each is indexed once.
    """

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._indices: dict[Request, _Index] = {}

    def propose(self, request: Request) -> list[int]:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _Index()
        index.extend(request)
        return index.continuation(self._num_drafts)

    def forget(self, request: Request) -> None:
        self._indices.pop(request, None)


class _Index:
    """Where each n-gram of the tokens so far was last followed by another token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._behind = True
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after it

    def extend(self, request: Request) -> None:
        tokens, split = self._tokens, len(request.prompt)
        start, total = len(tokens), split + len(request.output)
        end = min(total, start + _CATCH_UP)
        tokens += request.prompt[start:end] + request.output[max(0, start - split) : max(0, end - split)]
        for position in range(start, end):
            for size in _SIZES:
                if position >= size:
                    self._next[tuple(tokens[position - size : position])] = position
        self._behind = end < total

    def continuation(self, count: int) -> list[int]:
        """What followed the last tokens the last time; it goes on in a circle where it reaches the end."""
        tokens = self._tokens
        if self._behind:
            return []
        for size in _SIZES:
            start = self._next.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(count)]
        return []
