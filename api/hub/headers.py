"""A model on the hub as files that hold their headers and nothing behind them: what a memory plan reads, fetched by
range requests. Sparse files of the true sizes, so that every reader takes them for the model's own."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from api.hub.listing import INDEX, SAFETENSORS, HubFile, Listing, Option, needed_shards
from api.hub.remote import read_range
from engine.errors import UserError
from engine.files.gguf.header import header_of
from engine.files.model_file import ModelFile
from engine.files.regular import MAX_JSON_BYTES

_MAX_HEADER = 100_000_000  # of safetensors, by its format
_FIRST_BYTES = 1 << 16  # of a safetensors file: small headers come in one request
_LARGE = (".gguf", ".safetensors", ".bin")


def write_headers(listing: Listing, option: Option, folder: Path) -> Path:
    """The option's own path below `folder`. UserError, ModelFileError for a file whose header is unsound."""
    small = [file for file in option.files if not file.name.endswith(_LARGE)]
    for file in small:
        _write_whole(listing, file, folder)
    if option.label == SAFETENSORS and INDEX in listing.files:
        option = needed_shards(option, (folder / INDEX).read_bytes(), str(listing.name))
    for file in option.files:
        if file.name.endswith(_LARGE):
            _write_header(listing, file, folder)
    return folder / option.main if option.main.endswith(".gguf") else folder


def _write_whole(listing: Listing, file: HubFile, folder: Path) -> None:
    if file.size > MAX_JSON_BYTES:
        raise UserError(
            f"{listing.name}: {file.name} has {file.size} bytes; at most {MAX_JSON_BYTES} are read", "model"
        )
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(read_range(listing, file, 0, file.size) if file.size else b"")


def _write_header(listing: Listing, file: HubFile, folder: Path) -> None:
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as sparse:
        sparse.truncate(file.size)
    remote = _Remote(path, listing, file)
    if file.name.endswith(".gguf"):
        header_of(remote)
    elif file.name.endswith(".safetensors"):
        remote.need(min(_FIRST_BYTES, file.size))
        size = int.from_bytes(remote.read(0, 8).tobytes(), "little") if file.size >= 8 else 0
        remote.need(min(8 + size, file.size, _MAX_HEADER))


class _Remote(ModelFile):
    """A sparse file that fetches its beginning as far as it is read."""

    def __init__(self, path: Path, listing: Listing, file: HubFile) -> None:
        super().__init__(path)
        self._listing, self._remote, self._have = listing, file, 0

    def read(self, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        self.need(start + num_bytes)
        return super().read(start, num_bytes)

    def need(self, end: int) -> None:
        """Have the bytes up to `end`."""
        if end <= self._have:
            return
        content = read_range(self._listing, self._remote, self._have, end - self._have)
        with self.path.open("r+b") as file:
            os.pwrite(file.fileno(), content, self._have)
        self._have = end
