"""The header of a safetensors file, read with every bound checked. Torch-free.

Source: the safetensors format: 8 bytes little-endian header length, a JSON object, then the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ModelFileError
from engine.files.model_file import FileBytes, FileTensor, ModelFile
from engine.files.regular import read_at

_MAX_HEADER = 100_000_000  # the format's own limit
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_QUANTISED_BYTES = {"F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1}
FLOATS = tuple(_ELEMENT_BYTES)


@dataclass(frozen=True)
class SafetensorsFile:
    file: ModelFile
    tensors: dict[str, FileTensor]

    @property
    def path(self) -> Path:
        return self.file.path

    def data(self, name: str) -> FileBytes:
        """A tensor's bytes."""
        tensor = self.tensors[name]
        return self.file.bytes(tensor.start, tensor.num_bytes)


def open_safetensors(path: Path) -> SafetensorsFile:
    """Open a file and read its header. Raises ModelFileError if it is unsound or holds other than BF16, F16, F32 and
    what quantised weights are made of: F8_E4M3, I32, U8."""
    file = ModelFile(path)
    return SafetensorsFile(file, read_header(file.fd, path, quantised=True))


def read_header(file: int, path: Path, most: int = _MAX_HEADER, quantised: bool = False) -> dict[str, FileTensor]:
    """The tensors of an open file (its descriptor), by name. ModelFileError if it is unsound, holds other types than
    BF16, F16 and F32 (and `quantised` ones), or has a header of more than `most` bytes."""
    end = os.fstat(file).st_size
    if end < 8:
        _fail(path, "shorter than a safetensors header")
    size = int.from_bytes(read_at(file, path, 0, 8), "little")
    if size > end - 8:
        _fail(path, f"claims a header of {size} bytes in a file of {end}: truncated, corrupt or not safetensors")
    if size > most:
        _fail(path, f"has a header of {size} bytes, at most {most} are read")
    try:
        header = json.loads(read_at(file, path, 8, size), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: the header is not sound JSON: {error}", "model") from error
    if not isinstance(header, dict):
        _fail(path, "the header is not a JSON object")
    base = 8 + size
    sizes = _ELEMENT_BYTES | (_QUANTISED_BYTES if quantised else {})
    tensors = {n: _tensor(path, n, entry, base, sizes) for n, entry in header.items() if n != "__metadata__"}
    at, last = base, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: t.start):
        if tensor.start != at:
            _fail(path, f"tensor {tensor.name} begins at byte {tensor.start}, but {last} ends at {at}")
        at, last = tensor.start + tensor.num_bytes, tensor.name
    if at != end:
        _fail(path, f"the tensors end at byte {at}, the file at {end}: truncated or corrupt")
    return tensors


def _tensor(path: Path, name: str, entry: Any, base: int, sizes: Mapping[str, int]) -> FileTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape", 0), fields.get("data_offsets", 0)
    if not isinstance(dtype, str) or dtype not in sizes:
        allowed = ", ".join(sorted(sizes))
        _fail(path, f"tensor {name} has type {repr(dtype)[:100]}; of safetensors {allowed} are read")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        _fail(path, f"tensor {name} has shape {repr(shape)[:100]} and offsets {repr(offsets)[:100]}")
    if not shape or 0 in shape:
        _fail(path, f"tensor {name} has the impossible shape {shape}")
    start, end = offsets
    if end - start != prod(shape) * sizes[dtype]:
        _fail(path, f"tensor {name} ({dtype}, {shape}) has {end - start} bytes")
    return FileTensor(name, tuple(shape), dtype, base + start, end - start)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _fail(path: Path, message: str) -> NoReturn:
    raise ModelFileError(f"{path}: {message}", "model")
