"""A folder of KV blocks, a file each, consistent after a kill at any moment: a damaged file is deleted.

    KEY.kv    | header: magic, key, bytes of what follows, checksum | what the block holds |

A file comes into being whole (written beside, then renamed) and never changes; its time of change is when it was last
used. One process at a time has the folder: it holds the lock on `lock`. What does not have these names is left alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import UserError

KEY_BYTES = 32
SUFFIX = ".kv"
_MAGIC = b"KTKVBLK1"
_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQI12x")
_PARTIAL = ".partial"
_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}}){re.escape(SUFFIX)}")
_DISK_PAGE = 4096

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger(__name__)


def size_on_disk(num_bytes: int) -> int:
    """Of the file of a block of so many bytes."""
    return -(-(_HEADER.size + num_bytes) // _DISK_PAGE) * _DISK_PAGE


class BlockFiles:
    """`field` is the setting that named the folder, for errors. Makes the folder, takes the lock: UserError if that
    cannot be. `write`, `read` and `delete` may be called by several threads, of different keys."""

    def __init__(self, folder: Path, field: str) -> None:
        self.folder = folder
        flag = f"--{field.replace('_', '-')} {folder}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{flag}: {error.strerror}", field) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            busy = error.errno in (errno.EAGAIN, errno.EACCES)
            why = "another server uses it; each needs a folder of its own" if busy else error.strerror
            raise UserError(f"{flag}: {why}", field) from None
        self._damaged = 0

    def close(self) -> None:
        os.close(self._lock)

    def scan(self) -> list[tuple[bytes, int]]:
        """Keys and sizes on disk of what is there, least recently used first. Deletes what killed processes had not
        finished. Raises OSError."""
        found: list[tuple[int, bytes, int]] = []
        others = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                if name is not None and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime_ns, bytes.fromhex(name[1]), size_on_disk(stat.st_size - _HEADER.size)))
                elif entry.name.endswith(SUFFIX + _PARTIAL) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)
                else:
                    others += entry.name != "lock"
        if others:
            log.warning("KV blocks on disk: %d entries of %s are no blocks, they are left alone", others, self.folder)
        return [(key, size) for _, key, size in sorted(found)]

    def write(self, key: bytes, content: Bytes) -> None:
        """Raises OSError, a full disk's too; then there is no file."""
        path = self._path(key)
        partial = path.with_name(path.name + _PARTIAL)
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                if os.writev(file, [_header(key, content), content.data]) != _HEADER.size + content.nbytes:
                    raise OSError(errno.ENOSPC, "the disk is full, or the file would be too large")
            finally:
                os.close(file)
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise

    def read(self, key: bytes, content: Bytes) -> bool:
        """Fill `content`. False, and it may hold anything: there is no such block, or it is damaged."""
        try:
            why = self._read(key, content)
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            self._damaged += 1
            level = logging.WARNING if self._damaged == 1 else logging.DEBUG
            what = "it is computed again, and so are all like it"
            log.log(level, "KV block %s cannot be used (%s): %s", self._path(key), why, what)
        return not why

    def _read(self, key: bytes, content: Bytes) -> str:
        """Why not; "" if all is well."""
        path, header = self._path(key), bytearray(_HEADER.size)
        size = _HEADER.size + content.nbytes
        # O_NONBLOCK: a FIFO in a file's place is not waited for
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(file).st_size != size or os.readv(file, [header, content.data]) != size:
                return "its length"
        finally:
            os.close(file)
        if not header.startswith(_MAGIC):
            return "it is none of this version"
        if header != _header(key, content):
            return "its checksum"
        os.utime(path)
        return ""

    def delete(self, key: bytes) -> None:
        """Whether it is there or not."""
        with suppress(OSError):
            self._path(key).unlink()

    def keep_order(self, keys: Iterable[bytes], now_ns: int) -> None:
        """Note the order of use, least recent first, for the next `scan`."""
        for i, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self._path(key), ns=(now_ns + i, now_ns + i))

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"


def _header(key: bytes, content: Bytes) -> bytes:
    return _HEADER.pack(_MAGIC, key, content.nbytes, zlib.crc32(content.data))
