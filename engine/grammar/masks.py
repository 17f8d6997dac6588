"""Token masks: what may come next in a request's output, as a bit per token.

A mask is asked after the forward of the step was launched and the tokens before are known; a grammar's automaton may
take until then. Bit t of the words is token t (word t // 32, bit t % 32), 1 = allowed: the form in which grammar
engines deliver theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import UserError
from scheduler.request import SamplingParams, ThinkingBudget

TokenBitmask = NDArray[np.uint32]  # [ceil(V / 32)]
Masks = Mapping[str, Sequence["TokenMask"]]  # by request id; a request without any is left out
_FIRST_TOKENS = 8  # of an output, among which the one that begins reasoning is
NO_MASKS: Masks = MappingProxyType({})


class TokenMask(ABC):
    """One source of masks for one request. `name`: what asks for it, for messages."""

    name: ClassVar[str]

    @abstractmethod
    def applies(self, num_output: int) -> bool:
        """Whether it may forbid something after `num_output` output tokens, whichever they are. Asked when the forward
        is launched: the rows of other requests can do without logits."""

    @abstractmethod
    def restrict(self, words: TokenBitmask, output: Sequence[int]) -> None:
        """Clear the bits of the tokens that may not follow `output`. Whatever this raises fails its request alone."""


class DenyMask(TokenMask):
    """Forbids tokens, while the output is shorter than `until` tokens."""

    name = "min_tokens"

    def __init__(self, tokens: Iterable[int], vocab_size: int, until: int) -> None:
        self._words = ~words_of(tokens, vocab_size)
        self._until = until

    def applies(self, num_output: int) -> bool:
        return num_output < self._until

    def restrict(self, words: TokenBitmask, output: Sequence[int]) -> None:
        if self.applies(len(output)):
            words &= self._words


class AllowMask(TokenMask):
    """Allows some tokens only."""

    name = "allowed_token_ids"

    def __init__(self, tokens: Iterable[int], vocab_size: int) -> None:
        self._words = words_of(tokens, vocab_size)

    def applies(self, num_output: int) -> bool:
        return True

    def restrict(self, words: TokenBitmask, output: Sequence[int]) -> None:
        words &= self._words


class BadWords(TokenMask):
    """Forbids the last token of each of some sequences after the ones before it."""

    name = "bad_words"

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._ends = [(list(sequence[:-1]), sequence[-1]) for sequence in sequences]
        self._shortest = min(len(before) for before, _ in self._ends)

    def applies(self, num_output: int) -> bool:
        return num_output >= self._shortest

    def restrict(self, words: TokenBitmask, output: Sequence[int]) -> None:
        for before, last in self._ends:
            if not before or list(output[-len(before) :]) == before:
                words[last // 32] &= ~np.uint32(1 << last % 32)


class Thinking(TokenMask):
    """Ends reasoning that has become too long."""

    name = "thinking_token_budget"

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget

    def applies(self, num_output: int) -> bool:
        least = self._budget.num_tokens
        return least <= num_output < least + _FIRST_TOKENS + len(self._budget.closing)

    def restrict(self, words: TokenBitmask, output: Sequence[int]) -> None:
        budget = self._budget
        start = 0
        if budget.begin is not None:
            head = list(output[:_FIRST_TOKENS])
            if budget.begin not in head:
                return
            start = head.index(budget.begin) + 1
        over = start + budget.num_tokens
        if not 0 <= len(output) - over < len(budget.closing) or budget.end in output[start:over]:
            return
        token = budget.closing[len(output) - over]
        allowed = words[token // 32] & np.uint32(1 << token % 32)
        words[:] = 0
        words[token // 32] = allowed


def masks_of(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> list[TokenMask]:
    """What a request's parameters ask for."""
    masks: list[TokenMask] = []
    if params.min_tokens:
        masks.append(DenyMask(params.ending_tokens(eos_token_ids), vocab_size, params.min_tokens))
    if params.bad_words:
        masks.append(BadWords(params.bad_words))
    if params.allowed_token_ids is not None:
        masks.append(AllowMask(params.allowed_token_ids, vocab_size))
    if params.thinking is not None:
        masks.append(Thinking(params.thinking))
    return masks


def words_of(tokens: Iterable[int], vocab_size: int) -> TokenBitmask:
    """A bitmask with the bits of some tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def allowed_words(masks: Sequence[TokenMask], output: Sequence[int], vocab_size: int) -> TokenBitmask:
    """What all of them allow. Raises UserError if that is nothing."""
    words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    if vocab_size % 32:
        words[-1] = (1 << vocab_size % 32) - 1
    for mask in masks:
        mask.restrict(words, output)
    if not words.any():
        names = " and ".join(sorted({mask.name for mask in masks if mask.applies(len(output))}))
        raise UserError(f"no token may come next, after {len(output)} of output: none is left by {names}")
    return words
