"""Packed weights on disk, so that a model is repacked once: a folder per model, in it a file per projection and one
per layer's experts.

    | magic, header length | JSON header | zeros to 4096 | packed memory, shard by shard |

The header names the layout's version, the weights' shape and formats, a hash of the source and a checksum of what
follows. A file that differs in anything is rebuilt, never trusted; it is replaced in one step (rename). Nothing is
ever deleted: folders of other models, or of this one before its files changed, are named in a note.

Where a CPU computes and all its memory is one node's, files are mapped, those too that were just written, so that a
start takes no time to find huge pages: they are copied to such, from which they are read faster, once the model is
loaded. A lease of the kernel's
holds up whoever would write to a mapped file until then (native/src/runtime/mapped_file.hpp); where there are no leases
files are copied at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.files.model_file import FileBytes, MadeBytes
from engine.units import format_bytes

if TYPE_CHECKING:
    from engine.weights.store import WeightTensor
    from native import _native

MAGIC = b"KTPACK1\n"
HEADER_BYTES = 4096
SUFFIX = ".ktpack"
CACHE_FOLDER = ".ktserve"  # beside the model's files
SAMPLES, SAMPLE_BYTES = 8, 4096  # of each tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackKey:
    """What a packed matrix, or a layer's experts, depends on. `name` is the file's."""

    name: str
    layout: int
    shape: tuple[int, ...]
    formats: tuple[str, ...]
    shards: int
    source: str

    def header(self, checksum: int) -> bytes:
        fields = {**self.__dict__, "checksum": checksum}
        text = json.dumps(fields, sort_keys=True).encode()
        return (MAGIC + len(text).to_bytes(8, "little") + text).ljust(HEADER_BYTES, b"\0")


def cache_root(pack_cache: str, model: str, gguf: str | None) -> tuple[Path, str]:
    """The folder of all models' packed weights and the model's name there, by the settings of an engine."""
    files = Path(os.path.expanduser(gguf or model)).absolute()
    name = files.stem if files.suffix == ".gguf" else files.name
    if pack_cache != "auto":
        return Path(os.path.expanduser(pack_cache)), name
    return (files if files.is_dir() else files.parent) / CACHE_FOLDER, name


def model_folder(root: Path, name: str, identity: str) -> Path:
    """`root`/NAME-HASH for the state of a model's files that `identity` tells from others."""
    return root / f"{plain_name(name)}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def plain_name(name: str) -> str:
    """A model's name as part of a folder's."""
    return (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model")[:100]


class PackCache:
    """`folder` is made when first written to, `identity` tells one state of the model's files from another. A disk
    that is full or read-only costs the cache, not the start: the first failure to write is noted and the last try.
    `mapped` maps files; None: they are copied, as a GPU pins memory that is its process's own."""

    def __init__(self, folder: Path, identity: str = "", mapped: _native.MappedFiles | None = None) -> None:
        self.folder = folder
        self.identity = identity
        self.notes: list[str] = []
        self._writes = True
        self._outdated = False
        self._mapped = mapped
        self._read, self._packed = 0, 0  # bytes

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def source_hash(self, weights: Iterable[WeightTensor]) -> str:
        """Of the tensors' names, types, sizes and evenly spaced samples of their bytes, and of `identity`."""
        digest = hashlib.sha256(self.identity.encode())
        for weight in weights:
            digest.update(f"{weight.name} {weight.type} {weight.shape}".encode())
            data = weight.data
            for piece in data.ranges if isinstance(data, MadeBytes) else (data,):
                last, size = max(0, piece.nbytes - SAMPLE_BYTES), min(SAMPLE_BYTES, piece.nbytes)
                for start in (last * i // (SAMPLES - 1) for i in range(SAMPLES)):
                    if isinstance(piece, FileBytes):
                        digest.update(piece.file.small(piece.start + start, size))
                    else:
                        digest.update(piece[start : start + size].tobytes())
        return digest.hexdigest()

    def read(self, key: PackKey, packed: Any, pool: _native.WorkerPool) -> bool:
        """Fills an ExpertLayer or PackedLinear; False (and it may hold anything) if there is no good file."""
        path = self.path(key.name)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                checksum = _checksum(header)
                if checksum is None or header != key.header(checksum):
                    return self._stale(path, "its header", every=False)
                if os.fstat(file.fileno()).st_size != HEADER_BYTES + packed.num_bytes:
                    return self._stale(path, "its size")
                if self._filled(packed, pool, file.fileno()) != checksum:
                    return self._stale(path, "its checksum")
        except FileNotFoundError:
            return False
        except (PermissionError, NotADirectoryError) as error:  # of the folder
            return self._stale(path, str(error), every=False)
        except (OSError, RuntimeError, ValueError) as error:
            return self._stale(path, str(error))
        return True

    def _filled(self, packed: Any, pool: _native.WorkerPool, file: int) -> int:
        """The checksum of an open file's weights, which `packed` holds from here on. OSError, RuntimeError or
        ValueError if they cannot be read."""
        mapped = self._map(file) if packed.shards == 1 else None
        if mapped is None:
            return int(packed.read(pool, file, HEADER_BYTES))
        return int(packed.adopt(pool, mapped, HEADER_BYTES))

    def _map(self, file: int) -> _native.MappedFile | None:
        """None where files are not mapped, or others' changes to this one could not be held up."""
        if self._mapped is None:
            return None
        try:
            return self._mapped.map(file)
        except RuntimeError as error:
            log.debug("packed weights are copied, not mapped: %s", error)
            return None

    def _stale(self, path: Path, why: str, *, every: bool = True) -> bool:
        """`every`: to be said of each file; settings, versions and the folder make all of them stale at once."""
        log.log(
            logging.WARNING if every or not self._outdated else logging.DEBUG,
            "packed weights %s do not match (%s): packing again%s",
            path,
            why,
            "" if every else ", and all like it",
        )
        self._outdated = self._outdated or not every
        return False

    def write(self, key: PackKey, packed: Any, pool: _native.WorkerPool) -> bool:
        """Whether it was written."""
        if not self._writes:
            return False
        path = self.path(key.name)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                checksum = packed.write(pool, file.fileno(), HEADER_BYTES)
                file.write(key.header(checksum))
            partial.replace(path)
            return True
        except (OSError, RuntimeError) as error:
            self._writes = False
            note = f"packed weights are not cached in {self.folder}: {error}; the next start packs them again"
            self.notes.append(f"{note} (--pack-cache names another folder, or off)")
            log.warning("%s", note)
            return False
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def load(self, key: PackKey, make: Callable[[], Any], pack: Callable[[Any], None], pool: _native.WorkerPool) -> Any:
        """Something made by `make`, filled from the cache or by `pack` (and then cached, and mapped as it will be the
        next time)."""
        made = make()
        if self.read(key, made, pool):
            self._read += made.num_bytes
            return made
        made = make()  # a bad file may have left anything in the first, padding included
        pack(made)
        self._packed += made.num_bytes
        if not self.write(key, made, pool) or self._mapped is None:
            return made
        written = make()
        return written if self.read(key, written, pool) else made

    def own(self) -> None:
        """Begins to copy what is mapped, which takes a share of memory's rate for some seconds."""
        if self._mapped is not None:
            self._mapped.own()

    def report(self) -> list[str]:
        """What the start got from the cache, what went wrong, and what else lies beside it."""
        if self._mapped is not None:
            self._mapped.drop()
        done = f"{format_bytes(self._read)} read, {format_bytes(self._packed)} packed"
        return [f"packed weights, {self.folder}: {done}", *self.notes, *self._others()]

    def _others(self) -> list[str]:
        try:
            others = [f for f in self.folder.parent.iterdir() if f != self.folder and any(f.glob(f"*{SUFFIX}"))]
            size = sum(file.stat().st_size for other in others for file in other.glob(f"*{SUFFIX}"))
        except OSError:
            return []
        if not others:
            return []
        names = ", ".join(sorted(other.name for other in others)[:4]) + (", ..." if len(others) > 4 else "")
        return [
            f"{self.folder.parent} also holds {format_bytes(size)} of packed weights of other models, or of other "
            f"states of this one's files ({names}); delete what is not needed"
        ]


def _checksum(header: bytes) -> int | None:
    """The header's checksum, if it can be read at all; everything else is compared whole."""
    size = int.from_bytes(header[len(MAGIC) : len(MAGIC) + 8], "little")
    try:
        value = json.loads(header[len(MAGIC) + 8 : len(MAGIC) + 8 + size])["checksum"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if isinstance(value, int) else None
