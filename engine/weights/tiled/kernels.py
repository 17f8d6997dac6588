"""Products with a matrix in tiles (layout.py), for kernels of every kind of projection.

    product   [BM, K] x [BN, K]^T in matrix instructions, of weights that were scaled to numbers of x's type
    vector    [K] x [BN, K]^T in float32, for single rows: many of a column's bytes are asked for at once

`W` is Matrix.constants. Plain matrices (W[3] is 16 or 32 bits) are of x's type. A quant u stands for s u + c
(scales.py). FAST makes bf16 of quants by bits: 0x4300 | u is 128 + u.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from engine.weights.tiled.codes import code_of, code_pair, e4m3
from engine.weights.tiled.scales import group_scales, unit_scales


@triton.constexpr_function
def scaled_code(low, upper, run, high):
    """Four quants of a run, s and c twice in pairs -> bf16 s u + c. 0x43 before a byte below 128 makes 128 more of it,
    of a sign bit alone 128 or 256; 0xC3 makes that number's negative."""
    lines = ".reg .b32 w, m, a, b, o, x, y; "
    if low == 8:
        lines += "and.b32 m, $2, 0x80808080; prmt.b32 a, m, 0xC3C3C3C3, 0x4140; prmt.b32 b, m, 0xC3C3C3C3, 0x4342;"
        lines += "and.b32 m, $2, 0x7F7F7F7F; "
        takes = ("a", "b")
    else:
        lines += ("shr.b32 w, $2, 4;" if high else "mov.b32 w, $2;") + "and.b32 m, w, 0x0F0F0F0F;"
        if upper:
            bits, turn = (0x10101010, 0x30303030)[upper - 1], (4 - run * upper) % 32
            lines += f"shf.l.wrap.b32 o, $7, $7, {turn}; lop3.b32 m, o, {bits}, m, 0xEA;"
        lines += "mov.b32 a, 0xC300C300;"
        takes = ("a", "a")
    lines += "prmt.b32 x, m, 0x43434343, 0x4140; prmt.b32 y, m, 0x43434343, 0x4342; mov.b32 o, 0x3F803F80;"
    lines += f"fma.rn.bf16x2 x, x, o, {takes[0]}; fma.rn.bf16x2 y, y, o, {takes[1]};"
    return "{" + lines + "fma.rn.bf16x2 $0, x, $3, $5; fma.rn.bf16x2 $1, y, $4, $6; }"


# a byte's exponent and fraction four places lower are those of a bf16 2^120 times smaller
_E4M3 = tl.constexpr("""
    {
        .reg .b32 x, y, h, o, z;
        mov.b32 o, 0x7B807B80; mov.b32 z, 0x80008000;
        prmt.b32 x, $2, 0, 0x1404; shr.b32 h, x, 4; and.b32 h, h, 0x07F007F0; lop3.b32 x, x, z, h, 0xEA;
        prmt.b32 y, $2, 0, 0x3424; shr.b32 h, y, 4; and.b32 h, h, 0x07F007F0; lop3.b32 y, y, z, h, 0xEA;
        fma.rn.bf16x2 x, x, o, z; fma.rn.bf16x2 y, y, o, z;
        fma.rn.bf16x2 $0, x, $3, z; fma.rn.bf16x2 $1, y, $4, z;
    }
""")


@triton.jit
def numbers(low, upper, S: tl.constexpr, W: tl.constexpr):
    """Run S of a tile, from the bytes that hold it, as float32."""
    UPPER: tl.constexpr = W[4]
    if W[17] == 4:
        return e4m3(low)
    if W[3] == 8:
        return low.to(tl.int8, bitcast=True).to(tl.float32)
    quants = (low >> 4) if W[6] // 2 <= S else (low & 15)
    if W[19] != 0:
        return code_of(quants, W).to(tl.float32)
    if UPPER > 0:
        quants = quants | (((upper >> (S * UPPER)) & ((1 << UPPER) - 1)) << 4)
    return quants.to(tl.float32)


@triton.jit
def run_scales(w, n, k, W: tl.constexpr, FAST: tl.constexpr):
    """(s, c) of the run from k on of rows n [BN] of the matrices at w [BN], bf16 if FAST: [BN, 1], or of several groups
    [BN, groups, 1]."""
    GROUPS: tl.constexpr = W[5] // W[8] if W[8] < W[5] else 1
    d, minimum = unit_scales(w, n, k, True, W)
    if GROUPS == 1:
        s, c = group_scales(d, minimum, w, n, k, True, W)
        s, c = s[:, None], c[:, None]
    else:
        g = k + W[8] * tl.arange(0, GROUPS)[None, :]
        s, c = group_scales(d[:, None], minimum[:, None], w[:, None], n[:, None], g, True, W)
        s, c = s[:, :, None], c[:, :, None]
    if FAST:
        s, c = s.to(tl.bfloat16), c.to(tl.bfloat16)
    return s, c


@triton.jit
def scaled(
    low, upper, s, c, S: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Run S of a tile [BN, SUB], from the bytes that hold it, as numbers; s and c as `run_scales` gave them."""
    SUB: tl.constexpr = W[5]
    GROUPS: tl.constexpr = SUB // W[8] if W[8] < SUB else 1
    if GROUPS > 1:
        low = tl.reshape(low, [BN, GROUPS, SUB // GROUPS])
        if W[4] > 0:
            upper = tl.reshape(upper, [BN, GROUPS, SUB // GROUPS])
    if not FAST:
        values = (numbers(low, upper, S, W) * s + c).to(DTYPE)
    elif W[17] == 4:
        values = tl.inline_asm_elementwise(_E4M3, "=&r,=&r,r,r,r", [low, s], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        CODE: tl.constexpr = scaled_code(W[3], W[4], S, W[6] // 2 <= S)
        if W[4] > 0:
            values = tl.inline_asm_elementwise(
                CODE, "=&r,=&r,r,r,r,r,r,r", [low, s, c, upper], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            values = tl.inline_asm_elementwise(
                CODE, "=&r,=&r,r,r,r,r,r", [low, s, c], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    return tl.reshape(values, [BN, SUB]) if GROUPS > 1 else values


@triton.jit
def product(
    x, real, w, n, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr, STEP: tl.constexpr = 1,
    FIRST: tl.constexpr = False,
):  # fmt: skip
    """float32 [BM, BN]. STEP: values of K at a time, at least a tile, and a tile if K is no multiple.
    FIRST: weights are the first operand, which Hopper's instructions take from registers, not from shared memory.
    x: pointers [BM, 1] to rows, read where `real` [BM]; n [BN]: rows of the matrix at w, or of those at w [BN]."""
    if W[3] >= 16:
        sums = _plain_product(x, real, w, n, W, BM, BN)
    else:
        sums = _tiled_product(x, real, w, n, W, BM, BN, FAST, STEP, FIRST)
    return sums


@triton.jit
def _plain_product(x, real, w, n, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    K: tl.constexpr = W[1]
    SUB: tl.constexpr = W[5]
    i = tl.arange(0, SUB)
    w = w + tl.zeros([BN], tl.int32)
    sums = tl.zeros([BM, BN], tl.float32)
    plain_at = (w.to(tl.pointer_type(x.dtype.element_ty)) + n * K)[:, None] + i[None, :]
    for k in range(0, K, SUB):
        xs = tl.load(x + k + i[None, :], mask=real[:, None], other=0)
        sums = tl.dot(xs, tl.trans(tl.load(plain_at + k)), sums, input_precision="ieee")
    return sums


@triton.jit
def _tiled_product(
    x, real, w, n, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr, STEP: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = W[1]
    PADDED: tl.constexpr = W[2]
    LOW: tl.constexpr = W[3]
    UPPER: tl.constexpr = W[4]
    SUB: tl.constexpr = W[5]
    SUBS: tl.constexpr = W[6]
    RUNS: tl.constexpr = SUBS * LOW // 8  # of bytes in a tile
    DTYPE: tl.constexpr = x.dtype.element_ty
    i = tl.arange(0, SUB)
    w = w + tl.zeros([BN], tl.int32)
    sums = tl.zeros([BN, BM] if FIRST else [BM, BN], tl.float32)
    low_at = (w + n * (PADDED * LOW // 8))[:, None] + i[None, :]
    upper_at = (w + W[12] + n * (PADDED * UPPER // 8))[:, None] + i[None, :]
    UNROLL: tl.constexpr = STEP // (SUB * SUBS) if STEP > SUB * SUBS and PADDED % STEP == 0 else 1
    for first_k in range(0, PADDED, SUB * SUBS * UNROLL):
        # scales are too narrow for asynchronous copies: those of several tiles are asked for before they are needed
        held = ()
        for run in tl.static_range(UNROLL * SUBS):
            held = held + run_scales(w, n, first_k + run * SUB, W, FAST)
        for tile in tl.static_range(UNROLL):
            k = first_k + tile * SUB * SUBS
            upper = i[None, :].to(tl.uint8)
            if UPPER > 0:
                upper = tl.load(upper_at + k * UPPER // 8)
            for run in tl.static_range(RUNS):
                low = tl.load(low_at + k * LOW // 8 + run * SUB)
                if FAST and W[19] != 0:
                    pair = code_pair(low, held[2 * (tile * SUBS + run)], held[2 * (tile * SUBS + RUNS + run)], W)
                for half in tl.static_range(8 // LOW):
                    if FAST and W[19] != 0:
                        values = pair[half]
                    else:
                        values = scaled(
                            low, upper, held[2 * (tile * SUBS + half * RUNS + run)],
                            held[2 * (tile * SUBS + half * RUNS + run) + 1], half * RUNS + run, W, BN, DTYPE, FAST,
                        )  # fmt: skip
                    first = k + (half * RUNS + run) * SUB
                    if PADDED == K:
                        xs = tl.load(x + first + i[None, :], mask=real[:, None], other=0)
                    else:
                        xs = tl.load(x + first + i[None, :], mask=real[:, None] & (first + i < K)[None, :], other=0)
                    if FIRST:
                        sums = tl.dot(values, tl.trans(xs), sums, input_precision="ieee")
                    else:
                        sums = tl.dot(xs, tl.trans(values), sums, input_precision="ieee")
    if FIRST:
        sums = tl.trans(sums)
    return sums


@triton.jit
def scales_of(w, k, n, W: tl.constexpr):
    """(s, c) in float32 of rows n at places k, in any shapes that broadcast."""
    d, minimum = unit_scales(w, n, k, True, W)
    return group_scales(d, minimum, w, n, k, True, W)


@triton.jit
def vector(x, w, n, W: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr):
    """float32 [BN]: the row at x times rows n of the matrix at w, TILES (a power of two) tiles of K at a time."""
    K: tl.constexpr = W[1]
    PADDED: tl.constexpr = W[2]
    LOW: tl.constexpr = W[3]
    UPPER: tl.constexpr = W[4]
    SUB: tl.constexpr = W[5]
    TILE: tl.constexpr = W[5] * W[6]
    RUNS: tl.constexpr = W[6] * LOW // 8
    SHIFTED: tl.constexpr = W[9] > 0 or W[11] > 0
    i = tl.arange(0, SUB)
    t = tl.arange(0, TILES)
    low_at = w + n[:, None, None] * (PADDED * LOW // 8) + t[None, :, None] * (TILE * LOW // 8) + i[None, None, :]
    upper_at = w + W[12] + n[:, None, None] * (PADDED * UPPER // 8) + t[None, :, None] * SUB + i[None, None, :]
    sums = tl.zeros([BN, TILES], tl.float32)
    if LOW >= 16:
        plain_at = w.to(tl.pointer_type(x.dtype.element_ty)) + n[:, None, None] * K
        for k in range(0, K, TILES * TILE):
            at = k + t[:, None] * TILE + i[None, :]
            xs = tl.load(x + at, mask=at < K, other=0).to(tl.float32)
            values = tl.load(plain_at + at[None, :, :], mask=(at < K)[None, :, :], other=0).to(tl.float32)
            sums += tl.sum(values * xs[None, :, :], 2)
        return tl.sum(sums, 1)
    for k in range(0, PADDED, TILES * TILE):
        tile_k = k + t * TILE
        inside = tile_k < PADDED
        upper = i[None, None, :].to(tl.uint8)
        if UPPER > 0:
            upper = tl.load(upper_at + k * UPPER // 8, mask=inside[None, :, None], other=0)
        for run in tl.static_range(RUNS):
            low = tl.load(low_at + k * LOW // 8 + run * SUB, mask=inside[None, :, None], other=0)
            for half in tl.static_range(8 // LOW):
                first = tl.minimum(tile_k, PADDED - TILE) + (half * RUNS + run) * SUB
                at = first[:, None] + i[None, :]
                xs = tl.load(x + at, mask=(inside[:, None]) & (at < K), other=0).to(tl.float32)
                levels = numbers(low, upper, half * RUNS + run, W)
                if W[8] < SUB:
                    s, c = scales_of(w, at[None, :, :], n[:, None, None], W)
                    sums += tl.sum((levels * s + c) * xs[None, :, :], 2)
                else:
                    s, c = scales_of(w, first[None, :], n[:, None], W)
                    sums += tl.sum(levels * xs[None, :, :], 2) * s
                    if SHIFTED:
                        sums += tl.sum(xs, 1)[None, :] * c
    return tl.sum(sums, 1)
