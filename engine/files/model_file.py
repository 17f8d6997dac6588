"""Files of a model, read and never mapped: one that becomes shorter is an error that names it, not a SIGBUS.
Torch-free."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import ModelFileError
from engine.files.regular import open_regular, read_into


class ModelFile:
    """A regular file, open as long as this object lives. ModelFileError as of `open_regular`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd)
        self._state = self._now()
        self.size = self._state[0]

    @property
    def identity(self) -> str:
        """Name, size and time of change when it was opened: what tells one state of the file from another."""
        size, changed = self._state
        return f"{self.path.name}:{size}:{changed}"

    def read(self, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Exactly these bytes, in memory of their own. ModelFileError if the file has become shorter."""
        content = np.empty(num_bytes, np.uint8)
        self.read_into(start, content)
        return content

    def read_into(self, start: int, place: npt.NDArray[np.uint8]) -> None:
        """The bytes from `start` on into contiguous memory. ModelFileError if the file has become shorter."""
        read_into(self.fd, self.path, start, place.data)

    def small(self, start: int, num_bytes: int) -> bytes:
        """The same of a few pages, at a fraction of the cost of a call."""
        content = os.pread(self.fd, num_bytes, start)
        return content if len(content) == num_bytes else self.read(start, num_bytes).tobytes()

    def bytes(self, start: int, num_bytes: int) -> FileBytes:
        """These bytes, to be read when they are needed."""
        return FileBytes(self, start, num_bytes)

    def check_unchanged(self) -> None:
        """ModelFileError if somebody has written to it since it was opened: weights read before and after do not
        belong together."""
        if self._now() != self._state:
            raise ModelFileError(
                f"{self.path}: was changed while it was read: start again when it is complete", "model"
            )

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self.fd)
        return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True)
class FileBytes:
    """A byte range of a file. A slice reads it: `data[:]`, `data[a:b]`; every time from the file, into fresh memory."""

    file: ModelFile
    start: int
    nbytes: int

    def __getitem__(self, wanted: slice) -> npt.NDArray[np.uint8]:
        part = self.part(wanted)
        return self.file.read(part.start, part.nbytes)

    def part(self, wanted: slice) -> FileBytes:
        """Some of them, not read yet. ValueError for a slice with a step."""
        begin, end, step = wanted.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"a step of {step}; byte ranges have none")
        return FileBytes(self.file, self.start + begin, max(end - begin, 0))


@dataclass(frozen=True)
class MadeBytes:
    """Bytes that are made of several byte ranges: `made[:]`. They are made again each time, for a slice too."""

    ranges: tuple[FileBytes, ...]
    nbytes: int
    make: Callable[[], npt.NDArray[np.uint8]]

    def __getitem__(self, wanted: slice) -> npt.NDArray[np.uint8]:
        return self.make()[wanted]


Bytes = npt.NDArray[np.uint8] | FileBytes | MadeBytes


def made_of(data: Bytes, num_bytes: int, make: Callable[[], npt.NDArray[np.uint8]]) -> Bytes:
    """What `make` makes of `data`; of bytes in memory at once."""
    if isinstance(data, np.ndarray):
        return make()
    return MadeBytes(data.ranges if isinstance(data, MadeBytes) else (data,), num_bytes, make)


def whole(data: Bytes) -> npt.NDArray[np.uint8] | FileBytes:
    """What may be read piece by piece: made bytes are made at once."""
    return data[:] if isinstance(data, MadeBytes) else data


def put(data: npt.NDArray[np.uint8] | FileBytes, place: npt.NDArray[np.uint8]) -> None:
    """All of the bytes into contiguous memory for as many."""
    if isinstance(data, FileBytes):
        data.file.read_into(data.start, place)
    else:
        place[:] = data


def part(data: Bytes, wanted: slice) -> Bytes:
    """Some of the bytes, of a file or in memory: neither read nor copied."""
    return data.part(wanted) if isinstance(data, FileBytes) else data[wanted]


@dataclass(frozen=True)
class FileTensor:
    """Where a tensor is in a file. `shape` is C order, `type` a GGML type name; `start` is where its bytes begin."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int
