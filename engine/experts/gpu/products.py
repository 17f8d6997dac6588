"""Which kernel computes an expert's matrices for how many rows, and in tiles of which size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.experts.gpu.layout import Frame, Sizes
from engine.weights.tiled.layout import Matrix

VECTOR_ROWS = 1  # rows of an expert, on average, up to which they are computed one after another
CHOICE_ROWS = 1.0  # ... and up to which, without adapters, each choice is computed by itself
_FEW_ROWS = 16
_FEW_COLUMNS, _FEW_STEP = 64, 256  # of blocks of 16 rows: columns of a program, values of K at a time
_MANY_STEP = 128
INTEGERS = (torch.bfloat16,)  # types of models whose single rows meet quantised weights in int8
LEAST_BLOCK_ROWS = 16  # of all tiles


@dataclass(frozen=True)
class Tiles:
    """Tile sizes for an average of so many rows per expert. `bn` and `bk` divide the model's sizes."""

    each: float  # the average
    bm: int
    bn_gate_up: int
    bn_down: int
    bk_hidden: int
    bk_inner: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Product:
    """A kernel over the frames, whose programs compute so many columns each."""

    kernel: Any
    frames: torch.Tensor
    columns: int
    constants: dict[str, Any]


def tiles_for(sizes: Sizes, rows: int, dtype: torch.dtype) -> Tiles:
    float32 = dtype == torch.float32
    bk = 32 if float32 else 128
    each = rows * sizes.top_k / sizes.experts
    hidden, inner = sizes.hidden, sizes.inner
    if each <= _FEW_ROWS:
        bn = _divisor(inner, 32), _divisor(hidden, 32)
        return Tiles(each, LEAST_BLOCK_ROWS, *bn, _divisor(hidden, bk), _divisor(inner, bk), 4, 3)
    bm, columns = (64, 64) if each <= 96 or float32 else (128, 64)
    bk = 32 if float32 else 64
    bn = _divisor(inner, columns), _divisor(hidden, 2 * columns)
    return Tiles(each, bm, *bn, _divisor(hidden, bk), _divisor(inner, bk), 8 if bm == 128 else 4, 3)


def _divisor(size: int, most: int) -> int:
    return next(d for d in (most, most // 2, most // 4, 32) if size % d == 0 and d >= 32)


def tiled_products(frame: Frame, frames: torch.Tensor, tiles: Tiles, dtype: torch.dtype) -> tuple[Product, Product]:
    """Gate and up, and down, of experts in tiles; `frames` uint8 [F, >= frame.num_bytes]."""
    from engine.experts.gpu import tiled_kernels as kernels
    from engine.weights.tiled.dots import tiles_at_once

    _, up_at, down_at = frame.starts
    fast = dtype == torch.bfloat16 and frames.is_cuda  # the interpreter runs no assembly
    common: dict[str, Any] = {"FRAME": frames.stride(0), "FAST": fast}
    gate_up: dict[str, Any] = common | {"WG": frame.gate.constants, "WU": frame.up.constants, "UP_AT": up_at}
    down: dict[str, Any] = common | {"WD": frame.down.constants, "DOWN_AT": down_at}
    if tiles.each <= VECTOR_ROWS:
        gate_up |= {
            "TG": tiles_at_once(frame.gate.constants),
            "TU": tiles_at_once(frame.up.constants),
            "num_warps": 8,
            "num_stages": 1,
        }
        down |= {"TD": tiles_at_once(frame.down.constants), "num_warps": 8, "num_stages": 1}
        return (
            Product(kernels.gate_up_rows, frames, 16, gate_up),
            Product(kernels.down_rows, frames, 16, down),
        )
    few = tiles.bm <= _FEW_ROWS
    many: dict[str, Any] = {"STEP": _FEW_STEP if few else _MANY_STEP, "num_warps": tiles.warps}
    gate_up |= many | {"num_stages": min(_stages(matrix, tiles) for matrix in (frame.gate, frame.up))}
    gate_up["TOGETHER"] = not few and frame.gate == frame.up
    down |= many | {"num_stages": _stages(frame.down, tiles)}
    columns = tiles.bn_gate_up, tiles.bn_down
    if few:
        inner, hidden = (min(map(_few_columns, some)) for some in ((frame.gate, frame.up), (frame.down,)))
        columns = _divisor(frame.gate.n, inner), _divisor(frame.down.n, hidden)
    return Product(kernels.gate_up, frames, columns[0], gate_up), Product(kernels.down, frames, columns[1], down)


def choice_products(
    frame: Frame | None, frames: torch.Tensor, tiles: Tiles, dtype: torch.dtype
) -> tuple[Product, Product] | None:
    """Gate and up, and down with the sum of a row's choices, of few rows without adapters; None for other steps."""
    if frame is None or dtype not in INTEGERS or tiles.each > CHOICE_ROWS:
        return None
    if any(matrix.plain or matrix.e4m3 for matrix in frame.matrices):
        return None
    from engine.experts.gpu import row_kernels as kernels
    from engine.weights.tiled.dots import tiles_at_once

    _, up_at, down_at = frame.starts
    gate, up, down = (matrix.constants for matrix in frame.matrices)
    frames = frames.view(torch.uint8)
    common: dict[str, Any] = {"FRAME": frames.stride(0), "ASSEMBLY": frames.is_cuda, "num_stages": 1, "num_warps": 8}
    at_once = {"TG": tiles_at_once(gate), "TU": tiles_at_once(up)}
    return (
        Product(kernels.gate_up_choices, frames, 16, common | at_once | {"WG": gate, "WU": up, "UP_AT": up_at}),
        Product(kernels.down_choices, frames, 8, common | {"TD": tiles_at_once(down), "WD": down, "DOWN_AT": down_at}),
    )


def _few_columns(matrix: Matrix) -> int:
    """No more scales of a run than threads: others would be exchanged through shared memory, run by run."""
    return _FEW_COLUMNS // 2 if not matrix.plain and matrix.group < matrix.sub else _FEW_COLUMNS


def _stages(matrix: Matrix, tiles: Tiles) -> int:
    """Tiles of five bits are so long that three of them, with their rows, need more shared memory than there is."""
    return 2 if matrix.upper == 1 and tiles.bm > _FEW_ROWS else tiles.stages
