"""The mask of one request: a grammar's matcher that follows the request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.errors import UserError
from engine.grammar.masks import TokenBitmask, TokenMask

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


_MAX_MESSAGE = 500


@dataclass(frozen=True)
class Ahead:
    """Masks in flight: after `num_output` tokens, and after each of `drafts`. `words` [1 + drafts, W] are valid once
    `done` is."""

    num_output: int
    drafts: tuple[int, ...]
    words: TokenBitmask
    done: Future[None]

    def row(self, num_output: int) -> TokenBitmask:
        self.done.result()
        row: TokenBitmask = self.words[num_output - self.num_output]
        return row


class GrammarMask(TokenMask):
    """`after`: the token behind which the grammar begins, None: at once. `opens`: only if this token comes first, else
    at once; as far as the grammar allows, `spaces` (tokens of white space) may stand before it, which GLM-4.6 writes
    there. The matcher has seen the committed output; drafts are tried and taken back."""

    name = "the grammar"

    def __init__(self, after: int | None, opens: int | None = None, spaces: frozenset[int] = frozenset()) -> None:
        self.matcher: LLMatcher | None = None  # once it is compiled
        self._after = after
        self._opens = opens  # until the first token that is no space has come
        self._spaces = spaces
        self._unspaced: LLMatcher | None = None  # as it was before spaces, as long as they may be before reasoning
        self._begin = 0 if after is None else None  # output tokens before the grammar, once it has begun
        self._seen = 0  # output tokens looked at
        self.ahead: Ahead | None = None

    def applies(self, num_output: int) -> bool:
        return True

    def restrict(self, words: TokenBitmask, output: Sequence[int]) -> None:
        """Waits for the mask, which `Grammars.prefetch` has begun. Raises UserError if the grammar went beyond a
        limit."""
        if self.matcher is None or self.ahead is None:
            raise RuntimeError("a mask is asked for before it was begun")
        words &= self.ahead.row(len(output))
        if self.matcher.is_error():
            raise UserError(f"the grammar cannot be followed any further: {self.matcher.get_error()[:_MAX_MESSAGE]}")

    def follow(self, output: Sequence[int]) -> None:
        """The output's new tokens."""
        assert self.matcher is not None  # the request was held until then
        new, self._seen = list(output[self._seen :]), len(output)
        if self._opens is not None:
            new = self._first(self._opens, new)
        if self._begin is None and self._after in new:
            new = new[new.index(self._after) + 1 :]
            self._begin = self._seen - len(new)
        if self._begin is not None and new:
            self.matcher.consume_tokens(new)

    def _first(self, opens: int, new: list[int]) -> list[int]:
        """Of the first tokens, those that are left when spaces were looked at."""
        assert self.matcher is not None
        spaces = self._leading(new)
        if spaces < len(new):
            if new[spaces] != opens:
                self._begin = 0
            elif self._unspaced is not None:
                self.matcher = self._unspaced
            self._opens = self._unspaced = None
            return new
        if new:
            self._unspaced = self._unspaced or self.matcher.deep_copy()
            self.matcher.consume_tokens(new)
        return []

    def _leading(self, tokens: Sequence[int]) -> int:
        """How many spaces come first."""
        return next((i for i, token in enumerate(tokens) if token not in self._spaces), len(tokens))

    def places(self, drafts: Sequence[int]) -> Places:
        """Where in `drafts` the grammar applies."""
        assert self.matcher is not None
        if self._begin is not None:
            return Places([(self.matcher, 0, list(drafts))])
        if self._opens is None:
            return Places(self._behind(self.matcher, 0, drafts))
        spaces = self._leading(drafts)
        also = (1 + spaces, self._opens)
        if spaces == len(drafts) or drafts[spaces] != self._opens:
            return Places([(self.matcher, 0, list(drafts))], also)
        behind = self._unspaced or (self.matcher.deep_copy() if spaces else self.matcher)  # each tries one text
        opened = spaces + 1
        return Places([(self.matcher, 0, list(drafts[:spaces])), *self._behind(behind, opened, drafts[opened:])], also)

    def _behind(self, matcher: LLMatcher, before: int, drafts: Sequence[int]) -> list[tuple[LLMatcher, int, list[int]]]:
        """In drafts of which the first so many have been looked at."""
        if self._after not in drafts:
            return []
        start = drafts.index(self._after) + 1
        return [(matcher, before + start, list(drafts[start:]))]


class Places(NamedTuple):
    """`at`: a matcher begins to apply after so many drafts, and goes on with these. `also`: after none and each of the
    first drafts, so many places, this token may come beside what the grammar allows."""

    at: list[tuple[LLMatcher, int, list[int]]]
    also: tuple[int, int] | None = None


def fill(
    executor: LLExecutor, masks: Sequence[tuple[GrammarMask, Sequence[int], Sequence[int]]], words: TokenBitmask
) -> None:
    """Masks of (mask, output, drafts), 1 + drafts rows each of `words` uint32 [R, W], which begin as all ones: all
    threads of `executor` work on them, and Python's lock is free."""
    single: list[tuple[LLMatcher, int]] = []
    drafted: list[tuple[LLMatcher, int, list[int]]] = []
    row = 0
    also: list[tuple[int, int]] = []
    for mask, output, drafts in masks:
        mask.follow(output)
        places = mask.places(drafts)
        for matcher, start, rest in places.at:
            if rest:
                drafted.append((matcher, row + start, rest))
            else:
                single.append((matcher, row + start))
        if places.also is not None:
            count, token = places.also
            also += [(row + i, token) for i in range(count)]
        row += 1 + len(drafts)
    where, width = words.ctypes.data, words.shape[1] * words.itemsize
    if single:
        executor.unsafe_compute_mask_ptr(single, where, width, len(words))
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, where, width, len(words))
    for place, token in also:
        words[place, token // 32] |= np.uint32(1 << token % 32)


def all_ones(rows: int, vocab_size: int) -> TokenBitmask:
    return np.full((rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
