"""Products with a matrix in tiles (layout.py), for kernels of every kind of projection.

    product   [BM, K] x [BN, K]^T in matrix instructions: the quants are exact in bf16, so a group's product is scaled
              after it; SCALED: the weights are scaled first, for many rows
    vector    [K] x [BN, K]^T in float32, for single rows: many of a column's bytes are asked for at once

`W` is Matrix.constants. Plain matrices (W[3] is 16 or 32 bits) are of x's type. A quant u stands for s u + c: s is d,
or d times the group's step; c takes the bias or the minimum. FAST makes bf16 of nibbles by bits alone: 0x4300 | u is
128 + u, so that c takes 128 s off again.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nibbles_low(low):
    """uint8 -> bf16 128 + the low nibble."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
        }
        """,
        "=r,=r,r", [low], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def nibbles_high(low):
    """uint8 -> bf16 128 + the high nibble."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b, w;
            shr.b32 w, $2, 4;
            prmt.b32 a, w, 0, 0x4140;
            prmt.b32 b, w, 0, 0x4342;
            lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
        }
        """,
        "=r,=r,r", [low], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def below_128(quants):
    """uint8 below 128 -> bf16 128 + the quant."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            or.b32 $0, a, 0x43004300;
            or.b32 $1, b, 0x43004300;
        }
        """,
        "=r,=r,r", [quants], dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.constexpr_function
def scaled_code(low, upper, run, high):
    """Four quants of a run, s and c twice in pairs -> bf16 s u + c. 0x43 before a byte below 128 makes 128 more of it,
    of a sign bit alone 128 or 256."""
    lines = ".reg .b32 w, m, a, b, o; "
    if low == 8:
        lines += "and.b32 m, $2, 0x80808080; prmt.b32 a, m, 0x43434343, 0x4140; prmt.b32 b, m, 0x43434343, 0x4342;"
        lines += "and.b32 m, $2, 0x7F7F7F7F; "
        takes = ("a", "b")
    else:
        lines += ("shr.b32 w, $2, 4;" if high else "mov.b32 w, $2;") + "and.b32 m, w, 0x0F0F0F0F;"
        if upper:
            bits, turn = (0x10101010, 0x30303030)[upper - 1], (4 - run * upper) % 32
            lines += f"shf.l.wrap.b32 o, $7, $7, {turn}; lop3.b32 m, o, {bits}, m, 0xEA;"
        lines += "mov.b32 a, 0x43004300;"
        takes = ("a", "a")
    lines += ".reg .b32 x, y; prmt.b32 x, m, 0x43434343, 0x4140; prmt.b32 y, m, 0x43434343, 0x4342;"
    lines += f"sub.rn.bf16x2 x, x, {takes[0]}; sub.rn.bf16x2 y, y, {takes[1]};"
    return "{" + lines + "fma.rn.bf16x2 $0, x, $3, $5; fma.rn.bf16x2 $1, y, $4, $6; }"


@triton.jit
def scaled(low, upper, s, c, S: tl.constexpr, W: tl.constexpr):
    """Run S of a tile, from the bytes that hold it, in bf16; s and c in bf16."""
    CODE: tl.constexpr = scaled_code(W[3], W[4], S, W[6] // 2 <= S)
    if W[4] > 0:
        return tl.inline_asm_elementwise(
            CODE, "=r,=r,r,r,r,r,r,r", [low, s, c, upper], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return tl.inline_asm_elementwise(CODE, "=r,=r,r,r,r,r,r", [low, s, c], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def numbers(low, upper, S: tl.constexpr, W: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Run S of a tile, from the bytes that hold it, as numbers that DTYPE holds exactly; 128 more if FAST."""
    LOW: tl.constexpr = W[3]
    UPPER: tl.constexpr = W[4]
    HIGH: tl.constexpr = W[6] // 2 <= S
    if LOW == 8:
        return low.to(tl.int8, bitcast=True).to(DTYPE)
    if UPPER > 0:
        quants = (low >> 4) if HIGH else (low & 15)
        quants = quants | (((upper >> (S * UPPER)) & ((1 << UPPER) - 1)) << 4)
        if FAST:
            return below_128(quants)
        return quants.to(DTYPE)
    if FAST:
        return nibbles_high(low) if HIGH else nibbles_low(low)
    return ((low >> 4) if HIGH else (low & 15)).to(DTYPE)


@triton.jit
def scales_of(w, group_k, n, W: tl.constexpr, FAST: tl.constexpr):
    """(s, c) in float32 of the groups that hold k = group_k, of rows n; any shapes that broadcast."""
    ROWS: tl.constexpr = W[0]
    UNIT: tl.constexpr = W[7]
    GROUP: tl.constexpr = W[8]
    MINIMA: tl.constexpr = W[9]
    STEPS: tl.constexpr = W[10]
    OFFSET: tl.constexpr = W[11] + (128 if FAST and W[3] == 4 else 0)
    at = group_k // UNIT * ROWS + n
    s = tl.load((w + W[13]).to(tl.pointer_type(tl.float16)) + at).to(tl.float32)
    c = s * 0.0
    if MINIMA == 1:
        c = tl.load((w + W[14]).to(tl.pointer_type(tl.float16)) + at).to(tl.float32)
    if MINIMA == 2:
        c = -s * tl.load(w + W[14] + at).to(tl.float32)
    if STEPS > 0:
        step_at = group_k // GROUP * ROWS + n
        step = tl.load(w + W[15] + step_at)
        if STEPS == 2:
            s = s * step.to(tl.int8, bitcast=True).to(tl.float32)
        else:
            s = s * step.to(tl.float32)
            c = -c * tl.load(w + W[16] + step_at).to(tl.float32)
    if OFFSET > 0:
        c = c - OFFSET * s
    return s, c


@triton.jit
def product(
    x, real, w, n, W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SCALED: tl.constexpr, FAST: tl.constexpr,
    STEP: tl.constexpr = 1,
):  # fmt: skip
    """float32 [BM, BN]. STEP: values of K at a time, at least a tile, and a tile if K is no multiple.
    x: pointers [BM, 1] to rows, read where `real` [BM]; n [BN]: rows of the matrix at w."""
    K: tl.constexpr = W[1]
    PADDED: tl.constexpr = W[2]
    LOW: tl.constexpr = W[3]
    UPPER: tl.constexpr = W[4]
    SUB: tl.constexpr = W[5]
    SUBS: tl.constexpr = W[6]
    RUNS: tl.constexpr = SUBS * LOW // 8  # of bytes in a tile
    SHIFTED: tl.constexpr = W[9] > 0 or W[11] > 0 or (FAST and LOW == 4)
    DTYPE: tl.constexpr = x.dtype.element_ty
    i = tl.arange(0, SUB)
    low_at = w + n[:, None] * (PADDED * LOW // 8) + i[None, :]
    upper_at = w + W[12] + n[:, None] * (PADDED * UPPER // 8) + i[None, :]
    sums = tl.zeros([BM, BN], tl.float32)
    if LOW >= 16:
        plain_at = w.to(tl.pointer_type(DTYPE)) + n[:, None] * K + i[None, :]
        for k in range(0, K, SUB):
            xs = tl.load(x + k + i[None, :], mask=real[:, None], other=0)
            sums = tl.dot(xs, tl.trans(tl.load(plain_at + k)), sums, input_precision="ieee")
        return sums
    ones = tl.full([SUB, BN], 1.0, DTYPE)
    # scales are too narrow for asynchronous copies: those of several tiles are waited for at once
    UNROLL: tl.constexpr = STEP // (SUB * SUBS) if STEP > SUB * SUBS and PADDED % STEP == 0 else 1
    for first_k in range(0, PADDED, SUB * SUBS * UNROLL):
        for tile in tl.static_range(UNROLL):
            k = first_k + tile * SUB * SUBS
            upper = i[None, :].to(tl.uint8)
            if UPPER > 0:
                upper = tl.load(upper_at + k * UPPER // 8)
            for run in tl.static_range(RUNS):
                low = tl.load(low_at + k * LOW // 8 + run * SUB)
                for half in tl.static_range(8 // LOW):
                    first = k + (half * RUNS + run) * SUB
                    if PADDED == K:
                        xs = tl.load(x + first + i[None, :], mask=real[:, None], other=0)
                    else:
                        xs = tl.load(x + first + i[None, :], mask=real[:, None] & (first + i < K)[None, :], other=0)
                    s, c = scales_of(w, first, n, W, FAST and not SCALED)
                    if not (FAST and SCALED):
                        levels = numbers(low, upper, half * RUNS + run, W, DTYPE, FAST)
                    if SCALED:
                        if FAST:
                            s16, c16 = s.to(tl.bfloat16)[:, None], c.to(tl.bfloat16)[:, None]
                            values = scaled(low, upper, s16, c16, half * RUNS + run, W)
                        else:
                            values = (levels.to(tl.float32) * s[:, None] + c[:, None]).to(DTYPE)
                        sums = tl.dot(xs, tl.trans(values), sums, input_precision="ieee")
                    else:
                        sums += tl.dot(xs, tl.trans(levels), input_precision="ieee") * s[None, :]
                        if SHIFTED:
                            sums += tl.dot(xs, ones, input_precision="ieee") * c[None, :]
    return sums


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
                levels = numbers(low, upper, half * RUNS + run, W, tl.float32, False)
                s, c = scales_of(w, first[None, :], n[:, None], W, False)
                sums += tl.sum(levels * xs[None, :, :], 2) * s
                if SHIFTED:
                    sums += tl.sum(xs, 1)[None, :] * c
    return tl.sum(sums, 1)
