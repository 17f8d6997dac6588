"""The head of several ranks as one projection."""

from __future__ import annotations

import torch

from engine.linear.base import Linear, LoraBatch
from engine.lora.adapter import LoraPair
from engine.parallel.group import Group


class GatheredHead(Linear):
    """`part` computes this rank's part of a vocabulary of `width`; every rank gets the logits of all of it."""

    def __init__(self, part: Linear, group: Group, width: int) -> None:
        self.captures = part.captures
        self._part = part
        self._group = group
        self._width = width

    def __call__(self, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        return self._group.gather(self._part(x, lora), self._width)

    def set_adapter(self, slot: int, pair: LoraPair | None) -> None:
        self._part.set_adapter(slot, pair)
