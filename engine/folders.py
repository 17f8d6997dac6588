"""Folders that are replaced as a whole: whenever the process ends, the old one or the new one is there, or comes back
with `settle`. Beside FOLDER stand `.FOLDER.part`, which is being written, and `.FOLDER.old`, which was replaced."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """`write` is called with a new folder; if it raises, the old one stays. Raises OSError too."""
    part = folder.with_name(f".{folder.name}.part")
    settle(folder)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        write(part)
        for file in part.iterdir():
            _sync(file)
        _swap(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        settle(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(_old(folder), ignore_errors=True)


def settle(folder: Path) -> None:
    """Bring back what a process that ended between two renames has left. Raises OSError."""
    if not folder.exists() and _old(folder).exists():
        try:
            _old(folder).rename(folder)
        except OSError:
            if not folder.exists():  # else another process has settled it meanwhile
                raise


def _swap(part: Path, folder: Path) -> None:
    while True:
        if folder.exists():
            shutil.rmtree(_old(folder), ignore_errors=True)
            folder.rename(_old(folder))
        try:
            part.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else another process has settled it meanwhile
                raise


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
