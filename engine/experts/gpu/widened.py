"""Quantised experts of long chunks as plain numbers, some experts at a time: a weight that many rows meet is unpacked
once, not once for each block of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.experts.gpu.layout import Sizes
from engine.weights.tiled.layout import Matrix

ROWS = 320  # of an expert, on average, from which on this is faster
SCRATCH_BYTES = 320 << 20  # about the most, of experts that are plain at a time


class Widened:
    """Scratch memory for gate and up, or down, of some experts; it is there once a chunk was long enough."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._sizes = sizes
        self._dtype = dtype
        self._device = device
        self._scratch: torch.Tensor | None = None

    @staticmethod
    def planned_bytes(sizes: Sizes, element_bytes: int) -> int:
        return max(at_a_time(sizes, count, element_bytes) * count for count in (2, 1)) * _bytes(sizes, element_bytes)

    @staticmethod
    def pays(sizes: Sizes, rows: int) -> bool:
        return rows * sizes.top_k >= ROWS * sizes.experts

    @property
    def num_bytes(self) -> int:
        return 0 if self._scratch is None else self._scratch.numel() * self._scratch.element_size()

    def parts(
        self, expert_slots: torch.Tensor, place: torch.Tensor, first_byte: int, *matrices: Matrix
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(plain [experts of the part, values], place [E] of each expert in it, -1 outside) of matrices that lie one
        behind the other in an expert slot; each is valid until the next is asked for. Experts that `place` [E] gives no
        expert slot are left out."""
        from engine.weights.tiled.rows import expert_numbers

        experts, values = self._sizes.experts, self._sizes.hidden * self._sizes.inner
        count = at_a_time(self._sizes, len(matrices), self._dtype.itemsize)
        if self._scratch is None:
            size = self.planned_bytes(self._sizes, self._dtype.itemsize) // self._dtype.itemsize
            self._scratch = torch.empty(size, dtype=self._dtype, device=self._device)
        here = torch.arange(experts, dtype=torch.int32, device=self._device)
        for first in range(0, experts, count):
            last = min(first + count, experts)
            plain = self._scratch[: (last - first) * len(matrices) * values].view(last - first, -1)
            at = first_byte
            for number, matrix in enumerate(matrices):
                to = plain[:, number * values : (number + 1) * values]
                expert_numbers(expert_slots, at, matrix, place[first:last], to)
                at += matrix.num_bytes
            yield plain, torch.where((here >= first) & (here < last), here - first, -1)


def at_a_time(sizes: Sizes, matrices: int, element_bytes: int) -> int:
    """Experts, all parts of about one size."""
    parts = -(-sizes.experts * matrices * _bytes(sizes, element_bytes) // SCRATCH_BYTES)
    return -(-sizes.experts // parts)


def _bytes(sizes: Sizes, element_bytes: int) -> int:
    """Of a plain matrix."""
    return sizes.hidden * sizes.inner * element_bytes
