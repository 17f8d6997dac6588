"""Batches of rows with new tokens behind a context."""

from __future__ import annotations

import torch

from engine.attention.base import BatchLayout


def batch_of(rows: list[tuple[int, int]]) -> BatchLayout:
    """(new tokens, context) of each row; blocks in order."""
    starts, tables, used = [0], [], 0
    for tokens, context in rows:
        starts.append(starts[-1] + tokens)
        count = -(-context // 16)
        tables.append(tuple(range(used, used + count)))
        used += count
    positions = torch.cat([torch.arange(context - tokens, context) for tokens, context in rows])
    return BatchLayout(starts, [c for _, c in rows], tables, positions, torch.zeros(starts[-1], dtype=torch.int64))


def batch() -> BatchLayout:
    """Prefill, a first token, a decode row, a later chunk."""
    return batch_of([(5, 5), (1, 1), (1, 30), (18, 35)])
