"""Proposals looked up in texts: what followed a request's last tokens where they stood before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from scheduler.request import Request

LONG, SHORT = 4, 2  # lengths of the n-grams that are looked up
MOST_MATCHED = 64  # longer matches are not told apart
ENOUGH = 16  # a match of the request's own text after which no other is looked at
MOST_TEXTS = 32  # of a tenant, that are looked at
CATCH_UP = 4096  # tokens indexed in one call, so that a long prompt does not hold up the step
_SHIFT = 32  # bits of a token id in an n-gram's key


class Proposal(NamedTuple):
    """Guesses at the tokens that follow, and how many tokens before them are the same where they were found."""

    tokens: Sequence[int]
    matched: int


NOTHING = Proposal((), 0)


class Proposer(Protocol):
    """Asked for requests that decode."""

    def propose(self, request: Request, most: int) -> Proposal:
        """At most `most` tokens, at least 1, that may follow prompt and output."""
        ...

    def end(self, request: Request) -> None:
        """The request has ended."""
        ...


class OwnText:
    """Prompt lookup: in the request's own prompt and output."""

    def __init__(self) -> None:
        self._texts: dict[Request, Text] = {}

    def propose(self, request: Request, most: int) -> Proposal:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = self.begin(request)
        text.extend(request)
        return text.propose(most) if text.complete else NOTHING

    def begin(self, request: Request) -> Text:
        """An index of the request's text as far as there is one."""
        return Text()

    def end(self, request: Request) -> None:
        self._texts.pop(request, None)


class RecentTexts(OwnText):
    """Also in texts of the same tenant that have ended: the longest match counts, the request's own where two are as
    long. A request whose prompt goes on from one of them, as the next turn of a conversation does, takes its index
    over. `most_tokens` bounds what is kept of ended requests, of all tenants together, the least recent go first."""

    def __init__(self, most_tokens: int = 1 << 17) -> None:
        super().__init__()
        self._most_tokens = most_tokens
        self._ended: dict[Text, str] = {}  # tenants, in order of use
        self._by_tenant: dict[str, list[Text]] = {}  # the newest last
        self._held = 0  # tokens

    def begin(self, request: Request) -> Text:
        for text in reversed(self._by_tenant.get(request.tenant, [])):
            if text.tokens == request.prompt[: len(text.tokens)]:
                self._drop(text)
                return text
        return Text()

    def propose(self, request: Request, most: int) -> Proposal:
        best = super().propose(request, most)
        own = self._texts[request]
        if not own.complete or best.matched >= ENOUGH:
            return best
        used = None
        for text in self._by_tenant.get(request.tenant, [])[-MOST_TEXTS:]:
            found = text.propose_after(own.tokens, most)
            if found.matched > best.matched:
                best, used = found, text
        if used is not None:
            self._ended[used] = self._ended.pop(used)  # the last to go
        return best

    def end(self, request: Request) -> None:
        text = self._texts.pop(request, None)
        if text is None or len(text.tokens) > self._most_tokens:
            return
        self._ended[text] = request.tenant
        self._by_tenant.setdefault(request.tenant, []).append(text)
        self._held += len(text.tokens)
        while self._held > self._most_tokens:
            self._drop(next(iter(self._ended)))

    def _drop(self, text: Text) -> None:
        tenant = self._ended.pop(text)
        texts = self._by_tenant[tenant]
        texts.remove(text)
        if not texts:
            del self._by_tenant[tenant]
        self._held -= len(text.tokens)


class Text:
    """Tokens, and where each n-gram of them was last followed by another token.

    Memory: two dictionary entries a token; time: a constant a token, as each is indexed once.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.complete = False  # nothing of the request is left to index
        self._after: dict[int, int] = {}  # n-gram -> position of the token after it

    def extend(self, request: Request) -> None:
        """By what the request has more than this, not too much of it at once."""
        tokens, split = self.tokens, len(request.prompt)
        start, total = len(tokens), split + len(request.output)
        end = min(total, start + CATCH_UP)
        tokens += request.prompt[start:end] + request.output[max(0, start - split) : max(0, end - split)]
        after = self._after
        for position in range(max(start, SHORT), end):
            short = tokens[position - 2] << _SHIFT | tokens[position - 1]
            after[short] = position
            if position >= LONG:
                after[_long(short, tokens[position - 4], tokens[position - 3])] = position
        self.complete = end == total

    def propose(self, most: int) -> Proposal:
        """What followed its own last tokens the last time; it goes on in a circle where it reaches the end."""
        tokens = self.tokens
        start = self._find(tokens, SHORT)
        if start is None:
            return NOTHING
        period = len(tokens) - start
        proposed = tokens[start : start + most] if most <= period else [tokens[start + i % period] for i in range(most)]
        return Proposal(proposed, _matched(tokens, start, tokens, len(tokens)))

    def propose_after(self, tokens: list[int], most: int) -> Proposal:
        """What followed the last ones of `tokens` here; nothing if fewer than LONG of them are found."""
        start = self._find(tokens, LONG)
        if start is None:
            return NOTHING
        return Proposal(self.tokens[start : start + most], _matched(self.tokens, start, tokens, len(tokens)))

    def _find(self, tokens: list[int], least: int) -> int | None:
        """Where the longest n-gram at the end of `tokens`, of at least so many, was last followed by a token."""
        if len(tokens) < SHORT:
            return None
        short = tokens[-2] << _SHIFT | tokens[-1]
        found = self._after.get(_long(short, tokens[-4], tokens[-3])) if len(tokens) >= LONG else None
        return self._after.get(short) if found is None and least <= SHORT else found


def _long(short: int, first: int, second: int) -> int:
    """The key of four tokens: that of the last two, and those before them. No pair has it, as the bit on top says."""
    return ((1 << _SHIFT | first) << _SHIFT | second) << 2 * _SHIFT | short


def _matched(tokens: list[int], end: int, others: list[int], other_end: int) -> int:
    """How many tokens before the two ends are equal."""
    most = min(end, other_end, MOST_MATCHED)
    for count in range(most):
        if tokens[end - 1 - count] != others[other_end - 1 - count]:
            return count
    return most
