"""The rank that an adapter's matrices are padded to on a GPU."""

from __future__ import annotations

RANK_STEP = 16  # the least that the matrix units multiply


def padded_rank(rank: int) -> int:
    """The power of two, and so the multiple of RANK_STEP, that holds `rank` >= 1: Triton's blocks are powers of two."""
    return max(RANK_STEP, 1 << (rank - 1).bit_length())
