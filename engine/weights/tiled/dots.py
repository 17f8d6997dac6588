"""Products of single rows with a matrix in tiles (layout.py), in integers: four values an instruction.

A row's values become int8 with one scale per group, or run of a tile if that is shorter (16 or 32 values), as on the
CPU. Quants stay as they are stored: words of eight bytes of a plane are masked and multiplied with the words of the
runs that they hold; places in a table become its values first. A group's minimum or bias meets the sum of the row's
int8 values, so that rounding them shifts no sum. Quants in e4m3 have no such product.

`W` is Matrix.constants. ASSEMBLY: NVIDIA's dot product of four bytes; without it the same sums in plain operations.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from engine.weights.tiled.codes import code_of, code_words
from engine.weights.tiled.scales import group_scales, unit_scales

_AT_ONCE = 2048  # values of a column that a program asks for at once


def tiles_at_once(constants: tuple[int, ...]) -> int:
    """Of Matrix.constants: a power of two that leaves hardly a tile of the last step idle."""
    _, _, padded, _, _, sub, subs, *_ = constants
    count, most = padded // (sub * subs), max(1, _AT_ONCE // (sub * subs))
    whole = 1 << (count - 1).bit_length()
    if whole <= most and 4 * count >= 3 * whole:
        return whole
    even = min(count & -count, most)
    return even if count <= 8 * even else min(whole, most)


@triton.constexpr_function
def parts_of(constants):
    """Groups of a run."""
    sub, group = constants[5], constants[8]
    return sub // group if group < sub else 1


@triton.constexpr_function
def nibbles_code(upper, run, high):
    """The nibbles of two words with their `upper` bits, those of run `run` of a tile. High nibbles that stand alone are
    taken as sixteen times as much."""
    lines = ".reg .b32 a, b, p, q, m, d; mov.b64 {a, b}, $1; mov.b64 {p, q}, $2; mov.b32 d, 0;"
    if not upper:
        mask = "0xF0F0F0F0" if high else "0x0F0F0F0F"
        for word, x in ("ap", "bq"):
            lines += f"and.b32 m, {word}, {mask}; dp4a.u32.s32 d, m, {x}, d;"
        return "{" + lines + ("shr.s32 $0, d, 4;" if high else "mov.b32 $0, d;") + "}"
    bits, turn = (0x10101010, 0x30303030)[upper - 1], (4 - run * upper) % 32
    lines += ".reg .b32 f, g; mov.b64 {f, g}, $3;"
    for word, more, x in ("afp", "bgq"):
        if high:
            lines += f"shr.b32 {word}, {word}, 4;"
        # to bit 4 of each byte; the mask takes away what comes from another byte
        lines += f"shf.l.wrap.b32 m, {more}, {more}, {turn}; and.b32 m, m, {bits};"
        lines += f"lop3.b32 m, {word}, 0x0F0F0F0F, m, 0xEA; dp4a.u32.s32 d, m, {x}, d;"
    return "{" + lines + "mov.b32 $0, d; }"


_BYTES = tl.constexpr(
    "{ .reg .b32 a, b, p, q, d; mov.b64 {a, b}, $1; mov.b64 {p, q}, $2; mov.b32 d, 0;"
    "dp4a.s32.s32 d, a, p, d; dp4a.s32.s32 d, b, q, d; mov.b32 $0, d; }"
)


@triton.jit
def _byte_dots(levels, x):
    """Sums of products of the bytes of two int64, the first below 128 or signed."""
    sums = levels.to(tl.int32) * 0
    for byte in tl.static_range(8):
        sums += ((levels << (56 - 8 * byte)) >> 56).to(tl.int32) * ((x << (56 - 8 * byte)) >> 56).to(tl.int32)
    return sums


@triton.jit
def byte_products(low, x, ASSEMBLY: tl.constexpr):
    """int64 of eight signed bytes each -> int32."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(_BYTES, "=r,l,l", [low, x], dtype=tl.int32, is_pure=True, pack=1)
    return _byte_dots(low, x)


@triton.jit
def nibble_products(
    low, upper, x, UPPER: tl.constexpr, RUN: tl.constexpr, HALF: tl.constexpr, RUNS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """int64 of sixteen nibbles, with the bytes of their upper bits -> int32: run RUN + HALF RUNS with x."""
    if ASSEMBLY:
        CODE: tl.constexpr = nibbles_code(UPPER, RUN + HALF * RUNS, HALF == 1)
        if UPPER == 0:
            return tl.inline_asm_elementwise(CODE, "=r,l,l", [low, x], dtype=tl.int32, is_pure=True, pack=1)
        return tl.inline_asm_elementwise(CODE, "=r,l,l,l", [low, x, upper], dtype=tl.int32, is_pure=True, pack=1)
    levels = (low >> (4 * HALF)) & 0x0F0F0F0F0F0F0F0F
    if UPPER > 0:
        levels |= ((upper >> (UPPER * (RUN + HALF * RUNS))) & (0x0101010101010101 * ((1 << UPPER) - 1))) << 4
    return _byte_dots(levels, x)


@triton.constexpr_function
def coded_code(low, high):
    """The nibbles of two words as places in a table: those that are low with one row's bytes, those that are high with
    another's. A nibble's three low bits choose from either half of the table, the fourth between what they found."""
    tables = code_words(low, high)
    lines = ".reg .b32 a, b, p, q, r, s, d, e, l, m, f, g, t, u, x, y, t0, t1, t2, t3;"
    lines += "mov.b64 {a, b}, $2; mov.b64 {p, q}, $3; mov.b64 {r, s}, $4; mov.b32 d, 0; mov.b32 e, 0;"
    lines += "".join(f"mov.b32 t{i}, {word};" for i, word in enumerate(tables))
    for word, first, second in ("apr", "bqs"):
        lines += f"and.b32 l, {word}, 0x77777777; shr.b32 m, l, 16;"
        lines += f"shr.b32 f, {word}, 1; lop3.b32 f, f, 0x44444444, 0x32103210, 0xEA; shr.b32 g, f, 16;"
        lines += "prmt.b32 t, t0, t1, l; prmt.b32 u, t2, t3, l; prmt.b32 x, t, u, f;"
        lines += "prmt.b32 t, t0, t1, m; prmt.b32 u, t2, t3, m; prmt.b32 y, t, u, g;"
        lines += f"prmt.b32 t, x, y, 0x6420; dp4a.s32.s32 d, t, {first}, d;"
        lines += f"prmt.b32 u, x, y, 0x7531; dp4a.s32.s32 e, u, {second}, e;"
    return "{" + lines + "mov.b32 $0, d; mov.b32 $1, e; }"


@triton.jit
def _code_dots(places, x, W: tl.constexpr):
    """As `_byte_dots`, of places in the table."""
    sums = places.to(tl.int32) * 0
    for byte in tl.static_range(8):
        sums += code_of((places >> (8 * byte)) & 15, W) * ((x << (56 - 8 * byte)) >> 56).to(tl.int32)
    return sums


@triton.jit
def code_products(low, first, second, W: tl.constexpr, ASSEMBLY: tl.constexpr):
    """int64 of sixteen nibbles -> two int32: the low ones with eight bytes of one run, the high ones with another's."""
    if ASSEMBLY:
        CODE: tl.constexpr = coded_code(W[18], W[19])
        return tl.inline_asm_elementwise(
            CODE, "=r,=r,l,l,l", [low, first, second], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    return _code_dots(low, first, W), _code_dots(low >> 4, second, W)


@triton.jit
def int8_words(xs, J: tl.constexpr, TILES: tl.constexpr, SUB: tl.constexpr):
    """float32 [J, TILES, SUB] -> (int64 [J, 1, TILES, SUB / 8] of int8, scales [J, 1, TILES], their sums, scaled)."""
    most = tl.max(tl.abs(xs), 2)
    per_step = tl.where(most > 0, 127.0 / most, 0.0)
    # 1.5 * 2^23 leaves the nearest integer in the lowest bits
    quants = (xs * per_step[:, :, None] + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    scale = most * (1.0 / 127.0)
    sums = tl.sum(quants, 2).to(tl.float32) * scale
    place = 8 * tl.arange(0, 4)
    fours = tl.sum((tl.reshape(quants, [J, TILES, SUB // 4, 4]) & 255) << place[None, None, None, :], 3)
    first, second = tl.split(tl.reshape(fours, [J, TILES, SUB // 8, 2]))
    words = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    return words[:, None, :, :], scale[:, None, :], sums[:, None, :]


@triton.jit
def _values(x, k, W: tl.constexpr, JX: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr):
    """`int8_words` of PART values from each k [PARTS] on."""
    at = k[None, :, None] + tl.arange(0, PART)[None, None, :]
    if EVEN:
        xs = tl.load(x[:, None, None] + at).to(tl.float32)
    else:
        xs = tl.load(x[:, None, None] + at, mask=at < W[1], other=0).to(tl.float32)
    return int8_words(xs, JX, PARTS, PART)


@triton.jit
def _with_run(sums, dots, scale, total, d, minimum, base, rows, start, inside, W: tl.constexpr):
    """`sums` and the scaled products of a run's parts, which begin at `start`."""
    if W[7] % (W[5] * W[6]) != 0:
        d, minimum = unit_scales(base, rows, start, inside, W)
    s, c = group_scales(d, minimum, base, rows, start, inside, W)
    sums += tl.sum(dots, 3).to(tl.float32) * (s * scale)
    if W[9] > 0 or W[11] > 0:
        sums += c * total
    return sums


@triton.jit
def _some_tiles(
    sums, x, w, n, real, k, W: tl.constexpr, JX: tl.constexpr, TILES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`sums` [J, BN, PARTS] and what TILES tiles from k on add. A tile has a part for each group of a run: the same
    places of all its runs."""
    PADDED: tl.constexpr = W[2]
    LOW: tl.constexpr = W[3]
    UPPER: tl.constexpr = W[4]
    SUB: tl.constexpr = W[5]
    TILE: tl.constexpr = W[5] * W[6]
    RUNS: tl.constexpr = W[6] * LOW // 8
    EACH: tl.constexpr = parts_of(W)
    PART: tl.constexpr = SUB // EACH
    PARTS: tl.constexpr = TILES * EACH
    EVEN: tl.constexpr = PADDED % (TILES * TILE) == 0 and W[1] == PADDED
    j = tl.arange(0, PART // 8)[None, None, None, :]
    t = tl.arange(0, PARTS)
    base, rows = w[:, None, None], n[None, :, None]
    tile_k, place = k + t // EACH * TILE, t % EACH * PART
    inside = real[:, None, None] & (tile_k < PADDED)[None, None, :]
    from_k, word = tl.minimum(tile_k, PADDED - TILE)[None, None, :], (place // 8)[None, None, :]
    words = tl.pointer_type(tl.int64)
    low_at = rows * (PADDED * LOW // 64) + from_k * LOW // 64 + word
    low_at = base[:, :, :, None].to(words) + low_at[:, :, :, None] + j
    upper = j
    if UPPER > 0:
        upper_at = rows * (PADDED * UPPER // 64) + from_k * UPPER // 64 + word
        upper_at = (base + W[12])[:, :, :, None].to(words) + upper_at[:, :, :, None] + j
        upper = tl.load(upper_at, mask=inside[:, :, :, None], other=0)
    d, minimum = sums, sums  # unless a tile's values share them
    if W[7] % TILE == 0:
        d, minimum = unit_scales(base, rows, from_k, inside, W)
    part_k, start = tile_k + place, from_k + place[None, None, :]
    for run in tl.static_range(RUNS):
        low = tl.load(low_at + run * (SUB // 8), mask=inside[:, :, :, None], other=0)
        xw, scale, total = _values(x, part_k + run * SUB, W, JX, PARTS, PART, EVEN)
        if LOW == 8:
            dots = byte_products(low, xw, ASSEMBLY)
            sums = _with_run(sums, dots, scale, total, d, minimum, base, rows, start + run * SUB, inside, W)
        else:
            xw2, scale2, total2 = _values(x, part_k + (RUNS + run) * SUB, W, JX, PARTS, PART, EVEN)
            if W[19] != 0:
                dots, dots2 = code_products(low, xw, xw2, W, ASSEMBLY)
            else:
                dots = nibble_products(low, upper, xw, UPPER, run, 0, RUNS, ASSEMBLY)
                dots2 = nibble_products(low, upper, xw2, UPPER, run, 1, RUNS, ASSEMBLY)
            sums = _with_run(sums, dots, scale, total, d, minimum, base, rows, start + run * SUB, inside, W)
            second = start + (RUNS + run) * SUB
            sums = _with_run(sums, dots2, scale2, total2, d, minimum, base, rows, second, inside, W)
    return sums


@triton.jit
def row_products(
    x, w, n, real, W: tl.constexpr, JX: tl.constexpr, J: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """float32 [J, BN]: rows at pointers x [JX] (JX is J, or 1: one for all) times rows n [BN] of quantised matrices at
    pointers w [J], zero where not `real` [J]; TILES (a power of two) tiles of K at a time."""
    PADDED: tl.constexpr = W[2]
    STEP: tl.constexpr = TILES * W[5] * W[6]
    sums = tl.zeros([J, BN, TILES * parts_of(W)], tl.float32)
    if PADDED <= 8 * STEP:
        for k in tl.static_range(0, PADDED, STEP):
            sums = _some_tiles(sums, x, w, n, real, k, W, JX, TILES, ASSEMBLY)
    else:
        for k in range(0, PADDED, STEP):
            sums = _some_tiles(sums, x, w, n, real, k, W, JX, TILES, ASSEMBLY)
    return tl.sum(sums, 2)
