"""The head of one or several ranks."""

from __future__ import annotations

import torch

from engine.linear.base import Linear
from engine.ops.base import Ops
from engine.ranks.group import Group


class Head:
    """`part` computes this rank's part of a vocabulary: `width` tokens, of which the last ranks may have fewer."""

    def __init__(self, part: Linear, group: Group, vocabulary: int) -> None:
        self.width = -(-vocabulary // group.size)
        self._first = min(group.rank * self.width, vocabulary)
        self._count = min(self.width, vocabulary - self._first)
        self._part = part
        self._group = group
        self._vocabulary = vocabulary

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> the logits of all ranks [T, V], on every rank."""
        return self.whole(self._part(hidden, None))

    def into(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """This rank's part alone into logits [T, width]; columns that it has no tokens for stay as they are."""
        self._part.into(hidden, logits[:, : self._count])

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks [T, V], on every rank."""
        return self._group.gather(logits, self._vocabulary)

    def greedy(
        self, ops: Ops, logits: torch.Tensor, pairs: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor
    ) -> None:
        """`Ops.greedy` over the parts of all ranks, on every rank: of a row each sends a token and its logit. `pairs`
        float32 [M, 2] is overwritten; logits that a rank has no tokens for are -inf."""
        if self._group.size == 1:
            return ops.greedy(logits, tokens, sampled)
        ops.best(logits, self._first, pairs)
        best = self._group.gather(pairs[: len(logits)], 2 * self._group.size)
        return ops.best_of(best.view(-1, self._group.size, 2), tokens, sampled)
