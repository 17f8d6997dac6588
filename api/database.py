"""SQLite in WAL mode, one transaction for each change, below --data-dir."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from api.errors import ApiError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(ApiError):
    """Nothing was written."""

    def __init__(self) -> None:
        super().__init__(
            507, "the disk of --data-dir is full: nothing was stored", code="disk_full", retry_after_s=60.0
        )


@contextlib.contextmanager
def naming_a_full_disk() -> Iterator[None]:
    """Raises DiskFullError for what the system or SQLite call by other names."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError from None
    except sqlite3.OperationalError as error:
        if "full" not in str(error):
            raise
        raise DiskFullError from None


class Database:
    """A change is on disk when its call returns; DiskFullError if it does not fit, and nothing has changed then."""

    def __init__(self, path: Path, schema: str) -> None:
        """Opens or makes the database. The thread that calls this is the only one that may call the rest."""
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(schema)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with naming_a_full_disk():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself takes some failures back
                    self._db.execute("ROLLBACK")
                raise
