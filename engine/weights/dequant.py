"""Stored tensors into torch tensors, a piece at a time so that the float32 stage stays small, pieces on all threads.

The quantised types' arithmetic is that of the gguf package (`gguf.quants`), llama.cpp's own reference in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import gguf
import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelFileError
from engine.files.gguf.types import READABLE, GGMLType, by_name
from engine.files.model_file import Bytes, FileBytes, part, put, whole
from engine.weights import scaled_blocks as made
from engine.weights.threads import in_order

PIECE_VALUES = 1 << 20  # a multiple of every block
_PLAIN = 4  # times as many of types that are copied: what Python does for each takes as long as reading a million

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
# The bits of infinity, which those of NaN exceed, all of them but for the sign.
_INFINITY: dict[str, int] = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
# From where on a value is rounded to infinity in a type with less range.
_TOO_LARGE: dict[tuple[str, torch.dtype], int] = {
    ("F32", torch.bfloat16): 0x7F7F8000,
    ("F32", torch.float16): 0x477FF000,
    ("BF16", torch.float16): 0x4780,
}


@dataclass(frozen=True)
class Piece:
    """Values [first, first + count) of a stored tensor, not read yet: whole blocks."""

    data: npt.NDArray[np.uint8] | FileBytes
    type: str
    first: int
    count: int

    def into(self, out: torch.Tensor) -> int | None:
        """Reads them into `out`, [count] of a floating type in the CPU's memory; the first of the tensor's values that
        is NaN or infinite there, if one of these is. Numbers are judged by their bits, while they are in a cache."""
        if self.type not in _FLOATS:
            with np.errstate(invalid="ignore", over="ignore"):
                out.copy_(_values(self.data[:], self.type))
            return self._in_tensor(first_nonfinite(out))
        if _FLOATS[self.type] is out.dtype:
            raw = out.view(torch.uint8).numpy()
            put(self.data, raw)
        else:
            raw = self.data[:] if isinstance(self.data, FileBytes) else self.data.copy()
            out.copy_(torch.from_numpy(raw).view(_FLOATS[self.type]))
        limit = _TOO_LARGE.get((self.type, out.dtype), _INFINITY[self.type])
        return self._in_tensor(_first_reaching(raw, self.type, limit))

    def _in_tensor(self, index: int | None) -> int | None:
        return None if index is None else self.first + index


def pieces(data: npt.NDArray[np.uint8] | FileBytes, type: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    """A tensor's, in their order. ModelFileError for a type that cannot be read or data of another size than type and
    shape need."""
    _check(data, type, shape)
    kind, count = _kind(type), math.prod(shape)
    step = PIECE_VALUES * (_PLAIN if type in _FLOATS else 1)
    for first in range(0, count, step):
        some = min(step, count - first)
        begin, end = (at // kind.block * kind.size for at in (first, first + some))
        held = part(data, slice(begin, end))
        yield Piece(whole(held), type, first, some)


def dequantise(data: Bytes, type: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 `data` of a GGML type -> a fresh tensor of `shape` in a floating `dtype`, owning its memory. Values may be
    NaN or infinite.

    Raises ModelFileError as `pieces`.
    """
    out = unwritten(math.prod(shape), dtype=dtype)
    calls = (
        partial(piece.into, out[piece.first : piece.first + piece.count]) for piece in pieces(whole(data), type, shape)
    )
    with closing(in_order(calls)) as filled:
        for _ in filled:
            pass
    return out.reshape(shape)


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """For threads to write to, which are in no inference mode."""
    with torch.inference_mode(False):
        return torch.empty(*shape, dtype=dtype)


def nonfinite(data: Bytes, type: str, shape: tuple[int, ...]) -> int:
    """How many values (float types) or blocks (quantised types, by their scales) are NaN or infinite.

    Kernels that quantise or accumulate in integers turn such a value into finite nonsense, so backends ask first.
    """
    found = pieces(whole(data), type, shape)
    with closing(in_order(partial(_count_bad, piece) for piece in found)) as counts:
        return sum(counts)


def first_nonfinite(values: torch.Tensor) -> int | None:
    """Flat index of the first NaN or infinity of a contiguous tensor, if it has one. Reads memory once.

    A chunk's least and largest value are NaN or infinite if any of its values is; they take a tenth of the time of
    `isfinite` (8.6 and 0.83 GB/s of float32 on one thread, 6.1 and 0.31 of bfloat16).
    """
    flat = values.flatten()
    for at in range(0, flat.numel(), PIECE_VALUES):
        chunk = flat[at : at + PIECE_VALUES]
        if not torch.isfinite(torch.stack(torch.aminmax(chunk))).all():
            return at + int((~torch.isfinite(chunk)).nonzero()[0])
    return None


def _check(data: Bytes, type: str, shape: tuple[int, ...]) -> None:
    if type not in READABLE and type not in made.BLOCKS:
        raise ModelFileError(f"type {type} cannot be read; allowed are {', '.join(sorted({*READABLE, *made.BLOCKS}))}")
    kind = _kind(type)
    if shape[-1] % kind.block or math.prod(shape) // kind.block * kind.size != data.nbytes:
        raise ModelFileError(f"{data.nbytes} bytes are not a {type} tensor of shape {list(shape)}")


def _kind(type: str) -> GGMLType:
    return made.BLOCKS[type] if type in made.BLOCKS else by_name(type)


def _values(piece: _Piece, type: str) -> torch.Tensor:
    """Float32 of a quantised type, in one dimension."""
    if type in made.BLOCKS:
        return torch.from_numpy(made.values(piece, type))
    values = gguf.quants.dequantize(piece.reshape(1, -1), gguf.GGMLQuantizationType[type])
    return torch.from_numpy(values.reshape(-1))


def _first_reaching(raw: _Piece, type: str, limit: int) -> int | None:
    """The first number whose bits but for the sign reach `limit`. Two reductions, which numpy has vectorised, tell
    that there is none: the largest as signed numbers is a positive one, as unsigned ones a negative one."""
    size = 4 if type == "F32" else 2
    words, sign = raw.view(f"u{size}"), 1 << 8 * size - 1
    if raw.view(f"i{size}").max() < limit and words.max() < sign + limit:
        return None
    return int(np.argmax((words & (sign - 1)) >= limit))


def _count_bad(piece: Piece) -> int:
    data, type = piece.data[:], piece.type
    if type in _INFINITY:
        if _first_reaching(data, type, _INFINITY[type]) is None:
            return 0
        return int(np.count_nonzero((data.view("u4" if type == "F32" else "u2") & _INFINITY[type]) == _INFINITY[type]))
    if type in made.BLOCKS:
        return made.nonfinite(data, type)
    blocks = data.reshape(-1, by_name(type).size)
    if type in _SCALES:
        scales = np.concatenate([blocks[:, at : at + 2] for at in _SCALES[type]], axis=1).view(np.uint16)
        bad = (scales & 0x7C00) == 0x7C00
    elif type == "NVFP4":
        bad = blocks[:, :4] & 0x7F == 0x7F  # E4M3: all ones is NaN
    else:
        bad = ~np.isfinite(_values(data, type).numpy().reshape(len(blocks), -1))
    return int(np.count_nonzero(bad.any(axis=1)))
