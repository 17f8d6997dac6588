"""Packed experts on disk, one file a layer, so that a model is repacked once.

    | magic, header length | JSON header | zeros to 4096 | packed memory, shard by shard |

The header names the layout's version, the layer's shape and formats, a hash of the source and a checksum of what
follows. A file that differs in anything is rebuilt, never trusted; it is replaced in one step (rename).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.store import ExpertStore

MAGIC = b"KTPACK1\n"
HEADER_BYTES = 4096
SAMPLES, SAMPLE_BYTES = 8, 4096  # of each expert's projection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackKey:
    """What a packed layer depends on."""

    layer: int
    layout: int
    shape: tuple[int, int, int]  # experts, hidden, intermediate
    formats: tuple[str, ...]
    shards: int
    source: str

    def header(self, checksum: int) -> bytes:
        fields = {**self.__dict__, "checksum": checksum}
        text = json.dumps(fields, sort_keys=True).encode()
        return (MAGIC + len(text).to_bytes(8, "little") + text).ljust(HEADER_BYTES, b"\0")


def source_hash(store: ExpertStore, identity: str) -> str:
    """Of the tensors' names, types, sizes and evenly spaced samples of their bytes, and of what the caller knows of
    the files (`identity`: names, sizes, times of change)."""
    digest = hashlib.sha256(identity.encode())
    for name, _ in store.projections():
        for index in range(store.num_experts):
            weight = store.expert(name, index)
            digest.update(f"{weight.name} {weight.type} {weight.shape}".encode())
            last = max(0, weight.num_bytes - SAMPLE_BYTES)
            for i in range(SAMPLES):
                start = last * i // (SAMPLES - 1)
                digest.update(weight.data[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()


class PackCache:
    """`folder` is made when first written to. A disk that is full or read-only costs the cache, not the start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:03}.ktpack"

    def read(self, key: PackKey, layer: Any, pool: Any) -> bool:
        """Fills a `_native.ExpertLayer`; False (and it may hold anything) if there is no good file."""
        path = self.path(key.layer)
        try:
            with path.open("rb") as file:
                header = file.read(HEADER_BYTES)
                if os.fstat(file.fileno()).st_size != HEADER_BYTES + layer.num_bytes:
                    return self._stale(path, "its size")
                checksum = _checksum(header)
                if checksum is None or header != key.header(checksum):
                    return self._stale(path, "its header")
                if layer.read(pool, file.fileno(), HEADER_BYTES) != checksum:
                    return self._stale(path, "its checksum")
        except FileNotFoundError:
            return False
        except (OSError, RuntimeError) as error:
            return self._stale(path, str(error))
        return True

    def _stale(self, path: Path, why: str) -> bool:
        log.warning("packed weights %s do not match (%s): packing anew", path, why)
        return False

    def write(self, key: PackKey, layer: Any, pool: Any) -> None:
        path = self.path(key.layer)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                checksum = layer.write(pool, file.fileno(), HEADER_BYTES)
                file.write(key.header(checksum))
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            log.warning("packed weights are not cached in %s: %s", self.folder, error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def load(self, key: PackKey, make: Callable[[], Any], pack: Callable[[Any], None], pool: Any) -> Any:
        """A layer made by `make`, filled from the cache or by `pack` (and then cached)."""
        layer = make()
        if not self.read(key, layer, pool):
            pack(layer)
            self.write(key, layer, pool)
        return layer


def _checksum(header: bytes) -> int | None:
    """The header's checksum, if it can be read at all; everything else is compared whole."""
    size = int.from_bytes(header[len(MAGIC) : len(MAGIC) + 8], "little")
    try:
        value = json.loads(header[len(MAGIC) + 8 : len(MAGIC) + 8 + size])["checksum"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if isinstance(value, int) else None
