"""Weights of projections side by side in GPU memory: plain numbers for torch's product, or tiles."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F

from engine.weights.tiled.convert import joined_tiles
from engine.weights.tiled.layout import Matrix

TABLE_ROWS = 33  # of x, more than two blocks of 16, from which tiles are made numbers once, for torch's product
TABLE_BYTES = 64 << 20  # of these numbers at most
ROW_COLUMNS = 8192  # of one row's product, up to which torch's has too few pieces for a GPU


@dataclass(frozen=True)
class Weights:
    """[out, in] and its bias: dense in the activations' dtype, or matrices in tiles one below the other."""

    dtype: torch.dtype
    dense: torch.Tensor | None
    tiles: tuple[tuple[Matrix, torch.Tensor], ...]
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        if self.dense is not None:
            return self.dense.shape[0], self.dense.shape[1]
        return sum(matrix.n for matrix, _ in self.tiles), self.tiles[0][0].k

    @property
    def device(self) -> torch.device:
        return self.tiles[0][1].device if self.dense is None else self.dense.device

    @property
    def num_bytes(self) -> int:
        held = [tensor for _, tensor in self.tiles]
        held += [tensor for tensor in (self.dense, self.bias) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def numbers(self, start: int, outer: int) -> torch.Tensor:
        """Rows [start, start + outer) [outer, in] of W in the activations' dtype; a view where it is dense."""
        return self._table(start, outer) if self.dense is None else self.dense[start : start + outer]

    def multiply(self, x: torch.Tensor, start: int, outer: int) -> torch.Tensor:
        """Fresh x W^T (+ bias) of the rows [start, start + outer)."""
        bias = None if self.bias is None else self.bias[start : start + outer]
        if self.dense is not None:
            weight = self.dense[start : start + outer]
            if bias is None and _single_row(x, weight):
                row: Any = importlib.import_module("engine.linear.gpu_row")
                return cast(torch.Tensor, row.multiply(x, weight))
            return F.linear(x, weight, bias)
        if x.shape[0] >= TABLE_ROWS and outer * x.shape[1] * self.dtype.itemsize <= TABLE_BYTES:
            return F.linear(x, self._table(start, outer), bias)
        multiply: Any = importlib.import_module("engine.linear.gpu_tiled").multiply
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], self.shape[0], dtype=x.dtype, device=x.device)
        at = 0
        for matrix, tiles in self.tiles:
            if at < start + outer and at + matrix.n > start:
                some = None if self.bias is None else self.bias[at : at + matrix.n]
                multiply(x, tiles, matrix, some, y[:, at : at + matrix.n])
            at += matrix.n
        return y[:, start : start + outer]

    def _table(self, start: int, outer: int) -> torch.Tensor:
        """Rows [start, start + outer) of the tiles, as numbers."""
        numbers: Any = importlib.import_module("engine.weights.tiled.rows").numbers
        table = torch.empty(outer, self.shape[1], dtype=self.dtype, device=self.device)
        at = 0
        for matrix, tiles in self.tiles:
            first, last = max(start - at, 0), min(start + outer - at, matrix.n)
            if first < last:
                ids = None if first == 0 else torch.arange(first, last, device=self.device)
                numbers(tiles, matrix, ids, table[at + first - start : at + last - start])
            at += matrix.n
        return table


def _single_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.shape[0] == 1 and x.dtype == torch.bfloat16 and x.is_cuda and len(weight) <= ROW_COLUMNS


def joined(parts: Sequence[Weights]) -> Weights | None:
    """One for all of them, or None if some are dense and some are not."""
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    dense = [part.dense for part in parts if part.dense is not None]
    if dense:
        return Weights(parts[0].dtype, torch.cat(dense), (), bias) if len(dense) == len(parts) else None
    held = [pair for part in parts for pair in part.tiles]
    runs = [list(run) for _, run in groupby(held, key=lambda pair: pair[0].form)]
    return Weights(parts[0].dtype, None, tuple(joined_tiles(run) for run in runs), bias)
