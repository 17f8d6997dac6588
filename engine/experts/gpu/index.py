"""The order in which the GPU's kernels visit a batch: choices (row, j) sorted by expert, then adapter slot, then row,
cut into blocks of rows of one expert.

    order [N]        choice (row * k + j) at each sorted position; N = M k
    start [E + 1]    first position of each expert; start[E] counts the choices that are computed
    block_expert, block_first [B], num_blocks [1]: block b holds positions block_first .. of one expert

A choice is computed if its row counts (row < bsz), its id is not -1 and place [slots, E] gives its expert a slot for
the row's slot (an expert may be here without every adapter's part of it). All of it
is made on the device from what bsz says there, so that a graph can hold it. `build` is the plain form, for large
batches; `index_kernel` makes the same in one launch, and its work follows bsz.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_CHOICES = 8192  # above, sorting in several launches is faster than one that visits all choices for each expert


@dataclass(frozen=True)
class Index:
    """Device memory for batches of up to `rows` rows in blocks of `block_rows` and more; int32."""

    order: torch.Tensor
    start: torch.Tensor
    block_expert: torch.Tensor
    block_first: torch.Tensor
    num_blocks: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, top_k: int, experts: int, block_rows: int, device: torch.device) -> Index:
        choices = rows * top_k
        blocks = most_blocks(choices, experts, block_rows)

        def empty(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(empty(choices), empty(experts + 1), empty(blocks), empty(blocks), empty(1))


def most_blocks(choices: int, experts: int, block_rows: int) -> int:
    """No batch has more: every expert may end with a block that is not full."""
    return min(choices, experts + choices // block_rows)


def add_touched(touched: torch.Tensor, bsz: torch.Tensor, ids: torch.Tensor, experts: int) -> None:
    """Add to `touched` int64 [] how many of the experts the rows < bsz of ids [M, k] have chosen, as the kernels do for
    fewer choices; no host synchronisation."""
    row = torch.arange(len(ids), device=ids.device)
    chosen = torch.where((row < bsz)[:, None] & (ids >= 0) & (ids < experts), ids, experts).flatten()
    seen = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).index_fill_(0, chosen, 1)
    touched.add_(seen[:experts].sum())


def build(
    index: Index, bsz: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, place: torch.Tensor, block_rows: int
) -> None:
    """Fill `index` for ids [M, k], slots [M], place [slots, E] by torch's own operations; no host synchronisation."""
    rows, top_k = ids.shape
    experts = place.shape[1]
    row = torch.arange(rows, device=ids.device)
    valid = (row < bsz)[:, None] & (ids >= 0) & (place[slots.long()[:, None], ids.clamp(min=0)] >= 0)
    expert = torch.where(valid, ids, experts).flatten()
    key = expert * len(place) + slots.long().repeat_interleave(top_k)
    narrow = torch.int16 if (experts + 1) * len(place) <= 1 << 15 else torch.int32
    key = key.to(narrow)  # sorting goes through it by its bits
    index.order[: rows * top_k].copy_(torch.sort(key, stable=True).indices)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    counts = counts[:experts]
    ends = counts.cumsum(0)
    index.start[1:].copy_(ends)
    block_ends = ((counts + block_rows - 1) // block_rows).cumsum(0)
    index.num_blocks.copy_(block_ends[-1:])
    block = torch.arange(most_blocks(rows * top_k, experts, block_rows), device=ids.device)
    of = torch.searchsorted(block_ends, block, right=True).clamp(max=experts - 1)
    before = block_ends[of] - (counts[of] + block_rows - 1) // block_rows
    index.block_expert[: len(block)].copy_(of)
    index.block_first[: len(block)].copy_(ends[of] - counts[of] + (block - before) * block_rows)
