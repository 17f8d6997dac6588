"""What ranks sum before they rely on sums over one another's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.ranks.peers.sums import BLOCKS, WORDS

_F32, _BF16 = torch.float32, torch.bfloat16
_ALL = 4 * BLOCKS * WORDS  # bytes
_WHOLE = [(_F32, _ALL), (_F32, _ALL), (_BF16, _ALL), (_BF16, _ALL)]  # all blocks, both pages
_SOME = [(_F32, 4 * WORDS), (_BF16, 6004), (_F32, 6004)]  # after them the first two blocks are at other numbers
ROUNDS = [*_WHOLE, *_SOME, *_WHOLE]


def adds_exactly(add: Callable[[torch.Tensor], torch.Tensor], rank: int, size: int, device: torch.device) -> bool:
    """Whether `add`, of all ranks at once, gives their sums in `ROUNDS`. Numbers differ by rank, round and place. The
    sums follow one another without a look at what came out, as a step's do."""
    sums = [add(_part(rank, i, device)) for i in range(len(ROUNDS))]
    wanted = (torch.stack([_part(r, i, device).float() for r in range(size)]) for i in range(len(ROUNDS)))
    return all(torch.equal(got, _in_order(parts).to(got.dtype)) for got, parts in zip(sums, wanted, strict=True))


def _part(rank: int, round: int, device: torch.device) -> torch.Tensor:
    """[n] of one rank: no two places that lie side by side or a block apart have the same."""
    dtype, size = ROUNDS[round]
    places = torch.arange(size // dtype.itemsize, device=device)
    return ((places * (2 * rank + 3) + 97 * round + 31 * rank) % 509 - 254).float().div(3).to(dtype)


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """[ranks, n] -> [n], added one rank after the other as the kernel does."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total
