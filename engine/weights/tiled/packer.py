"""Stored weights into a device's memory, in the forms that it computes with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.device import Arrival
from engine.errors import ModelFileError
from engine.files.model_file import ModelFile
from engine.weights.packed import naming, repacks, sources
from engine.weights.staging import Buffers, Staging
from engine.weights.store import WeightTensor
from engine.weights.tiled.convert import put_tiles
from engine.weights.tiled.layout import PANEL, Matrix
from engine.weights.tiled.panels import panel_bytes, unpack
from native import available as native_available
from native.topology import make_pool

if TYPE_CHECKING:
    from native import _native

# Values that are packed at a time, to be tiles and to be numbers: bounds what it takes beside, of tiles several bytes
# each on the device, of numbers some dozens.
_AT_ONCE = 1 << 25
_NUMBERS_AT_ONCE = 1 << 22


class Packer:
    """Values go there through `Staging`. What is to be tiles, or is quantised in the file and to be numbers, is packed
    by a pool of workers, that is made when it is first needed, and converted on the device: while that has some panels,
    the next are packed."""

    def __init__(self, device: torch.device, pool: Callable[[], _native.WorkerPool] | None = None) -> None:
        self._device = device
        self._make_pool = pool or make_pool
        self._pool: _native.WorkerPool | None = None
        self._staging = Staging(device)
        self._panels = Buffers(device, 2)

    def put(self, weights: Sequence[WeightTensor], matrix: Matrix, out: torch.Tensor, dtype: torch.dtype) -> None:
        """Matrices of one type and shape into `out`, uint8 [B, matrix.num_bytes] on the device, plain ones in `dtype`.
        ModelFileError for another shape, or what is not finite."""
        for weight in weights:
            if weight.shape != (matrix.n, matrix.k):
                raise ModelFileError(f"{weight.name} is {weight.shape}; the model's is {(matrix.n, matrix.k)}")
        form = _packed_form(weights[0], matrix)
        if form is None:
            self._staging.put(weights, out.view(dtype).unbind())
            return
        panels = matrix.rows // PANEL
        most = _NUMBERS_AT_ONCE if matrix.plain else _AT_ONCE
        for file, places, first in self._runs(weights, max(1, most // (matrix.n * matrix.k))):
            some, targets = weights[first : first + len(places)], out[first : first + len(places)]
            step = max(1, most // (len(some) * matrix.k * PANEL))
            for begin in range(0, panels, step):
                end = min(begin + step, panels)
                packed = self._packed(some, form, file, places, begin, end)
                if not matrix.plain:
                    put_tiles(targets, packed, matrix, begin * PANEL)
                    continue
                values = unpack(packed.view(-1), form, matrix.k, dtype).view(len(some), -1, matrix.k)
                rows = targets.view(dtype).view(len(some), matrix.n, matrix.k)[:, begin * PANEL : end * PANEL]
                rows.copy_(values[:, : rows.shape[1]])

    def dense(self, weight: WeightTensor, dtype: torch.dtype) -> torch.Tensor:
        """A matrix's values in fresh memory of the device, in `dtype`. ModelFileError for what is not finite."""
        with torch.inference_mode(False):
            out = torch.empty(weight.shape, dtype=dtype, device=self._device)
        matrix = Matrix("f32" if dtype.itemsize == 4 else "bf16", *weight.shape)
        self.put([weight], matrix, out.view(1, -1).view(torch.uint8), dtype)
        return out

    def release(self) -> None:
        """What is held beside the weights, when all are there; it is made again if it is needed."""
        self._staging.release()
        self._panels.release()
        self._pool = None

    def _runs(self, weights: Sequence[WeightTensor], most: int) -> Iterator[tuple[ModelFile | None, list[int], int]]:
        """Of `sources`, at most so many matrices at a time, and which is the first."""
        first = 0
        for file, places in sources([weight.data for weight in weights]):
            for at in range(0, len(places), most):
                yield file, places[at : at + most], first + at
            first += len(places)

    def _packed(
        self,
        weights: Sequence[WeightTensor],
        form: str,
        file: ModelFile | None,
        places: list[int],
        begin: int,
        end: int,
    ) -> torch.Tensor:
        """Panels [begin, end) of each matrix, uint8 [B, bytes] on the device."""
        native: Any = importlib.import_module("native._native")
        if self._pool is None:
            self._pool = self._make_pool()
        pool, (n, k), type = self._pool, weights[0].shape, weights[0].type
        size = len(weights) * (end - begin) * panel_bytes(form, k)
        buffer = self._panels.next(size)

        def pack(places: list[int]) -> None:
            native.pack_panels(pool, type, form, places, n, k, begin, end, buffer.memory.data_ptr(), descriptor)

        with naming(file) as descriptor:
            try:
                pack(places)
            except ValueError:
                for weight, place in zip(weights, places, strict=True):  # which of them
                    try:
                        pack([place])
                    except ValueError as error:
                        raise ModelFileError(f"{weight.name}: {error}") from error
                raise
        packed = buffer.memory[:size].view(len(weights), -1)
        there = packed.to(self._device, non_blocking=True)
        buffer.copied = Arrival(self._device)
        return there


def _packed_form(weight: WeightTensor, matrix: Matrix) -> str | None:
    """The format that a weight is packed in on its way; None: in none."""
    if not matrix.plain:
        return matrix.form
    if not weight.quantised or not native_available()[0] or not repacks(weight.type):
        return None
    native: Any = importlib.import_module("native._native")
    return str(native.format_of(weight.type))
