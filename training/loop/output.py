"""The folder of a run: made for it, held by it alone, and gone again if the run is refused before it has begun."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.errors import UserError

_LOCK = ".lock"


@contextmanager
def output_folder(output: Path) -> Iterator[None]:
    """Within, no other run writes into `output`. UserError if one does, or if the folder cannot be made. Folders that
    were made for it and are still empty are removed."""
    made = [folder for folder in (output, *output.parents) if not os.path.exists(folder)]
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = _locked(output)
    except OSError as error:
        _remove_empty(made)
        raise UserError(f"output_dir {output}: {error.strerror}", "output_dir") from error
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(output / _LOCK)  # while it is held
        os.close(lock)
        _remove_empty(made)


def _locked(output: Path) -> int:
    """A descriptor of the lock file, which is locked as long as it is open. UserError if another process has it."""
    while True:
        lock = os.open(output / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 32, 0).decode(errors="replace")
            os.close(lock)
            message = f"output_dir {output}: another run, process {owner or '?'}, writes into it: wait for its end, or "
            raise UserError(f"{message}give another folder", "output_dir") from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(output / _LOCK)):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        os.close(lock)  # of a run that has just ended and removed it


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
