"""Quantised weights of safetensors as blocks that hold their scales, as GGUF's do; for the packer and for numpy.

    F8_E4M3              d float32, 128 values of e4m3: d value
    INT4_G32, INT4_G128  d float16, zero uint8, 32 or 128 nibbles, of each 32 as Q4_0 has them: d (u - zero)

Torch-free. A run of more values with one scale is several blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.files.gguf.types import GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

F8 = "F8_E4M3"
BLOCKS = {
    kind.name: kind for kind in (GGMLType(F8, 128, 132), GGMLType("INT4_G32", 32, 19), GGMLType("INT4_G128", 128, 67))
}


def int4_type(group: int) -> str:
    """The type whose blocks hold groups of so many values, a multiple of 32."""
    return "INT4_G32" if group % 128 else "INT4_G128"


def f8_blocks(values: Bytes, scales: Floats, rows: int, group: int) -> Bytes:
    """`values` [n, k] e4m3, `scales` [n / rows, k / group], both rounded up; k is a multiple of 128. -> [bytes]"""
    n, k = values.shape
    each = np.repeat(np.repeat(scales, rows, 0)[:n], group // 128, 1)[:, : k // 128]
    held = np.ascontiguousarray(each, np.float32).view(np.uint8).reshape(n, k // 128, 4)
    return np.concatenate([held, values.reshape(n, k // 128, 128)], 2).reshape(-1)


def int4_blocks(quants: Bytes, zeros: Bytes, scales: npt.NDArray[np.float16], group: int) -> Bytes:
    """`quants` [n, k] of 0 to 15; `zeros`, `scales` [n, k / group]. -> blocks of `int4_type(group)`, [bytes]"""
    (n, k), size = quants.shape, BLOCKS[int4_type(group)].block
    parts = quants.reshape(n, k // size, size // 32, 2, 16)
    nibbles = np.asarray(parts[:, :, :, 0] | parts[:, :, :, 1] << 4, np.uint8).reshape(n, k // size, size // 2)
    held = np.repeat(np.ascontiguousarray(scales), group // size, 1).view(np.uint8).reshape(n, k // size, 2)
    points = np.repeat(zeros, group // size, 1)[:, :, None]
    return np.concatenate([held, points, nibbles], 2, dtype=np.uint8).reshape(-1)


def values(piece: Bytes, type: str) -> Floats:
    """Float32 of whole blocks, in one dimension."""
    kind = BLOCKS[type]
    blocks = piece.reshape(-1, kind.size)
    if type == F8:
        d = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
        return np.asarray(_e4m3()[blocks[:, 4:]] * d, np.float32).reshape(-1)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    nibbles = blocks[:, 3:].reshape(len(blocks), -1, 1, 16)
    u = np.concatenate([nibbles & 15, nibbles >> 4], 2).reshape(len(blocks), -1).astype(np.float32)
    return np.asarray((u - blocks[:, 2:3]) * d, np.float32).reshape(-1)


def nonfinite(piece: Bytes, type: str) -> int:
    """How many blocks hold a NaN or an infinity."""
    return int(np.count_nonzero(~np.isfinite(values(piece, type)).reshape(-1, BLOCKS[type].block).all(1)))


def _e4m3() -> Floats:
    """The 256 values: four bits of exponent (bias 7), three of fraction, no infinity, NaN where all bits are set."""
    bits = np.arange(128)
    exponent, fraction = bits >> 3, (bits & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10)).astype(np.float32)
    size[127] = np.nan
    return np.concatenate([size, -size])
