"""Stored tensors into torch tensors, a piece at a time so that the float32 stage stays small.

The quantised types' arithmetic is that of the gguf package (`gguf.quants`), llama.cpp's own reference in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import gguf
import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelFileError
from engine.files.gguf.types import READABLE, GGMLType, by_name
from engine.files.model_file import Bytes, whole
from engine.weights import scaled_blocks as made

_CHUNK = 1 << 19  # values; a multiple of every block

_Piece = npt.NDArray[np.uint8]

_FLOATS: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Where a block holds float16 scales (byte offsets).
_SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
_EXPONENT: dict[str, tuple[str, int]] = {  # word and exponent mask
    "F32": ("u4", 0x7F800000),
    "F16": ("u2", 0x7C00),
    "BF16": ("u2", 0x7F80),
}


def dequantise(data: Bytes, type: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 `data` of a GGML type -> a fresh tensor of `shape` in a floating `dtype`, owning its memory.

    Raises ModelFileError for a type that cannot be read or data of another size than type and shape need.
    """
    _check(data, type, shape)
    out = torch.empty(math.prod(shape), dtype=dtype)
    at = 0
    if _FLOATS.get(type) is dtype:
        raw = out.view(torch.uint8).numpy()
        for piece in _pieces(data, type):
            raw[at : at + len(piece)] = piece
            at += len(piece)
        return out.reshape(shape)
    for piece in _pieces(data, type):
        values = _values(piece, type)
        out[at : at + len(values)].copy_(values)
        at += len(values)
    return out.reshape(shape)


def nonfinite(data: Bytes, type: str, shape: tuple[int, ...]) -> int:
    """How many values (float types) or blocks (quantised types, by their scales) are NaN or infinite.

    Kernels that quantise or accumulate in integers turn such a value into finite nonsense, so backends ask first.
    """
    _check(data, type, shape)
    return sum(_bad(piece, type) for piece in _pieces(data, type))


def first_nonfinite(values: torch.Tensor) -> int | None:
    """Flat index of the first NaN or infinity of a contiguous tensor, if it has one. Reads memory once.

    A chunk's least and largest value are NaN or infinite if any of its values is; they take a tenth of the time of
    `isfinite` (8.6 and 0.83 GB/s of float32 on one thread, 6.1 and 0.31 of bfloat16).
    """
    flat = values.flatten()
    for at in range(0, flat.numel(), _CHUNK):
        chunk = flat[at : at + _CHUNK]
        if not torch.isfinite(torch.stack(torch.aminmax(chunk))).all():
            return at + int((~torch.isfinite(chunk)).nonzero()[0])
    return None


def _check(data: Bytes, type: str, shape: tuple[int, ...]) -> None:
    if type not in READABLE and type not in made.BLOCKS:
        raise ModelFileError(f"type {type} cannot be read; allowed are {', '.join(sorted({*READABLE, *made.BLOCKS}))}")
    kind = _kind(type)
    if shape[-1] % kind.block or math.prod(shape) // kind.block * kind.size != data.nbytes:
        raise ModelFileError(f"{data.nbytes} bytes are not a {type} tensor of shape {list(shape)}")


def _pieces(data: Bytes, type: str) -> Iterator[_Piece]:
    kind, held = _kind(type), whole(data)
    step = _CHUNK // kind.block * kind.size
    return (held[at : at + step] for at in range(0, held.nbytes, step))


def _kind(type: str) -> GGMLType:
    return made.BLOCKS[type] if type in made.BLOCKS else by_name(type)


def _values(piece: _Piece, type: str) -> torch.Tensor:
    """One dimension, float32 or the stored float type."""
    if type in _FLOATS:
        return torch.from_numpy(piece.copy()).view(_FLOATS[type])
    if type in made.BLOCKS:
        return torch.from_numpy(made.values(piece, type))
    values = gguf.quants.dequantize(piece.reshape(1, -1), gguf.GGMLQuantizationType[type])
    return torch.from_numpy(values.reshape(-1))


def _bad(piece: _Piece, type: str) -> int:
    if type in _EXPONENT:
        word, mask = _EXPONENT[type]
        return int(np.count_nonzero((piece.view(word) & mask) == mask))
    if type in made.BLOCKS:
        return made.nonfinite(piece, type)
    blocks = piece.reshape(-1, by_name(type).size)
    if type in _SCALES:
        scales = np.concatenate([blocks[:, at : at + 2] for at in _SCALES[type]], axis=1).view(np.uint16)
        bad = (scales & 0x7C00) == 0x7C00
    elif type == "NVFP4":
        bad = blocks[:, :4] & 0x7F == 0x7F  # E4M3: all ones is NaN
    else:
        bad = ~np.isfinite(_values(piece, type).numpy().reshape(len(blocks), -1))
    return int(np.count_nonzero(bad.any(axis=1)))
