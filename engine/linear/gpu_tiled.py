"""A projection whose weights lie in tiles (engine/weights/tiled): y = x W^T (+ bias), as Triton kernels."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.weights.tiled.dots import row_products, tiles_at_once
from engine.weights.tiled.kernels import product, vector
from engine.weights.tiled.layout import Matrix

_VECTOR_ROWS = 4  # computed one by one; of e4m3, which has no product in integers, one
_FEW_ROWS = 32  # in blocks of 16


@triton.jit
def _rows(
    x, w, bias, y, x_stride, y_stride,
    W: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if FAST and W[17] != 4:
        one = tl.arange(0, 1)
        sums = tl.sum(row_products(x + row * x_stride + one, w + one, n, one < 1, W, 1, 1, BN, TILES, True), 0)
    else:
        sums = vector(x + row * x_stride, w, n, W, BN, TILES)
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)
    tl.store(y + row * y_stride + n, sums.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _blocks(
    x, w, bias, y, tokens, x_stride, y_stride,
    W: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    real = row < tokens
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = product(x + row.to(tl.int64)[:, None] * x_stride, real, w, n, W, BM, BN, FAST, STEP)
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


def multiply(x: torch.Tensor, w: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """y [T, n] = x [T, k] times the matrix at w (uint8 [num_bytes]), transposed. bf16 or float32; rows of x and y are
    any stride apart, their numbers side by side."""
    tokens = x.shape[0]
    if not tokens:
        return
    rows, *_ = constants = matrix.constants
    fast = x.dtype == torch.bfloat16 and x.is_cuda  # the interpreter runs no assembly
    common = {"W": constants, "N": matrix.n, "BIAS": bias is not None, "FAST": fast}
    given = w if bias is None else bias
    if tokens <= (1 if fast and matrix.e4m3 else _VECTOR_ROWS):
        _rows[(tokens, rows // 16)](
            x,
            w,
            given,
            y,
            x.stride(0),
            y.stride(0),
            **common,
            BN=16,
            TILES=tiles_at_once(constants),
            num_warps=8,
            num_stages=1,
        )
        return
    few = tokens <= _FEW_ROWS
    bm, most = (16, 32) if few else (64, 64)
    bn = next(d for d in (most, 32, 16) if rows % d == 0)
    _blocks[(triton.cdiv(tokens, bm), rows // bn)](
        x, w, given, y, tokens, x.stride(0), y.stride(0), **common, BM=bm, BN=bn, STEP=256 if few else 128,
        num_warps=4, num_stages=3,
    )  # fmt: skip
