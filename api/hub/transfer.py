"""One large file into huggingface_hub's cache, resumed after a break of the connection or of the program.

The library writes to a file of each process's own and deletes it when it fails, so hours of fetching would be lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from api.hub.cache import repo_folder
from api.hub.listing import HubFile, Listing
from api.hub.remote import NoRanges, Unreachable, open_range
from engine.errors import UserError

_PAUSES_S = (0, 1, 2, 4)  # before tries in a row without a byte between them
_HASHED_BYTES = 8 << 20  # at once


def blob_path(listing: Listing, file: HubFile) -> Path:
    """Where the cache keeps a large file's content: under its hash."""
    return repo_folder(listing.name.repo) / "blobs" / str(file.sha256)


def part_path(listing: Listing, file: HubFile) -> Path:
    """What of it has arrived."""
    return blob_path(listing, file).with_suffix(".ktserve-part")


def fetch_blob(listing: Listing, file: HubFile, add: Callable[[int], None]) -> None:
    """Have the content of a file with a hash in the cache. `add` gets the number of bytes as they come, those of
    earlier runs first. UserError if the hub refuses, breaks off again and again, or sends something else."""
    blob, part = blob_path(listing, file), part_path(listing, file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # another process may fetch it
        if blob.exists():
            part.unlink(missing_ok=True)
            return
        if os.fstat(out.fileno()).st_size > file.size:
            out.truncate(0)
        add(os.fstat(out.fileno()).st_size)
        _receive(listing, file, out.fileno(), add)
        if _sha256(part) != file.sha256:
            out.truncate(0)  # others may wait for it
            raise UserError(
                f"{listing.name}: {file.name} arrived with another SHA-256 than the hub states: "
                "run the same command again",
                "model",
            )
        part.rename(blob)


def _receive(listing: Listing, file: HubFile, out: int, add: Callable[[int], None]) -> None:
    have, tries = os.fstat(out).st_size, 0
    while have < file.size:
        before = have
        try:
            with open_range(listing, file, have, file.size) as chunks:
                for chunk in chunks:
                    os.write(out, chunk)
                    have += len(chunk)
                    add(len(chunk))
        except NoRanges:
            os.ftruncate(out, 0)
            add(-have)
            have = 0
        except Unreachable:
            tries = tries + 1 if have == before else 0
            if tries == len(_PAUSES_S):
                raise
            time.sleep(_PAUSES_S[tries])
        except OSError as error:
            raise UserError(f"{listing.name}: {file.name}: {error.strerror}", "model") from None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASHED_BYTES):
            digest.update(block)
    return digest.hexdigest()
