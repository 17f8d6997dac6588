"""The header of one GGUF file: metadata and tensor directory, read with every bound checked. Torch-free.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. A count or length is compared
with the bytes that are left before anything is made of it, so a damaged file costs no memory.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np
import numpy.typing as npt

from engine.errors import ModelFileError
from engine.weights.gguf.types import by_number, describe
from engine.weights.regular import open_regular

_SCALARS: dict[int, tuple[str, np.dtype[np.generic]]] = {
    0: ("B", np.dtype("u1")),
    1: ("b", np.dtype("i1")),
    2: ("H", np.dtype("<u2")),
    3: ("h", np.dtype("<i2")),
    4: ("I", np.dtype("<u4")),
    5: ("i", np.dtype("<i4")),
    6: ("f", np.dtype("<f4")),
    10: ("Q", np.dtype("<u8")),
    11: ("q", np.dtype("<i8")),
    12: ("d", np.dtype("<f8")),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMS = 4
_MAX_ELEMENTS = 1 << 62
_DEFAULT_ALIGNMENT = 32

Scalar = int | float | bool | str


class GGUFArray(Sequence[Scalar]):
    """An array of a GGUF file, decoded only where it is looked at. Elements are all of one kind."""

    def __init__(self, path: Path, key: str, buffer: mmap.mmap, items: npt.NDArray[Any], strings: bool) -> None:
        """`items` are the numbers themselves, or where each string begins in the file."""
        self._path, self._key, self._buffer, self._items, self._strings = path, key, buffer, items, strings

    def __len__(self) -> int:
        return len(self._items)

    @property
    def holds_strings(self) -> bool:
        return self._strings

    def numpy(self) -> npt.NDArray[Any]:
        """The numbers (not of an array of strings): a read-only view into the file."""
        if self._strings:
            raise TypeError(f"{self._key} holds strings")
        return self._items

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | Sequence[Scalar]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        item = self._items[index]
        if not self._strings:
            value: Scalar = item.item()
            return value
        start = int(item)
        (size,) = struct.unpack_from("<Q", self._buffer, start)
        raw = self._buffer[start + 8 : start + 8 + size]
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._path}: {self._key}[{index}] is not UTF-8: {error}", self._key) from error

    def __iter__(self) -> Iterator[Scalar]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"<GGUFArray {self._key}, {len(self)} {'strings' if self._strings else self._items.dtype}>"


MetadataValue = Scalar | GGUFArray


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor directory. `shape` is C order; `start` is where its bytes begin in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    version: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, GGUFTensor]  # in the file's order
    buffer: mmap.mmap

    def data(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, uint8 [num_bytes]: a read-only view into the mapped file."""
        return np.frombuffer(self.buffer, np.uint8, tensor.num_bytes, tensor.start)


def read_header(path: Path) -> GGUFHeader:
    """Map a file and read its header. Raises ModelFileError for anything that is not a sound GGUF file."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ModelFileError(f"{path}: the file is empty", "model")
        try:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}", "model") from error
    return _Reader(path, buffer).header()


class _Reader:
    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.end, self.at = path, buffer, len(buffer), 0

    def fail(self, message: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {message}", "model")

    def skip(self, size: int, what: str) -> int:
        """Step over `size` bytes; where they begin."""
        if size > self.end - self.at:
            self.fail(f"{what} needs {size} bytes at {self.at}, but the file ends at {self.end}: truncated or corrupt")
        start, self.at = self.at, self.at + size
        return start

    def scalar(self, form: str, what: str) -> int | float:
        size = struct.calcsize("<" + form)
        value: int | float = struct.unpack_from("<" + form, self.buffer, self.skip(size, what))[0]
        return value

    def number(self, form: str, what: str) -> int:
        return int(self.scalar(form, what))

    def string(self, what: str) -> str:
        size = self.number("Q", what)
        start = self.skip(size, what)
        try:
            return self.buffer[start : start + size].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def header(self) -> GGUFHeader:
        magic = self.buffer[self.skip(min(4, self.end), "magic") : 4]
        if magic != b"GGUF":
            self.fail(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'")
        version = self.number("I", "version")
        if version in (2 << 24, 3 << 24):
            self.fail("a big-endian GGUF file; only little-endian files are read")
        if version not in (2, 3):
            self.fail(f"GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_values = self.number("Q", "tensor count"), self.number("Q", "metadata count")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_values):
            key = self.string(f"key {len(metadata)} of {num_values}")
            if key in metadata:
                self.fail(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 24:
            self.fail(f"general.alignment is {alignment!r}; it must be a power of two")
        entries = [self.entry(i, num_tensors) for i in range(num_tensors)]
        return GGUFHeader(self.path, version, metadata, self.place(entries, alignment), self.buffer)

    def value(self, key: str) -> MetadataValue:
        kind = self.number("I", f"type of {key}")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind][0], key)
        if kind == _BOOL:
            value = self.number("B", key)
            if value > 1:
                self.fail(f"{key} is a bool of value {value}; 0 and 1 are allowed")
            return bool(value)
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.values(key)
        self.fail(f"{key} has value type {kind}; 0 to 12 are known")

    def values(self, key: str) -> GGUFArray:
        kind, count = self.number("I", f"type of {key}"), self.number("Q", f"length of {key}")
        if kind == _STRING:
            return GGUFArray(self.path, key, self.buffer, self.strings(key, count), True)
        if kind != _BOOL and kind not in _SCALARS:
            self.fail(f"{key} is an array of value type {kind}; arrays of numbers, bools and strings are read")
        dtype = np.dtype("?") if kind == _BOOL else _SCALARS[kind][1]
        start = self.skip(count * dtype.itemsize, key)
        items = np.frombuffer(self.buffer, dtype, count, start) if count else np.empty(0, dtype)
        return GGUFArray(self.path, key, self.buffer, items, False)

    def strings(self, key: str, count: int) -> npt.NDArray[Any]:
        """Where each string begins (its length field)."""
        if count > (self.end - self.at) // 8:
            self.fail(f"{key} claims {count} strings, more than the rest of the file can hold: truncated or corrupt")
        starts, length, at, buffer = array("Q"), struct.Struct("<Q").unpack_from, self.at, self.buffer
        last = self.end - 8
        for _ in range(count):
            if at > last:
                self.fail(f"{key} runs past the end of the file: truncated or corrupt")
            starts.append(at)
            at += 8 + length(buffer, at)[0]
        if at > self.end:
            self.fail(f"{key} runs past the end of the file: truncated or corrupt")
        self.at = at
        return np.frombuffer(starts, np.uint64) if count else np.empty(0, np.uint64)

    def entry(self, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        """(name, C-order shape, type number, offset) of a directory entry."""
        name = self.string(f"name of tensor {index} of {count}")
        num_dims = self.number("I", f"tensor {name}")
        if not 1 <= num_dims <= _MAX_DIMS:
            self.fail(f"tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
        dims = tuple(self.number("Q", f"tensor {name}") for _ in range(num_dims))
        return name, dims[::-1], self.number("I", f"tensor {name}"), self.number("Q", f"tensor {name}")

    def place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GGUFTensor]:
        """Sizes and positions of all tensors, checked against the file and against one another."""
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, number, offset in entries:
            if name in tensors:
                self.fail(f"tensor {name} appears twice")
            kind = by_number(number)
            if kind is None:
                self.fail(f"tensor {name} has type {describe(number)}, which cannot be read")
            if 0 in shape or prod(shape) > _MAX_ELEMENTS:
                self.fail(f"tensor {name} has the impossible shape {list(shape)}")
            if shape[-1] % kind.block:
                self.fail(f"tensor {name}: rows of {shape[-1]} are not whole {kind.name} blocks of {kind.block}")
            if offset % alignment:
                self.fail(f"tensor {name} begins at {offset}, which is not a multiple of the alignment {alignment}")
            tensor = GGUFTensor(name, shape, kind.name, base + offset, prod(shape) // kind.block * kind.size)
            if tensor.start + tensor.num_bytes > self.end:
                self.fail(
                    f"tensor {name} ({kind.name}, {list(shape)}) lies at bytes {tensor.start} to "
                    f"{tensor.start + tensor.num_bytes}, but the file ends at {self.end}: truncated or corrupt"
                )
            tensors[name] = tensor
        ordered = sorted(tensors.values(), key=lambda t: t.start)
        for before, after in pairwise(ordered):
            if before.start + before.num_bytes > after.start:
                self.fail(f"tensors {before.name} and {after.name} overlap")
        return tensors
