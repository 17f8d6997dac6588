"""Samples put together into rows of at most so many tokens. Torch-free."""

from __future__ import annotations

import random
from collections.abc import Sequence


def shuffled(count: int, *keys: int) -> list[int]:
    """The numbers below `count` in an order that follows from `keys` alone, whatever the machine or the version."""
    order = list(range(count))
    random.Random(":".join(map(str, keys))).shuffle(order)  # a text as seed is hashed with SHA-512
    return order


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Rows of indices into `lengths`: in an order drawn with `seed`, each goes into the first row that has room.
    No length is larger than `capacity`."""
    rows: list[list[int]] = []
    room = _FirstWithRoom(len(lengths), capacity)
    for index in shuffled(len(lengths), seed):
        row = room.take(lengths[index])
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
    return rows


class _FirstWithRoom:
    """The first of many equal rows that has room, in logarithmic time: a tree of the most room below each node."""

    def __init__(self, rows: int, capacity: int) -> None:
        self._leaves = 1 << max(rows - 1, 0).bit_length()
        self._room = [capacity] * (2 * self._leaves)

    def take(self, length: int) -> int:
        node = 1
        while node < self._leaves:
            node *= 2
            if self._room[node] < length:
                node += 1
        row = node - self._leaves
        self._room[node] -= length
        while node > 1:
            node //= 2
            self._room[node] = max(self._room[2 * node], self._room[2 * node + 1])
        return row
