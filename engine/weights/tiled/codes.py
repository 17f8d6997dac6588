"""4-bit quants that are places in a table of 16 int8 (IQ4_NL, IQ4_XS, MXFP4), and e4m3 ones, as numbers.

`W` is Matrix.constants; W[18] and W[19] hold the table, eight bytes each. `prmt` of NVIDIA's assembly picks four of
eight bytes by three bits each: twice, and a third time by the fourth bit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def code_words(low, high):
    """The table as four words of assembly."""
    return [f"0x{half >> at & 0xFFFFFFFF:08X}" for half in (low, high) for at in (0, 32)]


@triton.constexpr_function
def number_words(low, high):
    """The table in bf16: four words of its numbers' low bytes, four of their high ones."""
    planes = [0, 0]
    for place in range(16):
        byte = (high if place > 7 else low) >> place % 8 * 8 & 255
        size, bits = 256 - byte if byte > 127 else byte, 0
        if size:
            exponent = size.bit_length() - 1
            bits = (byte >> 7) << 15 | (127 + exponent) << 7 | (size << 7 >> exponent) & 127
        planes = [planes[0] | (bits & 255) << 8 * place, planes[1] | (bits >> 8) << 8 * place]
    return [f"0x{plane >> at & 0xFFFFFFFF:08X}" for plane in planes for at in (0, 32, 64, 96)]


@triton.jit
def code_of(place, W: tl.constexpr):
    """int32 of places in the table."""
    place = place.to(tl.int64)
    word = tl.where(place < 8, W[18], W[19])
    return ((word << (56 - 8 * (place & 7))) >> 56).to(tl.int32)


@triton.jit
def e4m3(bits):
    """uint8 -> float32, by way of float16's exponents."""
    wide = bits.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.constexpr_function
def pair_code(low, high):
    """Four bytes of places, s of those in low nibbles twice in pairs and of those in high ones -> bf16 s code."""
    lines = ".reg .b32 l, m, p, q, t, u, c, d, e, f, z, " + ", ".join(f"t{i}" for i in range(8)) + ";"
    lines += "".join(f"mov.b32 t{i}, {word};" for i, word in enumerate(number_words(low, high)))
    lines += "and.b32 l, $4, 0x77777777; shr.b32 m, l, 16; mov.b32 z, 0x80008000;"
    lines += "shr.b32 p, $4, 1; lop3.b32 p, p, 0x44444444, 0x32103210, 0xEA; shr.b32 q, p, 16;"
    for first, out, places, picks in ((0, "c", "l", "p"), (0, "d", "m", "q"), (4, "e", "l", "p"), (4, "f", "m", "q")):
        lines += f"prmt.b32 t, t{first}, t{first + 1}, {places}; prmt.b32 u, t{first + 2}, t{first + 3}, {places};"
        lines += f"prmt.b32 {out}, t, u, {picks};"
    for number, halves, order in (
        (0, "c, e", "0x6240"),
        (1, "d, f", "0x6240"),
        (2, "c, e", "0x7351"),
        (3, "d, f", "0x7351"),
    ):
        lines += f"prmt.b32 t, {halves}, {order}; fma.rn.bf16x2 ${number}, t, ${number + 5}, z;"
    return "{" + lines + "}"


@triton.jit
def code_pair(low, s, s2, W: tl.constexpr):
    """Bytes of places -> bf16 of those in low nibbles times s, and of those in high nibbles times s2."""
    CODE: tl.constexpr = pair_code(W[18], W[19])
    return tl.inline_asm_elementwise(
        CODE, "=&r,=&r,=&r,=&r,r,r,r,r,r", [low, s, s2], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
