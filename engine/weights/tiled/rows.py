"""Rows of matrices in tiles (layout.py) as numbers: for looking tokens up, and for products of many rows."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.weights.tiled.kernels import run_scales, scaled
from engine.weights.tiled.layout import Matrix

_FEW, _MANY = 4, 32  # rows of a program: for so few that the device would be idle, and otherwise
_VALUES = 1024  # of a row, at least, unless it has fewer


@triton.jit
def _rows(
    w, ids, out, count, W: tl.constexpr, IDS: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Of the matrix at w; the program's rows and its part of K are its first two numbers."""
    K: tl.constexpr = W[1]
    PADDED: tl.constexpr = W[2]
    LOW: tl.constexpr = W[3]
    UPPER: tl.constexpr = W[4]
    SUB: tl.constexpr = W[5]
    TILE: tl.constexpr = W[5] * W[6]
    RUNS: tl.constexpr = W[6] * LOW // 8
    at = tl.program_id(0) * BN + tl.arange(0, BN)
    real = at < count
    n = at
    if IDS:
        n = tl.load(ids + at, mask=real, other=0)
    n = tl.where(real, n, 0)
    i = tl.arange(0, SUB)
    ws = w + tl.zeros([BN], tl.int32)
    low_at = (ws + n * (PADDED * LOW // 8))[:, None] + i[None, :]
    upper_at = (ws + W[12] + n * (PADDED * UPPER // 8))[:, None] + i[None, :]
    to = out + at.to(tl.int64)[:, None] * K + i[None, :]
    begin = tl.program_id(1) * (TILES * TILE)
    for k in range(begin, tl.minimum(begin + TILES * TILE, PADDED), TILE):
        upper = i[None, :].to(tl.uint8)
        if UPPER > 0:
            upper = tl.load(upper_at + k * UPPER // 8)
        for run in tl.static_range(RUNS):
            low = tl.load(low_at + k * LOW // 8 + run * SUB)
            for half in tl.static_range(8 // LOW):
                first = k + (half * RUNS + run) * SUB
                s, c = run_scales(ws, n, first, W, False)
                values = scaled(low, upper, s, c, half * RUNS + run, W, BN, out.dtype.element_ty, False)
                tl.store(to + first, values, mask=real[:, None] & (first + i < K)[None, :])


@triton.jit
def _numbers(
    w, ids, out, count, W: tl.constexpr, IDS: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    _rows(w, ids, out, count, W, IDS, BN, TILES)


@triton.jit
def _expert_numbers(
    expert_slots, place, out, count, W: tl.constexpr, AT: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr,
    BN: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    expert_slot = tl.load(place + expert).to(tl.int64)
    if expert_slot < 0:
        return
    weights = expert_slots + expert_slot * SIZE + AT
    _rows(weights, place, out + expert.to(tl.int64) * OUT, count, W, False, BN, TILES)


def numbers(w: torch.Tensor, matrix: Matrix, ids: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [T, k], contiguous: rows `ids` (int64 [T]) of the quantised matrix at w (uint8 [num_bytes]), or its first
    ones; in float32, and then as out's dtype."""
    count, constants = out.shape[0], matrix.constants
    if not count:
        return
    tiles = _tiles(matrix)
    rows = _MANY if count > 4 * _MANY else _FEW
    _numbers[(triton.cdiv(count, rows), triton.cdiv(matrix.padded_k, tiles * matrix.tile))](
        w, w if ids is None else ids, out, count,
        W=constants, IDS=ids is not None, BN=rows, TILES=tiles, num_warps=4, num_stages=1,
    )  # fmt: skip


def expert_numbers(
    expert_slots: torch.Tensor, first_byte: int, matrix: Matrix, place: torch.Tensor, out: torch.Tensor
) -> None:
    """out [E, n k] = the quantised matrix that begins at `first_byte` of the slots `place` (int32 [E]); experts whose
    slot is -1 keep what is there. expert_slots: uint8 [F, bytes]. Rounded as by `numbers`."""
    tiles = _tiles(matrix)
    grid = triton.cdiv(matrix.n, _MANY), triton.cdiv(matrix.padded_k, tiles * matrix.tile), len(place)
    _expert_numbers[grid](
        expert_slots, place, out, matrix.n, W=matrix.constants, AT=first_byte, SIZE=expert_slots.stride(0),
        OUT=out.stride(0), BN=_MANY, TILES=tiles, num_warps=4, num_stages=1,
    )  # fmt: skip


def _tiles(matrix: Matrix) -> int:
    """Of a row, for a program."""
    return max(1, _VALUES // matrix.tile)
