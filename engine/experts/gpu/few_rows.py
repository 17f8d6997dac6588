"""Kernels in CUDA C++ (few_rows.cu) for steps of few rows of quantised experts: what they are compiled for, and which
layers they serve. GPUs before Hopper have no bulk copies, and the interpreter no GPU: there Triton's kernels
(row_kernels.py) compute the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from engine.architectures.parts.mlp import Activation
from engine.errors import EngineError
from engine.experts.gpu.few_lora import shares
from engine.experts.gpu.layout import Elementwise, ExpertLayout, Sizes
from engine.experts.gpu.nvrtc import Kernel, capability, shared_bytes_of_blocks
from engine.weights.tiled.layout import Matrix

HOPPER = (9, 0)  # the least compute capability
_OUTPUTS = (16, 8)  # of a block: the first of which two blocks fit a multiprocessor, so that one loads beside another
_FEW_OUTPUTS = (8,)  # of down in 8 bits, so that a block starts as soon as one of gate and up has ended
_RESERVED_BYTES = 1024  # of shared memory, by each block
_AT_ONCE = 4  # outputs of a warp's unit of work
_MOST_WARPS = 12
_MOST_CHOICES = 32  # of a row: a lane asks for each
_LINE = 32  # bytes of a row of a matrix that a lane reads


@dataclass(frozen=True)
class Source:
    """A kernel before it is compiled. `shared_bytes`: dynamic shared memory of a block."""

    name: str
    text: str
    outputs: int
    threads: int
    shared_bytes: int


def serves(matrix: Matrix) -> bool:
    """Whether the kernels read this matrix: whole tiles of runs of 32 values."""
    return not matrix.plain and matrix.padded_k == matrix.k and matrix.sub == 32


_Key: TypeAlias = tuple[ExpertLayout, int, Activation, bool, int, bool]


class FewRows:
    """The kernels of layers on a device, compiled when a layer first needs them; layers of one layout share them."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._kernels: dict[_Key, tuple[Kernel, Kernel] | None] = {}

    def kernels(
        self, layout: ExpertLayout, elementwise: Elementwise, slot_bytes: int, rank: int, out: torch.dtype
    ) -> tuple[Kernel, Kernel] | None:
        """Gate and up, and down, of experts in slots of `slot_bytes`, for rows with adapters of up to `rank` if that is
        not 0, whose results are of the type `out`; None: Triton's serve this layer. EngineError for results of another
        type than bf16 or float32, and if they cannot be compiled."""
        if out not in (torch.bfloat16, torch.float32):
            raise EngineError(f"results of experts in {out}: bfloat16 and float32 are computed")
        wide = out == torch.float32
        key = layout, slot_bytes, elementwise.activation, elementwise.biases is not None, rank, wide
        if key not in self._kernels:
            found = sources(self._sizes, *key, shared_bytes_of_blocks(self._device)) if _runs_on(self._device) else None
            self._kernels[key] = None if found is None else (self._compiled(found[0]), self._compiled(found[1]))
        return self._kernels[key]

    def _compiled(self, source: Source) -> Kernel:
        return Kernel(
            source.text,
            source.name,
            self._device,
            threads=source.threads,
            shared_bytes=source.shared_bytes,
            columns=source.outputs,
            early=source.name == "down_choices",
        )


def _runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and capability(device) >= HOPPER


def sources(
    sizes: Sizes,
    layout: ExpertLayout,
    slot_bytes: int,
    activation: Activation,
    biased: bool,
    rank: int,
    wide: bool,
    shared_limit: int,
) -> tuple[Source, Source] | None:
    """Gate and up, and down, of experts in slots of `slot_bytes`, for rows with adapters of up to `rank` if that is not
    0, whose results are float32 if `wide`, else bf16; None if they do not serve this layout. A block may have
    `shared_limit` bytes of shared memory if it is alone on its multiprocessor."""
    if not all(serves(matrix) for matrix in layout.matrices) or sizes.top_k > _MOST_CHOICES or slot_bytes % 16:
        return None
    _, up_at, down_at = layout.starts
    common: dict[str, float] = {
        "TOP_K": sizes.top_k, "EXPERTS": sizes.experts, "SIZE": slot_bytes, "UP_AT": up_at, "DOWN_AT": down_at,
        "BIASED": biased, "RANK": rank, "SHARES": shares(sizes), "WIDE": wide,
    }  # fmt: skip
    common |= Elementwise(activation).constants
    half = (shared_limit + _RESERVED_BYTES) // 2 - _RESERVED_BYTES
    gate_up, down = _gate_up(layout, sizes, common, half), _down(layout, sizes, common, half)
    return None if gate_up is None or down is None else (gate_up, down)


def _gate_up(layout: ExpertLayout, sizes: Sizes, common: dict[str, float], most: int) -> Source | None:
    gate, up, h = layout.gate, layout.up, sizes.hidden
    kinds = {gate.e4m3, up.e4m3}
    chunks = _chunks(lines_of(gate)) + _chunks(lines_of(up))
    for n in _OUTPUTS:
        shared = tile_bytes(gate, n) + tile_bytes(up, n) + sum(rows_bytes(h, halves) for halves in kinds)
        shared += chunks * n * 4 + 2 * n // _AT_ONCE * 8
        if shared <= most:
            matrices = {"GATE": gate, "UP": up}
            return _source("gate_up_choices", n, chunks, shared, matrices, common)
    return None


def _down(layout: ExpertLayout, sizes: Sizes, common: dict[str, float], most: int) -> Source | None:
    down, k = layout.down, sizes.top_k
    chunks = _chunks(k * lines_of(down))
    for n in _FEW_OUTPUTS if down.low == 8 else _OUTPUTS:
        shared = k * tile_bytes(down, n) + rows_bytes(k * sizes.inner, down.e4m3)
        shared += chunks * n * 4 + _up(3 * k * 4, 16) + (k * n * 4 if common["RANK"] else 0) + n // _AT_ONCE * 8
        if shared <= most:
            return _source("down_choices", n, chunks, shared, {"DOWN": down}, common)
    return None


def _source(
    name: str, n: int, chunks: int, shared: int, matrices: dict[str, Matrix], common: dict[str, float]
) -> Source:
    warps = _warps(chunks * n // _AT_ONCE)
    numbers = {"NT": n, "G": _AT_ONCE, "WARPS": warps, "THREADS": 32 * warps, "SHARED": shared} | common
    lines = [f"constexpr {_TYPES[type(value)]} {key} = {_literal(value)};" for key, value in numbers.items()]
    for key, matrix in matrices.items():
        lines.append(f"#define {key} Matrix<{', '.join(map(_literal, matrix.constants))}>")
    return Source(name, "\n".join([*lines, _text()]), n, 32 * warps, shared)


_TYPES = {int: "int", float: "float", bool: "bool"}


def _literal(value: float) -> str:
    """A constant in C++."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value!r}f" if isinstance(value, float) else str(value)


@functools.cache
def _text() -> str:
    return Path(__file__).with_suffix(".cu").read_text()


def lines_of(matrix: Matrix) -> int:
    """Of a row."""
    return matrix.k * matrix.low // 8 // _LINE


def _chunks(lines: int) -> int:
    return -(-lines // 32)


def _warps(units: int) -> int:
    """The fewest with which no warp has more units than with the most."""
    return min(range(1, _MOST_WARPS + 1), key=lambda warps: (-(-units // warps), warps))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _plane_bytes(lines: int, line_bytes: int) -> int:
    return (lines * line_bytes + lines * line_bytes // 128 * 16 + 31) // 16 * 16


def tile_bytes(matrix: Matrix, n: int) -> int:
    """Shared memory for n outputs' bits and scales (`Tile` in few_rows.cu)."""
    minima, steps = matrix.constants[9], matrix.constants[10]
    units, groups = matrix.lines("d"), matrix.lines("steps")
    size = n * matrix.k * (matrix.low + matrix.upper) // 8 + _plane_bytes(units, n * matrix.d_bytes)
    if minima:
        size += _plane_bytes(units, n * (2 if minima == 1 else 1))
    return size + {0: 0, 1: 2, 2: 1}[steps] * _plane_bytes(groups, n)


def rows_bytes(values: int, halves: bool) -> int:
    """Shared memory for rows of so many values in all, in int8 or float16 (`Rows` in few_rows.cu)."""
    size = _up(values * (2 if halves else 1), 64) + values // 8
    return _up(size + (0 if halves else values // 4), 16)
