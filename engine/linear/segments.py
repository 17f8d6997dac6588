"""A step's tokens sorted by adapter and cut into tiles: what the segmented LoRA kernels walk over.

slots   0 2 1 0 2 2          order  2 | 1 4 5          tiles  (slot 1, start 0, 1 token) (slot 2, start 1, 3 tokens)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device import to_device

TILE = 16  # tokens of a tile at most


@dataclass(frozen=True)
class Segments:
    """order int32 [>= adapter tokens], tiles int32 [n, 3]: (slot, first place in order, tokens); slot 0 is unused."""

    order: torch.Tensor
    tiles: torch.Tensor


def max_tiles(tokens: int, slots: int) -> int:
    """No batch of so many tokens and adapters has more tiles."""
    return min(tokens, slots + tokens // TILE)


@dataclass(frozen=True)
class Groups:
    """The tokens of a step's adapters, on the host: `order` as above; of each slot that occurs, its place there."""

    order: NDArray[np.int64]
    slots: NDArray[np.int64]  # rising, without 0
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, adapters: NDArray[np.int64]) -> Groups:
        """`adapters` [T]: the tokens' adapter slots; base tokens (slot 0) are in no group."""
        used = np.flatnonzero(adapters)
        order = used[np.argsort(adapters[used], kind="stable")]
        slots, starts, counts = np.unique(adapters[order], return_index=True, return_counts=True)
        return cls(order, slots, starts, counts)

    @property
    def tiles(self) -> NDArray[np.int64]:
        """[n, 3]."""
        each = -(-self.counts // TILE)
        number = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)  # of a tile in its group
        done = number * TILE
        lengths = np.minimum(np.repeat(self.counts, each) - done, TILE)
        return np.stack((np.repeat(self.slots, each), np.repeat(self.starts, each) + done, lengths), axis=1)

    def tokens(self, device: torch.device) -> list[tuple[int, torch.Tensor]]:
        """(slot, its tokens' indices int64) of each adapter."""
        if not len(self.slots):
            return []  # nothing may be sent while a graph is captured
        order = to_device(self.order, torch.int64, device)
        groups = np.stack((self.slots, self.starts, self.counts), axis=1).tolist()
        return [(slot, order[start : start + count]) for slot, start, count in groups]
