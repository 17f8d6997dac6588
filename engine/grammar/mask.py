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
    at once. The matcher has seen the committed output; drafts are tried and taken back."""

    name = "the grammar"

    def __init__(self, after: int | None, opens: int | None = None) -> None:
        self.matcher: LLMatcher | None = None  # once it is compiled
        self._after = after
        self._opens = opens  # until the first token has come
        self._begin = 0 if after is None else None  # output tokens before the grammar, once it has begun
        self._seen = 0  # output tokens looked at
        self.ahead: Ahead | None = None

    def applies(self, num_output: int) -> bool:
        return True

    def restrict(self, words: TokenBitmask, output: Sequence[int]) -> None:
        """Waits for the mask, which `Grammars.look_ahead` has begun. Raises UserError if the grammar went beyond a
        limit."""
        if self.matcher is None or self.ahead is None:
            raise RuntimeError("a mask is asked for before it was begun")
        words &= self.ahead.row(len(output))
        if self.matcher.is_error():
            raise UserError(f"the grammar cannot be followed any further: {self.matcher.get_error()[:_MAX_MESSAGE]}")

    def follow(self, output: Sequence[int]) -> LLMatcher:
        """The matcher, after the output's new tokens."""
        assert self.matcher is not None  # the request was held until then
        new, self._seen = list(output[self._seen :]), len(output)
        if self._opens is not None and new:
            if new[0] != self._opens:
                self._begin = 0
            self._opens = None
        if self._begin is None and self._after in new:
            new = new[new.index(self._after) + 1 :]
            self._begin = self._seen - len(new)
        if self._begin is not None and new:
            self.matcher.consume_tokens(new)
        return self.matcher

    def places(self, drafts: Sequence[int]) -> Places:
        """Where in `drafts` the grammar applies."""
        if self._begin is not None:
            return Places([(0, list(drafts))])
        if self._opens is None:
            return Places(self._behind(0, drafts))
        if not drafts or drafts[0] != self._opens:
            return Places([(0, list(drafts))], self._opens)
        return Places([(0, []), *self._behind(1, drafts[1:])], self._opens)

    def _behind(self, before: int, drafts: Sequence[int]) -> list[tuple[int, list[int]]]:
        """In drafts of which the first so many have been looked at."""
        if self._after not in drafts:
            return []
        start = drafts.index(self._after) + 1
        return [(before + start, list(drafts[start:]))]


class Places(NamedTuple):
    """`at`: the grammar begins to apply after so many drafts, and goes on with these. `also`: the token that may come
    beside it in place of the first draft."""

    at: list[tuple[int, list[int]]]
    also: int | None = None


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
        matcher = mask.follow(output)
        places = mask.places(drafts)
        for start, rest in places.at:
            if rest:
                drafted.append((matcher, row + start, rest))
            else:
                single.append((matcher, row + start))
        if places.also is not None:
            also.append((row, places.also))
        row += 1 + len(drafts)
    where, width = words.ctypes.data, words.shape[1] * words.itemsize
    if single:
        executor.unsafe_compute_mask_ptr(single, where, width, len(words))
    if drafted:
        executor.unsafe_compute_mask_ptr_with_draft_token(drafted, where, width, len(words))
    for first, token in also:
        words[first, token // 32] |= np.uint32(1 << token % 32)


def all_ones(rows: int, vocab_size: int) -> TokenBitmask:
    return np.full((rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
