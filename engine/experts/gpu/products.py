"""Which kernel computes an expert's matrices for how many rows, and in tiles of which size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.experts.gpu.layout import ExpertLayout, Sizes
from engine.weights.tiled.layout import Matrix

# rows of an expert, on average, up to which they are computed one after another: of 4-bit weights, and of others
VECTOR_ROWS, BYTE_VECTOR_ROWS = 0.4, 1.0
CHOICE_ROWS = 0.7  # ... and up to which each choice is computed by itself
CUDA_CHOICE_ROWS = 1.0  # the same of the kernels in CUDA C++
PLAIN_CHOICE_ROWS = 0.4  # the same of weights that are not quantised: more rows choose experts together
FEW_EACH, MIDDLE_EACH = 16, 96  # rows of an expert, on average, up to which blocks have 16 and 64
BESIDE_EACH = 16  # rows of an expert, on average, up to which adapters are computed beside the products, by choice
_MANY_ROWS = 128  # of a block
_FEW_COLUMNS = 64  # of a program, of blocks of 16 rows
_MANY_STEP = 128  # values of K at a time
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
    """A kernel over the expert slots, whose programs compute so many columns each."""

    kernel: Any
    expert_slots: torch.Tensor
    columns: int
    constants: dict[str, Any]
    beside: bool = False  # whether programs of one block follow one another, not those of the same columns

    def grid(self, blocks: int, width: int) -> tuple[int, int]:
        tiles = width // self.columns
        return (tiles, blocks) if self.beside else (blocks, tiles)


def tiles_for(sizes: Sizes, rows: int, dtype: torch.dtype) -> Tiles:
    """The tiles of a step of so many rows: small ones where an expert gets few of them."""
    float32 = dtype == torch.float32
    bk = 32 if float32 else 128
    each = rows * sizes.top_k / sizes.experts
    hidden, inner = sizes.hidden, sizes.inner
    if each <= FEW_EACH:
        bn = _divisor(inner, 32), _divisor(hidden, 32)
        return Tiles(each, LEAST_BLOCK_ROWS, *bn, _divisor(hidden, bk), _divisor(inner, bk), 4, 3)
    bm, columns = (64, 64) if each <= MIDDLE_EACH or float32 else (_MANY_ROWS, 64)
    bk = 32 if float32 else 64
    bn = _divisor(inner, columns), _divisor(hidden, 2 * columns)
    return Tiles(each, bm, *bn, _divisor(hidden, bk), _divisor(inner, bk), 8 if bm == _MANY_ROWS else 4, 3)


def _divisor(size: int, most: int) -> int:
    return next(d for d in (most, most // 2, most // 4, 32) if size % d == 0 and d >= 32)


def tiled_products(
    layout: ExpertLayout, expert_slots: torch.Tensor, tiles: Tiles, dtype: torch.dtype
) -> tuple[Product, Product]:
    """Gate and up, and down, of experts in tiles; `expert_slots` uint8 [F, >= layout.num_bytes]."""
    from engine.experts.gpu import tiled_kernels as kernels
    from engine.weights.tiled.dots import tiles_at_once

    _, up_at, down_at = layout.starts
    fast = dtype == torch.bfloat16 and expert_slots.is_cuda  # the interpreter runs no assembly
    common: dict[str, Any] = {"SIZE": expert_slots.stride(0), "FAST": fast}
    gate_up: dict[str, Any] = common | {"WG": layout.gate.constants, "WU": layout.up.constants, "UP_AT": up_at}
    down: dict[str, Any] = common | {"WD": layout.down.constants, "DOWN_AT": down_at}
    single = VECTOR_ROWS if any(matrix.low == 4 for matrix in layout.matrices if not matrix.plain) else BYTE_VECTOR_ROWS
    # single rows of e4m3 meet matrix instructions: there is no product of them in integers
    if tiles.each <= single and not (fast and any(matrix.e4m3 for matrix in layout.matrices)):
        gate_up |= {
            "TG": tiles_at_once(layout.gate.constants),
            "TU": tiles_at_once(layout.up.constants),
            "num_warps": 8,
            "num_stages": 1,
        }
        down |= {"TD": tiles_at_once(layout.down.constants), "num_warps": 8, "num_stages": 1}
        return (
            Product(kernels.gate_up_rows, expert_slots, 16, gate_up),
            Product(kernels.down_rows, expert_slots, 16, down),
        )
    make = _few if tiles.bm <= LEAST_BLOCK_ROWS else _many
    inner, rest = make(tiles, layout.gate.n, layout.gate, layout.up)
    gate_up |= rest | {"TOGETHER": make is _many and layout.gate == layout.up}
    hidden, rest = make(tiles, layout.down.n, layout.down)
    down |= rest
    return Product(kernels.gate_up, expert_slots, inner, gate_up), Product(kernels.down, expert_slots, hidden, down)


def plain_gate_up(expert_slots: torch.Tensor, sizes: Sizes, tiles: Tiles) -> Product:
    """Gate and up of plain numbers; `expert_slots` [F, values]."""
    from engine.experts.gpu import kernels

    columns = _divisor(sizes.inner, 128) if tiles.bm == _MANY_ROWS else tiles.bn_gate_up
    constants = {"SIZE": expert_slots.shape[1], "BK": tiles.bk_hidden}
    return Product(kernels.gate_up, expert_slots, columns, constants | _plain(tiles), beside=True)


def plain_down(expert_slots: torch.Tensor, first: int, sizes: Sizes, tiles: Tiles) -> Product:
    """Down, which begins at the value `first` of an expert."""
    from engine.experts.gpu import kernels

    columns = _divisor(sizes.hidden, 256) if tiles.bm == _MANY_ROWS else tiles.bn_down
    constants = {"SIZE": expert_slots.shape[1], "DOWN_AT": first, "BK": tiles.bk_inner}
    return Product(kernels.down, expert_slots, columns, constants | _plain(tiles), beside=True)


def _plain(tiles: Tiles) -> dict[str, Any]:
    return {"num_warps": tiles.warps, "num_stages": tiles.stages}


def choices_alone(layout: ExpertLayout, tiles: Tiles, dtype: torch.dtype, *, cuda: bool) -> bool:
    """Whether so few rows of quantised experts go choice by choice; `cuda`: in CUDA C++."""
    most = CUDA_CHOICE_ROWS if cuda else CHOICE_ROWS
    return dtype in INTEGERS and tiles.each <= most and not any(matrix.plain for matrix in layout.matrices)


def choice_products(
    layout: ExpertLayout | None, expert_slots: torch.Tensor, tiles: Tiles, dtype: torch.dtype, sizes: Sizes
) -> tuple[Product, Product] | None:
    """Gate and up, and down with the sum of a row's choices, of few rows; None for other steps."""
    if layout is None or layout.plain:
        return _plain_choice_products(expert_slots.view(dtype), sizes) if tiles.each <= PLAIN_CHOICE_ROWS else None
    if not choices_alone(layout, tiles, dtype, cuda=False) or any(matrix.e4m3 for matrix in layout.matrices):
        return None
    from engine.experts.gpu import row_kernels as kernels
    from engine.weights.tiled.dots import tiles_at_once

    _, up_at, down_at = layout.starts
    gate, up, down = (matrix.constants for matrix in layout.matrices)
    expert_slots = expert_slots.view(torch.uint8)
    common: dict[str, Any] = {"SIZE": expert_slots.stride(0), "ASSEMBLY": expert_slots.is_cuda}
    common |= {"num_stages": 1, "num_warps": 8}
    first = {"TG": tiles_at_once(gate), "TU": tiles_at_once(up), "WG": gate, "WU": up, "UP_AT": up_at}
    last = {"TD": tiles_at_once(down), "WD": down, "DOWN_AT": down_at}
    return (
        Product(kernels.gate_up_choices, expert_slots, 16, common | first),
        Product(kernels.down_choices, expert_slots, 8, common | last),
    )


def _few(tiles: Tiles, columns: int, *matrices: Matrix) -> tuple[int, dict[str, Any]]:
    """Columns of a program and constants, of blocks of 16 rows: gate and up share one, down has its own."""
    both, form = len(matrices) > 1, matrices[0]
    narrow = any(not m.plain and m.group < m.sub for m in matrices)
    words = not form.plain and (form.low, form.upper) == (4, 0) and not form.format.codes
    if both and not (words and matrices[0] == matrices[1]):
        # no more scales of a run than threads: others would be exchanged through shared memory, run by run
        most, warps, stages = (_FEW_COLUMNS // 2 if narrow else _FEW_COLUMNS), tiles.warps, tiles.stages
        step = 128 if any(m.low == 8 for m in matrices if not m.plain) else 256
    elif narrow:
        most, step, warps, stages = 2 * _FEW_COLUMNS, 128, 2, 3
    else:
        most, step, warps, stages = _FEW_COLUMNS // 2, 256, 2, 2
    constants = {"STEP": step, "num_warps": warps, "num_stages": stages, "FIRST": False}
    return _divisor(columns, most), constants


def _many(tiles: Tiles, columns: int, *matrices: Matrix) -> tuple[int, dict[str, Any]]:
    """Columns of a program and constants, of larger blocks: gate and up share one, down has its own."""
    both, down = len(matrices) > 1, matrices[0]
    first = tiles.bm == _MANY_ROWS and all(m.form == "i8" for m in matrices)  # others gain less by it, or lose
    most, warps, stages = tiles.bn_gate_up if both else tiles.bn_down, tiles.warps, tiles.stages
    if any(m.upper == 1 for m in matrices if not m.plain):
        stages = 2  # tiles of five bits are so long that three of them, with their rows, need too much shared memory
    elif tiles.bm == _MANY_ROWS and both:
        stages = 2
    elif tiles.bm == _MANY_ROWS and not down.plain:
        most, warps, stages = (64, 4, 3) if first or (down.low, down.upper) == (4, 0) else (256, 8, 2)
    constants = {"STEP": _MANY_STEP, "num_warps": warps, "num_stages": stages, "FIRST": first}
    return _divisor(columns, most), constants


def _plain_choice_products(expert_slots: torch.Tensor, sizes: Sizes) -> tuple[Product, Product]:
    from engine.experts.gpu import row_kernels as kernels

    gate_up: dict[str, Any] = {"SIZE": expert_slots.shape[1], "BK": _divisor(sizes.hidden, 2048), "num_warps": 8}
    down: dict[str, Any] = {"SIZE": expert_slots.shape[1], "BK": _divisor(sizes.inner, 256), "num_warps": 1}
    return (
        Product(kernels.plain_gate_up_choices, expert_slots, 2, gate_up),
        Product(kernels.plain_down_choices, expert_slots, 1, down),
    )
