"""How a quantised matrix lies in GPU memory: planes of bits, each row contiguous, and scales by group.

    matrix [N, K] | low bits [N, K LOW / 8] | upper bits [N, K UPPER / 8] | d | minima | steps | minimum steps |

    quants   K is cut into tiles of SUBS runs of SUB values. A byte of a plane of b bits holds the same place of 8 / b
             runs, so that a kernel reads runs of bytes and gets runs of values: 4-bit with SUB 32, byte i of a tile
             holds value i in its low nibble and 32 + i in its high one. 8-bit quants are signed, or e4m3; 4-bit ones
             may be the places of values in a table of 16 (IQ4_NL, IQ4_XS, MXFP4).
    scales   one row of N per group: d and minima float16 [K / UNIT, N], steps int8 or uint8 [K / GROUP, N]; d may be
             a byte e that stands for 2^(e - 128) (MXFP4), or float32 (e4m3)

The values and the names of the formats are those of the CPU's panels (native/src/packing/format.hpp), and nothing is
rounded on the way. N is padded to 16, K to whole tiles, with scales of zero.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.weights.packed import packed_format, plain_format
from native import available as native_available

if TYPE_CHECKING:
    from engine.weights.store import WeightTensor

PANEL = 16
_ALIGN = 64  # bytes: of planes, so that rows of any matrix are read in vectors


@functools.cache
def packed_formats() -> Mapping[str, Any]:
    table: Mapping[str, Any] = importlib.import_module("native._native").packed_formats()
    return table


def has_tiles(form: str) -> bool:
    """Whether a packed format has a form for GPUs; others are dequantised there."""
    f = packed_formats()[form]
    return bool(f.scale_bytes) and f.low_bits in (4, 8) and not f.grid_values


PLAIN = ("bf16", "f32")
E4M3 = "f8"


def held_as(form: str, element_bytes: int) -> str:
    """How a GPU holds what the CPU has in a packed format."""
    if form not in PLAIN and has_tiles(form):
        return form
    return "f32" if element_bytes == 4 else "bf16"


def matrix_of(weight: WeightTensor, element_bytes: int, quantise: str | None) -> Matrix:
    """How a GPU holds a stored [n, k]; `quantise` ("int8", "int4"): what becomes of one that the file does not
    quantise. `element_bytes`: of one that is not quantised then. Without the native kernels, which pack, none is."""
    form = plain_format(element_bytes, None)
    if native_available()[0]:
        form = held_as(packed_format(weight.type, plain_format(element_bytes, quantise)), element_bytes)
    return Matrix(form, *weight.shape)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True)
class Matrix:
    """[n, k] in a packed format that `has_tiles`, or "bf16" or "f32": rows of numbers, with nothing beside."""

    form: str
    n: int
    k: int

    @property
    def format(self) -> Any:
        return packed_formats()[self.form]

    @property
    def plain(self) -> bool:
        return self.form in PLAIN

    @property
    def rows(self) -> int:
        return _up(self.n, PANEL)

    @property
    def low(self) -> int:
        return int(self.format.low_bits)

    @property
    def upper(self) -> int:
        return int(self.format.upper_bits)

    @property
    def subs(self) -> int:
        return 8 // (self.upper or self.low)

    @property
    def sub(self) -> int:
        """k of a run, which may have two groups."""
        return 32 if self.k % (32 * self.subs) == 0 or self.subs == 1 else 16

    @property
    def group(self) -> int:
        """k that share a scale."""
        return int(self.format.group or self.format.unit)

    @property
    def e4m3(self) -> bool:
        """Whether quants are floating-point numbers."""
        return self.form == E4M3

    @property
    def d_bytes(self) -> int:
        return 4 if self.e4m3 else 1 if self.format.exponents else 2

    @property
    def tile(self) -> int:
        """k of a tile."""
        return self.subs * self.sub

    @property
    def padded_k(self) -> int:
        return _up(self.k, self.tile)

    @functools.cached_property
    def planes(self) -> dict[str, tuple[int, int]]:
        """(offset, bytes) of each part of a quantised one."""
        f, n, k = self.format, self.rows, self.padded_k
        units, groups = -(-k // f.unit), -(-k // self.group)
        sizes = {
            "low": n * k * self.low // 8,
            "upper": n * k * self.upper // 8,
            "d": self.d_bytes * units * n,
            "minima": (2 if f.minimum_offset else 1 if f.zero_offset else 0) * units * n,
            "steps": groups * n if f.step_offset else 0,
            "minimum_steps": groups * n if f.minimum_step_offset else 0,
        }
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = (at, size)
            at = _up(at + size, _ALIGN)
        return found

    def lines(self, plane: str) -> int:
        """Of a plane: the matrix's rows, or its units or groups."""
        if plane in ("low", "upper"):
            return self.rows
        return -(-self.padded_k // (int(self.format.unit) if plane in ("d", "minima") else self.group))

    @property
    def num_bytes(self) -> int:
        if self.plain:
            return self.n * self.k * (4 if self.form == "f32" else 2)
        at, size = self.planes["minimum_steps"]
        return _up(at + size, _ALIGN)

    @functools.cached_property
    def constants(self) -> tuple[int, ...]:
        """What the kernels are compiled for, in the order that engine/weights/tiled/kernels.py reads."""
        if self.plain:
            step = next(step for step in (64, 32, 16) if self.k % step == 0)
            return self.n, self.k, self.k, 32 if self.form == "f32" else 16, 0, step, 1, *[0] * 13
        f, at = self.format, {name: place for name, (place, _) in self.planes.items()}
        minima = 1 if f.minimum_offset else 2 if f.zero_offset else 0  # 2: zero points, times d
        steps = 0 if not f.step_offset else 1 if f.minimum_offset else 2  # 2: signed
        bias = 0 if self.low == 8 or f.codes else int(f.bias)
        return (
            self.rows, self.k, self.padded_k, self.low, self.upper, self.sub, self.subs, int(f.unit), self.group,
            minima, steps, bias, at["upper"], at["d"], at["minima"], at["steps"], at["minimum_steps"],
            self.d_bytes, *_code_words(f.codes),
        )  # fmt: skip


def _code_words(codes: Sequence[int]) -> tuple[int, int]:
    """A table of 16 int8 as two numbers of eight bytes each; zeros without one."""
    if not codes:
        return 0, 0
    low, high = (bytes(code & 255 for code in codes[at : at + 8]) for at in (0, 8))
    return int.from_bytes(low, "little", signed=True), int.from_bytes(high, "little", signed=True)
