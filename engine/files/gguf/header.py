"""The header of one GGUF file: metadata and tensor directory, read with every bound checked. Torch-free.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian. A count or length is compared
with the bytes that are left before anything is made of it, so a damaged file costs no memory. The header is read into
memory as far as it goes; nothing is mapped.
"""

from __future__ import annotations

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

from engine.errors import ModelFileError, shown
from engine.files.gguf.types import by_number, describe
from engine.files.model_file import FileTensor, ModelFile

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
_MAX_HEADER = 256 << 20  # metadata with a vocabulary of 150,000 takes 6 MiB
_READ_BYTES = 1 << 20  # at once, at least

_OTHERS = {
    b"<!do": "; it is a web page that was saved in the file's place: ktserve pull hf:ORG/REPO:QUANT",
    b"<htm": "; it is a web page that was saved in the file's place: ktserve pull hf:ORG/REPO:QUANT",
    b"tjgg": "; it is llama.cpp's format of before GGUF: fetch a GGUF file",
    b"pk\x03\x04": "; it is an archive: unpack it, or ktserve pull hf:ORG/REPO",
}  # what is found there by mistake, by its first bytes

Scalar = int | float | bool | str


class GGUFArray(Sequence[Scalar]):
    """An array of a GGUF file, decoded only where it is looked at. Elements are all of one kind."""

    def __init__(self, path: Path, key: str, head: bytearray, items: npt.NDArray[Any], strings: bool) -> None:
        """`items` are the numbers themselves, or where each string begins in `head`, the file's beginning."""
        self._path, self._key, self._head, self._items, self._strings = path, key, head, items, strings

    def __len__(self) -> int:
        return len(self._items)

    @property
    def holds_strings(self) -> bool:
        return self._strings

    def numpy(self) -> npt.NDArray[Any]:
        """The numbers (not of an array of strings)."""
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
        (size,) = struct.unpack_from("<Q", self._head, start)
        raw = self._head[start + 8 : start + 8 + size]
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
class GGUFHeader:
    file: ModelFile
    version: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, FileTensor]  # in the file's order

    @property
    def path(self) -> Path:
        return self.file.path


def read_header(path: Path) -> GGUFHeader:
    """Open a file and read its header. Raises ModelFileError for anything that is not a sound GGUF file."""
    return header_of(ModelFile(path))


def header_of(file: ModelFile) -> GGUFHeader:
    """The same of an open file; its beginning is read in one piece after the other."""
    if file.size == 0:
        raise ModelFileError(f"{file.path}: the file is empty; fetch it: ktserve pull hf:ORG/REPO:QUANT", "model")
    return _Reader(file).header()


class _Reader:
    def __init__(self, file: ModelFile) -> None:
        self.file, self.path, self.end, self.at = file, file.path, file.size, 0
        self.head = bytearray()  # the file's beginning, as far as it has been read

    def fail(self, message: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {message}", "model")

    def skip(self, size: int, what: str) -> int:
        """Step over `size` bytes; where they begin."""
        if size > self.end - self.at:
            self.fail(f"{what} needs {size} bytes at {self.at}, but the file ends at {self.end}: truncated or corrupt")
        start, self.at = self.at, self.at + size
        self.reach(self.at)
        return start

    def reach(self, end: int) -> None:
        """Read the file up to byte `end`, which it has, or further."""
        if end <= len(self.head):
            return
        if end > _MAX_HEADER:
            self.fail(f"the header goes on behind byte {_MAX_HEADER}, the last that is read of one")
        size = min(max(end, 2 * len(self.head), _READ_BYTES), self.end, _MAX_HEADER) - len(self.head)
        self.head += self.file.read(len(self.head), size).data

    def scalar(self, form: str, what: str) -> int | float:
        size = struct.calcsize("<" + form)
        start = self.skip(size, what)
        value: int | float = struct.unpack_from("<" + form, self.head, start)[0]
        return value

    def number(self, form: str, what: str) -> int:
        return int(self.scalar(form, what))

    def string(self, what: str) -> str:
        size = self.number("Q", what)
        start = self.skip(size, what)
        try:
            return self.head[start : start + size].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def header(self) -> GGUFHeader:
        self.skip(min(4, self.end), "magic")
        magic = bytes(self.head[:4])
        if magic != b"GGUF":
            found = _OTHERS.get(magic.lower(), "; a model is a .gguf file or a folder with safetensors")
            if self.path.suffix == ".safetensors":
                found = f"; name the folder that it is in: {self.path.parent}"
            self.fail(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'{found}")
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
                self.fail(f"metadata key {shown(key)} appears twice")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 24:
            self.fail(f"general.alignment is {shown(alignment)}; it must be a power of two")
        entries = [self.entry(i, num_tensors) for i in range(num_tensors)]
        return GGUFHeader(self.file, version, metadata, self.place(entries, alignment))

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
            return GGUFArray(self.path, key, self.head, self.strings(key, count), True)
        if kind != _BOOL and kind not in _SCALARS:
            self.fail(f"{key} is an array of value type {kind}; arrays of numbers, bools and strings are read")
        dtype = np.dtype("?") if kind == _BOOL else _SCALARS[kind][1]
        start = self.skip(count * dtype.itemsize, key)
        items = np.frombuffer(self.head[start : self.at], dtype)  # a copy: the head goes on growing
        return GGUFArray(self.path, key, self.head, items, False)

    def strings(self, key: str, count: int) -> npt.NDArray[Any]:
        """Where each string begins (its length field)."""
        if count > (self.end - self.at) // 8:
            self.fail(f"{key} claims {count} strings, more than the rest of the file can hold: truncated or corrupt")
        starts, length, at, head = array("Q"), struct.Struct("<Q").unpack_from, self.at, self.head
        last = self.end - 8
        for _ in range(count):
            if at > last:
                self.fail(f"{key} runs past the end of the file: truncated or corrupt")
            if at + 8 > len(head):
                self.reach(at + 8)
            starts.append(at)
            at += 8 + length(head, at)[0]
        if at > self.end:
            self.fail(f"{key} runs past the end of the file: truncated or corrupt")
        self.at = at
        self.reach(at)
        return np.frombuffer(starts, np.uint64) if count else np.empty(0, np.uint64)

    def entry(self, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        """(name, C-order shape, type number, offset) of a directory entry."""
        name = self.string(f"name of tensor {index} of {count}")
        num_dims = self.number("I", f"tensor {name}")
        if not 1 <= num_dims <= _MAX_DIMS:
            self.fail(f"tensor {name} has {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed")
        dims = tuple(self.number("Q", f"tensor {name}") for _ in range(num_dims))
        return name, dims[::-1], self.number("I", f"tensor {name}"), self.number("Q", f"tensor {name}")

    def place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, FileTensor]:
        """Sizes and positions of all tensors, checked against the file and against one another."""
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, FileTensor] = {}
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
            tensor = FileTensor(name, shape, kind.name, base + offset, prod(shape) // kind.block * kind.size)
            if tensor.start + tensor.num_bytes > self.end:
                self.fail(
                    f"tensor {name} ({kind.name}, {list(shape)}) lies at bytes {tensor.start} to "
                    f"{tensor.start + tensor.num_bytes}, but the file ends at {self.end}: truncated or corrupt; "
                    "fetch it again: ktserve pull hf:ORG/REPO:QUANT"
                )
            tensors[name] = tensor
        ordered = sorted(tensors.values(), key=lambda t: t.start)
        for before, after in pairwise(ordered):
            if before.start + before.num_bytes > after.start:
                self.fail(f"tensors {before.name} and {after.name} overlap")
        return tensors
