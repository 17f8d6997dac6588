"""The weights of safetensors files by the names that plain ones have, whatever tensors hold them. Torch-free.

plain  X.weight BF16, F16 or F32
fp8    X.weight F8_E4M3 [n, k], X.weight_scale_inv [n / rows, k / group], rounded up; of compressed-tensors
       X.weight_scale, [1] of a whole tensor
gptq   X.qweight int32 [k / 8, n], X.qzeros int32 [k / group, n / 8], X.scales [k / group, n], X.g_idx int32 [k]
awq    X.qweight int32 [k, n / 8], X.qzeros int32 [k / group, n / 8], X.scales [k / group, n]
packed X.weight_packed int32 [n, k / 8] of nibbles + 8, X.weight_scale [n, k / group], X.weight_shape [2]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from engine.architectures.config import Quantisation
from engine.errors import ModelFileError
from engine.files.model_file import Bytes, FileBytes, FileTensor, MadeBytes
from engine.files.safetensors import FLOATS, SafetensorsFile
from engine.weights.scaled_blocks import BLOCKS, F8, f8_blocks, int4_blocks, int4_type

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds output 8 i + j
_PARTS = ("qzeros", "scales", "g_idx")
_PACKED_PARTS = ("weight_scale", "weight_shape")
_LEAST_HALF = 2.0**-14  # below it half precision has fewer bits


@dataclass(frozen=True)
class Stored:
    """A weight: C-order shape, type (GGML's, or one of `blocks.BLOCKS`), and its bytes, not read yet."""

    shape: tuple[int, ...]
    type: str
    path: Path
    data: Bytes


def stored_weights(files: Mapping[str, SafetensorsFile], quantisation: Quantisation | None) -> dict[str, Stored]:
    """`files`: of each tensor, by name. In their order. Raises ModelFileError for tensors that do not go together."""
    result: dict[str, Stored] = {}
    for name, file in files.items():
        tensor, (module, _, last) = file.tensors[name], name.rpartition(".")
        if last == "qweight":
            result[f"{module}.weight"] = _Int4(module, files, quantisation).stored()
        elif last == "weight_packed":
            result[f"{module}.weight"] = _packed_int4(module, files, quantisation)
        elif _is_part(name, files):
            continue
        elif tensor.type == F8:
            result[name] = _f8(name, files, quantisation)
        elif tensor.type not in FLOATS:
            _fail(file, name, f"has type {tensor.type}, and no quantised weight that is read has a tensor of that name")
        else:
            result[name] = Stored(tensor.shape, tensor.type, file.path, file.data(name))
    return result


def _is_part(name: str, files: Mapping[str, SafetensorsFile]) -> bool:
    """Whether a tensor is read with another, which names the weight."""
    module, _, last = name.rpartition(".")
    if last == "weight_scale_inv":
        return f"{module}.weight" in files and files[f"{module}.weight"].tensors[f"{module}.weight"].type == F8
    if last == "weight_scale" and f"{module}.weight" in files:
        return files[f"{module}.weight"].tensors[f"{module}.weight"].type == F8
    if last in _PACKED_PARTS:
        return f"{module}.weight_packed" in files
    return last in _PARTS and f"{module}.qweight" in files


def zero_biases(files: Mapping[str, SafetensorsFile], names: set[str]) -> set[str]:
    """Those of `names` that are biases of int4 weights and hold zeros alone, as GPTQ's writers add."""
    found = (n for n in names if n.endswith(".bias") and f"{n.removesuffix('.bias')}.qweight" in files)
    return {name for name in found if not files[name].data(name)[:].any()}


def _f8(name: str, files: Mapping[str, SafetensorsFile], quantisation: Quantisation | None) -> Stored:
    file = files[name]
    if quantisation is None or quantisation.method not in ("fp8", "float-quantized"):
        _fail(file, name, f"has type {F8}, and config.json has no quantization_config of fp8 or float-quantized")
    shape = file.tensors[name].shape
    if len(shape) != 2 or shape[1] % BLOCKS[F8].block:
        _fail(file, name, f"({F8}) has shape {list(shape)}; read are [out, in], in a multiple of {BLOCKS[F8].block}")
    scale_name = f"{name}_scale_inv" if quantisation.method == "fp8" else f"{name}_scale"
    rows = shape[0] if quantisation.rows == -1 else quantisation.rows
    group = shape[1] if quantisation.group == -1 else quantisation.group
    needed = (-(-shape[0] // rows), -(-shape[1] // group))
    scales = _part(files, scale_name, file, (1,) if quantisation.rows == -1 else needed, FLOATS)
    values = file.data(name)

    def make() -> npt.NDArray[np.uint8]:
        return f8_blocks(values[:].reshape(shape), _floats(files, scale_name).reshape(needed), rows, group)

    return Stored(shape, F8, file.path, MadeBytes((values, scales), _size(F8, shape), make))


def _packed_int4(module: str, files: Mapping[str, SafetensorsFile], quantisation: Quantisation | None) -> Stored:
    """Nibbles without a zero point, as compressed-tensors packs them: the same as blocks whose zero point is 8."""
    name = f"{module}.weight_packed"
    file = files[name]
    packed = file.tensors[name]
    if quantisation is None or quantisation.method != "pack-quantized":
        _fail(file, name, "is there, and config.json has no quantization_config of compressed-tensors, pack-quantized")
    group = quantisation.group
    if len(packed.shape) != 2 or packed.type != "I32" or packed.shape[1] * 8 % group:
        _fail(
            file,
            name,
            f"has type {packed.type} and shape {list(packed.shape)}; read are int32 [out, in / 8], in whole groups of "
            f"{group}",
        )
    shape = packed.shape[0], packed.shape[1] * 8
    scale_name, shape_name = f"{module}.weight_scale", f"{module}.weight_shape"
    scales = _part(files, scale_name, file, (shape[0], shape[1] // group), FLOATS)
    words, said = file.data(name), _part(files, shape_name, file, (2,), ("I64", "I32"))

    def make() -> npt.NDArray[np.uint8]:
        kind = np.int64 if files[shape_name].tensors[shape_name].type == "I64" else np.int32
        if tuple(said[:].view(kind)) != shape:
            _fail(files[shape_name], shape_name, f"is {said[:].view(kind).tolist()}; what is packed is {list(shape)}")
        wide = _floats(files, scale_name)
        halves = wide.astype(np.float16)
        lost = halves.astype(np.float32) != wide
        if not np.isfinite(halves).all() or (lost & (np.abs(wide) >= _LEAST_HALF)).any():
            _fail(files[scale_name], scale_name, "holds values that are not finite, or are none in half precision")
        quants = _nibbles(words[:].view(np.uint32).reshape(packed.shape), range(8))
        return int4_blocks(quants, np.full(wide.shape, 8, np.uint8), halves, group)

    kind = int4_type(group)
    return Stored(shape, kind, file.path, MadeBytes((words, scales, said), _size(kind, shape), make))


class _Int4:
    """The tensors of a module `name` that GPTQ or AWQ has quantised."""

    def __init__(self, name: str, files: Mapping[str, SafetensorsFile], quantisation: Quantisation | None) -> None:
        self.name, self.files, self.file = name, files, files[f"{name}.qweight"]
        if quantisation is None or quantisation.method not in ("gptq", "awq"):
            _fail(self.file, f"{name}.qweight", "is there, and config.json has no quantization_config of gptq or awq")
        self.quantisation = quantisation
        packed = self._tensor("qweight")
        if len(packed.shape) != 2 or packed.type != "I32":
            _fail(self.file, packed.name, f"has type {packed.type} and shape {list(packed.shape)}; wanted int32 words")
        gptq = quantisation.method == "gptq"
        self.k, self.n = packed.shape[0] * (8 if gptq else 1), packed.shape[1] * (1 if gptq else 8)
        self.group = self.k if quantisation.group == -1 else quantisation.group
        if self.k % self.group or self.group % 32 or self.n % 8:
            _fail(
                self.file,
                packed.name,
                f"stands for [{self.n}, {self.k}] in groups of {self.group}; read are whole groups of multiples of 32",
            )
        groups = self.k // self.group
        self._ranges = [
            self.file.data(packed.name),
            self._part("qzeros", (groups, self.n // 8), ("I32",)),
            self._part("scales", (groups, self.n), ("F16", "BF16")),
        ]
        if f"{name}.g_idx" in files:
            self._ranges.append(self._part("g_idx", (self.k,), ("I32",)))

    def stored(self) -> Stored:
        kind, shape = int4_type(self.group), (self.n, self.k)
        return Stored(shape, kind, self.file.path, MadeBytes(tuple(self._ranges), _size(kind, shape), self._make))

    def _make(self) -> npt.NDArray[np.uint8]:
        self._check_order()
        zeros = _nibbles(self._words("qzeros"), self._order())
        if self.quantisation.zeros_minus_one:
            zeros = (zeros + 1 & 15).astype(np.uint8)
        if self.quantisation.method == "gptq":
            quants = _nibbles(np.ascontiguousarray(self._words("qweight").T), range(8))
        else:
            quants = np.ascontiguousarray(_nibbles(self._words("qweight"), self._order()).T)
        scales = _floats(self.files, f"{self.name}.scales")
        halves = scales.astype(np.float16)
        if (halves.astype(np.float32) != scales).any():
            _fail(self.file, f"{self.name}.scales", "holds values that are not finite, or are none in half precision")
        return int4_blocks(quants, np.ascontiguousarray(zeros.T), np.ascontiguousarray(halves.T), self.group)

    def _check_order(self) -> None:
        if f"{self.name}.g_idx" not in self.files:
            return
        held = self.files[f"{self.name}.g_idx"].data(f"{self.name}.g_idx")[:].view(np.int32)
        if not np.array_equal(held, np.arange(self.k, dtype=np.int32) // self.group):
            _fail(
                self.files[f"{self.name}.g_idx"],
                f"{self.name}.g_idx",
                "assigns groups in the order of activations (act-order, desc_act), which cannot be read",
            )

    def _order(self) -> tuple[int, ...]:
        return tuple(range(8)) if self.quantisation.method == "gptq" else _AWQ_ORDER

    def _tensor(self, last: str) -> FileTensor:
        return self.file.tensors[f"{self.name}.{last}"]

    def _words(self, last: str) -> npt.NDArray[np.uint32]:
        name = f"{self.name}.{last}"
        file = self.files[name]
        return file.data(name)[:].view(np.uint32).reshape(file.tensors[name].shape)

    def _part(self, last: str, shape: tuple[int, ...], types: tuple[str, ...]) -> FileBytes:
        return _part(self.files, f"{self.name}.{last}", self.file, shape, types)


def _nibbles(words: npt.NDArray[np.uint32], order: Sequence[int]) -> npt.NDArray[np.uint8]:
    """[rows, w] -> [rows, 8 w]: of each word its nibbles in `order`."""
    held = np.ascontiguousarray(words).view(np.uint8).astype(np.uint16)  # a byte of each two
    pairs = ((held | held << 4) & 0x0F0F).view(np.uint8)
    if tuple(order) != tuple(range(8)):
        found = pairs.reshape(-1, 8)
        pairs = np.empty_like(found)
        for place, nth in enumerate(order):
            pairs[:, place] = found[:, nth]
    return pairs.reshape(len(words), -1)


def _floats(files: Mapping[str, SafetensorsFile], name: str) -> npt.NDArray[np.float32]:
    """A tensor of floats, exactly."""
    file = files[name]
    tensor, data = file.tensors[name], file.data(name)[:]
    if tensor.type == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return data.view(np.float32 if tensor.type == "F32" else np.float16).astype(np.float32).reshape(tensor.shape)


def _part(
    files: Mapping[str, SafetensorsFile],
    name: str,
    beside: SafetensorsFile,
    shape: tuple[int, ...],
    types: tuple[str, ...],
) -> FileBytes:
    if name not in files:
        raise ModelFileError(f"{beside.path}: tensor {name} {list(shape)} is missing", "model")
    tensor = files[name].tensors[name]
    if tensor.shape != shape or tensor.type not in types:
        _fail(
            files[name],
            name,
            f"has type {tensor.type} and shape {list(tensor.shape)}; wanted {' or '.join(types)} {list(shape)}",
        )
    return files[name].data(name)


def _size(kind: str, shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] // BLOCKS[kind].block) * BLOCKS[kind].size


def _fail(file: SafetensorsFile, name: str, message: str) -> NoReturn:
    raise ModelFileError(f"{file.path}: tensor {name} {message}", "model")
