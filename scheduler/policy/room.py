"""What a step still takes of prefill tokens."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import StepRow, pairs
from scheduler.policy.cost import CostModel


class Room:
    """So many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def fit(self, start: int, wanted: int) -> int:
        """How many of so many tokens from position `start` on fit; if not all, nothing will after them."""
        return min(wanted, self.num_tokens)

    def take(self, start: int, num_tokens: int) -> None:
        """They are in the step."""
        self.num_tokens -= num_tokens


class PacedRoom(Room):
    """And no more than keep the step, with its decode rows, within a target; but `least` tokens always, so that
    prefill goes on even if decoding alone is over it."""

    def __init__(
        self, num_tokens: int, decodes: Sequence[StepRow], cost: CostModel, target_s: float, least: int
    ) -> None:
        super().__init__(num_tokens)
        self._cost, self._target_s, self._least = cost, target_s, least
        self._planned = len(decodes)
        self._read = sum(pairs(row.start, row.num_tokens) for row in decodes)
        if (cautious := cost.cautious_chunk) is not None:
            self.num_tokens = min(num_tokens, cautious)

    def fit(self, start: int, wanted: int) -> int:
        size = min(wanted, self.num_tokens)
        if self._cost.cautious_chunk is None:
            size = self._cost.chunk(self._planned, self._read, start, size, self._target_s, self._least)
        if size < wanted:
            self.num_tokens = size
        return size

    def take(self, start: int, num_tokens: int) -> None:
        super().take(start, num_tokens)
        self._least -= num_tokens
        self._planned += num_tokens
        self._read += pairs(start, num_tokens)
