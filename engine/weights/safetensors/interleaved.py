"""Routed experts whose gate and up lie in one tensor by turns: taken apart when they are read.

mlp.experts.gate_up_proj [E, H, 2 I], mlp.experts.down_proj [E, I, H]        plain weights, inputs before outputs
mlp.experts.gate_up_proj_blocks u8 [E, 2 I, H / 32, 16], _scales u8 [E, 2 I, H / 32], down_proj_... likewise: MXFP4
mlp.experts.gate_up_proj_bias [E, 2 I], mlp.experts.down_proj_bias [E, H]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.architectures.config import ModelConfig
from engine.architectures.parts.mlp import Sparse
from engine.errors import ModelFileError
from engine.files.model_file import FileBytes, MadeBytes
from engine.files.safetensors import FLOATS, SafetensorsFile
from engine.weights.safetensors.stored import Stored

_BLOCK, _BLOCK_BYTES = 32, 17  # of MXFP4 in GGUF: a scale and 16 bytes
_MXFP4 = np.dtype([("scale", np.uint8), ("quants", "V16")])
_LOW, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)  # the low nibbles of eight bytes
_Bytes = npt.NDArray[np.uint8]
Files = dict[str, SafetensorsFile]


def take_interleaved(files: Files, config: ModelConfig, folder: Path) -> dict[str, Stored]:
    """Each expert's gate, up and down, and the biases of all, by their names here; the tensors that they are made of
    leave `files`. Empty for a model whose experts lie otherwise. Raises ModelFileError for what is missing or of
    another shape."""
    spec = config.experts
    if spec is None or not spec.interleaved:
        return {}
    taken: dict[str, Stored] = {}
    for layer in config.sparse_layers:
        held = _Layer(files, f"model.layers.{layer}.mlp.experts", folder, spec, config.hidden_size)
        for name, stored in (*held.weights(), *held.biases()):
            taken[f"{held.at}.{name}"] = stored
    return taken


@dataclass(frozen=True)
class _Layer:
    files: Files
    at: str
    folder: Path
    spec: Sparse
    hidden: int

    def weights(self) -> Iterator[tuple[str, Stored]]:
        inner = self.spec.intermediate
        for tensor, parts, shape in (
            ("gate_up_proj", ("gate", "up"), (inner, self.hidden)),
            ("down_proj", ("down",), (self.hidden, inner)),
        ):
            packed = f"{self.at}.{tensor}_blocks" in self.files
            yield from self._packed(tensor, parts, shape) if packed else self._plain(tensor, parts, shape)

    def biases(self) -> Iterator[tuple[str, Stored]]:
        experts = self.spec.experts
        for tensor, parts, width in (
            ("gate_up_proj_bias", ("gate", "up"), self.spec.intermediate),
            ("down_proj_bias", ("down",), self.hidden),
        ):
            kind, path, data = self._take(tensor, (experts, len(parts) * width), FLOATS)
            size = data.nbytes // (experts * len(parts) * width)
            for turn, part in enumerate(parts):
                made = MadeBytes((data,), experts * width * size, _Turn(data, size, turn, len(parts)).values)
                yield f"{part}_bias", Stored((experts, width), kind, path, made)

    def _plain(self, tensor: str, parts: tuple[str, ...], shape: tuple[int, int]) -> Iterator[tuple[str, Stored]]:
        out, inner, turns = *shape, len(parts)
        kind, path, data = self._take(tensor, (self.spec.experts, inner, turns * out), FLOATS)
        each = data.nbytes // self.spec.experts
        size = each // (inner * turns * out)
        for expert in range(self.spec.experts):
            own = data.part(slice(expert * each, (expert + 1) * each))
            for turn, part in enumerate(parts):
                made = MadeBytes((own,), each // turns, _Turn(own, size, turn, turns, inner).transposed)
                yield f"{expert}.{part}_proj.weight", Stored(shape, kind, path, made)

    def _packed(self, tensor: str, parts: tuple[str, ...], shape: tuple[int, int]) -> Iterator[tuple[str, Stored]]:
        out, inner, turns = *shape, len(parts)
        if inner % _BLOCK:
            raise ModelFileError(f"{self.at}.{tensor}_blocks: rows of {inner} values are no whole blocks of {_BLOCK}")
        experts, rows, blocks = self.spec.experts, turns * out, inner // _BLOCK
        _, path, values = self._take(f"{tensor}_blocks", (experts, rows, blocks, 16), ("U8",))
        _, _, scales = self._take(f"{tensor}_scales", (experts, rows, blocks), ("U8",))
        for expert in range(experts):
            quants, exponents = (
                data.part(slice(expert * data.nbytes // experts, (expert + 1) * data.nbytes // experts))
                for data in (values, scales)
            )
            for turn, part in enumerate(parts):
                make = _Blocks(quants, exponents, rows, turn, turns).values
                made = MadeBytes((quants, exponents), out * blocks * _BLOCK_BYTES, make)
                yield f"{expert}.{part}_proj.weight", Stored(shape, "MXFP4", path, made)

    def _take(self, last: str, shape: tuple[int, ...], types: tuple[str, ...]) -> tuple[str, Path, FileBytes]:
        name = f"{self.at}.{last}"
        if name not in self.files:
            raise ModelFileError(f"{self.folder}: tensor {name} {list(shape)} is missing", "model")
        file = self.files.pop(name)
        tensor = file.tensors[name]
        if tensor.shape != shape or tensor.type not in types:
            raise ModelFileError(
                f"{file.path}: tensor {name} has type {tensor.type} and shape {list(tensor.shape)}; wanted "
                f"{' or '.join(types)} {list(shape)}",
                "model",
            )
        return tensor.type, file.path, file.data(name)


@dataclass(frozen=True)
class _Turn:
    """Every `turns`-th value of `size` bytes, from `turn` on."""

    data: FileBytes
    size: int
    turn: int
    turns: int
    inner: int = 0

    def values(self) -> _Bytes:
        return np.ascontiguousarray(self._words()[self.turn :: self.turns]).view(np.uint8)

    def transposed(self) -> _Bytes:
        """[inner, turns x out] -> [out, inner]."""
        words = self._words().reshape(self.inner, -1)[:, self.turn :: self.turns]
        return np.ascontiguousarray(words.T).reshape(-1).view(np.uint8)

    def _words(self) -> npt.NDArray[np.unsignedinteger]:
        words: npt.NDArray[np.unsignedinteger] = self.data[:].view(np.uint32 if self.size == 4 else np.uint16)
        return words


@dataclass(frozen=True)
class _Blocks:
    """Rows of MXFP4 as GGUF has them: byte i of a block holds values i and i + 16, here 2 i and 2 i + 1."""

    blocks: FileBytes
    scales: FileBytes
    rows: int
    turn: int
    turns: int

    def values(self) -> _Bytes:
        """Eight bytes at a time: the low nibbles of both halves of a block, and the high ones, by turns."""
        halves = np.ascontiguousarray(self.blocks[:].view(np.uint64).reshape(self.rows, -1, 2)[self.turn :: self.turns])
        first, last = halves[..., 0], halves[..., 1]
        even = (first & _LOW | (last & _LOW) << _FOUR).view(np.uint8).astype(np.uint16)
        odd = (first >> _FOUR & _LOW | last & ~_LOW).view(np.uint8).astype(np.uint16)
        made = np.empty(halves.shape[:2], _MXFP4)
        made["scale"] = self.scales[:].reshape(self.rows, -1)[self.turn :: self.turns]
        made["quants"] = (even | odd << 8).view("V16")
        return made.view(np.uint8).reshape(-1)
