"""Tokens to rows: the embedding in whatever form its weights are kept."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.errors import EngineError, ModelFileError
from engine.weights.dequant import dequantise, nonfinite
from engine.weights.store import WeightTensor
from engine.weights.tiled.layout import Matrix

if TYPE_CHECKING:
    from native import _native


class Embedding(ABC):
    """The values are the file's, whatever the form."""

    device: torch.device

    @abstractmethod
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [T], contiguous -> fresh [T, H], float32 or bf16."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What it takes beside the projections."""


class TableEmbedding(Embedding):
    """One tensor [V, H]."""

    def __init__(self, table: torch.Tensor, look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.table = table
        self.device = table.device
        self._look_up = look_up

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._look_up(self.table, ids)

    @property
    def num_bytes(self) -> int:
        return self.table.numel() * self.table.element_size()


class TiledEmbedding(Embedding):
    """Rows of a matrix in tiles on a GPU (engine/weights/tiled), looked up in `dtype`; `shared`: it is the head's."""

    def __init__(self, matrix: Matrix, tiles: torch.Tensor, dtype: torch.dtype, *, shared: bool) -> None:
        self.device = tiles.device
        self._matrix, self._tiles, self._dtype, self._shared = matrix, tiles, dtype, shared
        self._numbers: Any = importlib.import_module("engine.weights.tiled.rows").numbers

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(ids.shape[0], self._matrix.k, dtype=self._dtype, device=self.device)
        self._numbers(self._tiles, self._matrix, ids, out)
        return out

    @property
    def num_bytes(self) -> int:
        return 0 if self._shared else self._tiles.numel()


class PackedEmbedding(Embedding):
    """Rows of a `native._native.PackedLinear` that holds the file's values exactly; `shared`: it is the head's."""

    device = torch.device("cpu")

    def __init__(self, packed: Any, pool: _native.WorkerPool, width: int, *, shared: bool) -> None:
        self.packed = packed
        self._pool = pool
        self._width = width
        self._shared = shared

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dim() != 1 or ids.dtype is not torch.int64 or not ids.is_contiguous():
            raise EngineError(f"ids: {ids.dtype} {tuple(ids.shape)}; wanted contiguous int64 [T]")
        out = torch.empty((ids.shape[0], self._width), dtype=torch.float32)
        try:
            self.packed.rows(self._pool, ids.data_ptr(), ids.shape[0], out.data_ptr())
        except ValueError as error:
            raise EngineError(f"embed: {error}") from error
        return out

    @property
    def num_bytes(self) -> int:
        return 0 if self._shared else int(self.packed.num_bytes)


class BlockEmbedding(Embedding):
    """A type that has no packed form: the file's blocks."""

    device = torch.device("cpu")

    def __init__(self, weight: WeightTensor) -> None:
        if bad := nonfinite(weight.data, weight.type, weight.shape):
            raise ModelFileError(f"{weight.name}: {bad} blocks are not finite")
        self._blocks = weight.data[:].reshape(weight.shape[0], -1)
        self._type, self._shape = weight.type, weight.shape

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows, width = self._shape
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            raise EngineError(f"embed: ids reach {int(ids.min())} to {int(ids.max())}; allowed are 0 to {rows - 1}")
        chosen = np.ascontiguousarray(self._blocks[ids.numpy()]).reshape(-1)
        return dequantise(chosen, self._type, (ids.shape[0], width), torch.float32)

    @property
    def num_bytes(self) -> int:
        return int(self._blocks.nbytes)
