"""Files of folders that others write: only regular ones are opened, and no more is read than was asked for.
Torch-free."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from engine.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20  # a tokenizer of 150,000 tokens takes 11 MiB
_READ_BYTES = 1 << 20  # at once: as much is allocated, however short the file is

_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?::\w+)?")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open for reading, unbuffered. Links are followed; never waits for a writer. ModelFileError if the path is not a
    regular file, or none that can be opened."""
    try:
        _require_regular(path, os.stat(path).st_mode)  # before it is opened: opening a device may do something
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}", "model") from error
    except ValueError as error:  # a NUL
        raise ModelFileError(f"{str(path)!r}: cannot be read: {error}", "model") from error
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)
        _refuse_pointer(path, file.fileno())
    except ModelFileError:
        file.close()
        raise
    return file


def _refuse_pointer(path: Path, file: int) -> None:
    """A repository that was cloned without Git LFS has a few lines of text in place of each large file."""
    try:
        begins = os.pread(file, len(_POINTER), 0)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}", "model") from error
    if begins == _POINTER:
        raise ModelFileError(f"{path}: is a Git LFS pointer, not the file itself: run git lfs pull there", "model")


def read_bytes(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """A whole regular file. ModelFileError as of `open_regular`, and if it has more than `most` bytes."""
    with open_regular(path) as file:
        try:
            content = bytearray()
            while len(content) <= most and (more := file.read(_READ_BYTES)):
                content += more
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}", "model") from error
    if len(content) > most:
        raise ModelFileError(f"{path}: longer than {most} bytes, the most that is read of such a file", "model")
    return bytes(content)


def read_text(path: Path) -> str:
    """A whole UTF-8 file, as `read_bytes`."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: not UTF-8: {error}", "model") from error


def read_at(file: int, path: Path, start: int, num_bytes: int) -> bytearray:
    """Exactly these bytes, in memory of their own. ModelFileError if the file has become shorter."""
    content = bytearray(num_bytes)
    read_into(file, path, start, memoryview(content))
    return content


def read_into(file: int, path: Path, start: int, place: memoryview) -> None:
    """Fill `place` with the bytes from `start` on. ModelFileError if the file has become shorter."""
    while place:
        try:
            count = os.preadv(file, [place], start)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}", "model") from error
        if not count:
            raise ModelFileError(f"{path}: became shorter while it was read: it ends at byte {start}", "model")
        place, start = place[count:], start + count


def elsewhere(name: str) -> str:
    """The end of a refusal of a path that leads nowhere: where the model may be."""
    if "://" in name:
        return "; a repository of the Hugging Face hub is named hf:ORG/REPO"
    if _HUB_NAME.fullmatch(name):
        return f"; if it is one of the Hugging Face hub: hf:{name}"
    return "; what has been fetched: ktserve models"


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ModelFileError(f"{path}: {_KINDS.get(stat.S_IFMT(mode), 'something')}, not a regular file", "model")
