"""A step's tokens sorted by adapter and cut into tiles: what the segmented LoRA kernels walk over.

slots   0 2 1 0 2 2          order  2 | 1 4 5          tiles  (slot 1, start 0, 1 token) (slot 2, start 1, 3 tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE = 16  # tokens of a tile at most


@dataclass(frozen=True)
class Segments:
    """order int32 [>= adapter tokens], tiles int32 [n, 3]: (slot, first place in order, tokens); slot 0 is unused."""

    order: torch.Tensor
    tiles: torch.Tensor


def max_tiles(tokens: int, slots: int) -> int:
    """No batch of so many tokens and adapters has more tiles."""
    return min(tokens, slots + tokens // TILE)


def cut(slots: Sequence[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """(order, tiles) of tokens with these adapter slots; base tokens (slot 0) are in none."""
    groups: dict[int, list[int]] = {}
    for token, slot in enumerate(slots):
        if slot:
            groups.setdefault(slot, []).append(token)
    order: list[int] = []
    tiles: list[tuple[int, int, int]] = []
    for slot in sorted(groups):
        tokens = groups[slot]
        for at in range(0, len(tokens), TILE):
            tiles.append((slot, len(order) + at, min(TILE, len(tokens) - at)))
        order += tokens
    return order, tiles
