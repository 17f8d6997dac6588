"""What is known of files, batches and their lines: SQLite in WAL mode, one transaction for each change.

A batch's line has an answer or none; an answer counts once its transaction is committed, and is never written twice.
All calls block: they belong into the thread of `api/batches/service.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from api.batches.records import OPEN, Answered, BatchRecord, FileRecord, LineError, Status
from api.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, record BLOB NOT NULL,
  bytes INTEGER NOT NULL, expires_at INTEGER);
CREATE INDEX IF NOT EXISTS files_of ON files(tenant, number);
CREATE TABLE IF NOT EXISTS batches(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, status TEXT NOT NULL,
  input_file_id TEXT NOT NULL, record BLOB NOT NULL, completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS batches_of ON batches(tenant, number);
CREATE INDEX IF NOT EXISTS batches_in ON batches(status, number);
CREATE TABLE IF NOT EXISTS lines(
  batch INTEGER NOT NULL, line INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
  custom_id TEXT NOT NULL, ok INTEGER, answer BLOB, PRIMARY KEY(batch, line), UNIQUE(batch, custom_id));
CREATE INDEX IF NOT EXISTS lines_left ON lines(batch, line) WHERE answer IS NULL;
"""
_OPEN = ", ".join(f"'{status.value}'" for status in sorted(OPEN, key=lambda status: status.value))

Line = tuple[int, int, int]  # number, start, size in bytes


class Store(Database):
    """Files and batches in one database."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SCHEMA)

    # ---- files

    def add_file(self, file: FileRecord) -> None:
        with self._transaction():
            self._add_file(file)

    def _add_file(self, file: FileRecord) -> None:
        self._db.execute(
            "INSERT INTO files(id, tenant, record, bytes, expires_at) VALUES(?, ?, ?, ?, ?)",
            (file.id, file.tenant, msgspec.json.encode(file), file.bytes, file.expires_at),
        )

    def file(self, file_id: str) -> FileRecord | None:
        row = self._db.execute("SELECT record FROM files WHERE id = ?", (file_id,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=FileRecord)

    def file_ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM files")}

    def files(
        self, tenant: str, after: str | None, limit: int, purpose: str | None, *, newest_first: bool
    ) -> list[FileRecord]:
        """At most `limit` of a tenant's files, those that come after the file `after`."""
        condition = " AND json_extract(CAST(record AS TEXT), '$.purpose') = ?" if purpose is not None else ""
        rows = self._page(
            "files", tenant, after, limit, condition, (purpose,) if purpose is not None else (), newest_first
        )
        return [msgspec.json.decode(row[0], type=FileRecord) for row in rows]

    def _page(
        self,
        table: str,
        tenant: str,
        after: str | None,
        limit: int,
        condition: str,
        values: tuple[Any, ...],
        down: bool,
    ) -> list[Any]:
        if after is not None:
            condition += f" AND number {'<' if down else '>'} (SELECT number FROM {table} WHERE id = ? AND tenant = ?)"
            values += (after, tenant)
        columns = "record" if table == "files" else "number, status, completed, failed, record"
        order = "DESC" if down else "ASC"
        query = f"SELECT {columns} FROM {table} WHERE tenant = ?{condition} ORDER BY number {order} LIMIT ?"
        return self._db.execute(query, (tenant, *values, limit)).fetchall()

    def stored(self, tenant: str) -> tuple[int, int]:
        """How many files a tenant has, and their bytes."""
        row = self._db.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE tenant = ?", (tenant,))
        count, total = row.fetchone()
        return count, total

    def delete_file(self, file_id: str) -> str | None:
        """The batch that still needs the file, or None: it is deleted."""
        with self._transaction():
            row = self._db.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({_OPEN})", (file_id,)
            ).fetchone()
            if row is not None:
                return str(row[0])
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        return None

    def expired_files(self, now: int) -> list[str]:
        return [row[0] for row in self._db.execute("SELECT id FROM files WHERE expires_at <= ?", (now,))]

    # ---- batches

    def add_batch(self, batch: BatchRecord) -> None:
        with self._transaction():
            self._db.execute(
                "INSERT INTO batches(id, tenant, status, input_file_id, record) VALUES(?, ?, ?, ?, ?)",
                (batch.id, batch.tenant, batch.status.value, batch.input_file_id, msgspec.json.encode(batch)),
            )

    def batch(self, batch_id: str) -> BatchRecord | None:
        row = self._db.execute(
            "SELECT number, status, completed, failed, record FROM batches WHERE id = ?", (batch_id,)
        ).fetchone()
        return None if row is None else _batch(row)

    def batches(self, tenant: str, after: str | None, limit: int) -> list[BatchRecord]:
        """At most `limit` of a tenant's batches, newest first, those that come after the batch `after`."""
        return [_batch(row) for row in self._page("batches", tenant, after, limit, "", (), True)]

    def open_batches(self, tenant: str | None = None) -> list[BatchRecord]:
        """Those that have not ended, oldest first."""
        rows = self._db.execute(
            f"SELECT number, status, completed, failed, record FROM batches WHERE status IN ({_OPEN}) ORDER BY number"
        )
        found = [_batch(row) for row in rows]
        return found if tenant is None else [batch for batch in found if batch.tenant == tenant]

    def move(self, batch_id: str, to: Status, sources: Sequence[Status], **changes: Any) -> BatchRecord | None:
        """Bring a batch from one of the `sources` into another status, or return None if it is in none of them."""
        with self._transaction():
            return self._move(batch_id, to, sources, changes)

    def _move(
        self, batch_id: str, to: Status, sources: Sequence[Status], changes: dict[str, Any]
    ) -> BatchRecord | None:
        batch = self.batch(batch_id)
        if batch is None or batch.status not in sources:
            return None
        batch = msgspec.structs.replace(batch, status=to, **changes)
        self._db.execute(
            "UPDATE batches SET status = ?, record = ? WHERE id = ?", (to.value, msgspec.json.encode(batch), batch_id)
        )
        return batch

    def end(self, batch_id: str, to: Status, files: Sequence[FileRecord], **changes: Any) -> None:
        """A batch's end, and the files that hold its answers, at once."""
        with self._transaction():
            for file in files:
                self._add_file(file)
            self._move(batch_id, to, tuple(OPEN), changes)

    # ---- lines

    def add_lines(self, batch: int, lines: Sequence[tuple[int, int, int, str]]) -> list[int]:
        """(line, start, size, custom_id) each. Returns the numbers of those whose custom_id has been there before."""
        twice = []
        with self._transaction():
            for line, start, size, custom_id in lines:
                added = self._db.execute(
                    "INSERT OR IGNORE INTO lines(batch, line, start, size, custom_id) VALUES(?, ?, ?, ?, ?)",
                    (batch, line, start, size, custom_id),
                )
                if not added.rowcount:
                    twice.append(line)
        return twice

    def unanswered(self, batch: int, after: int, limit: int) -> list[Line]:
        """Lines without an answer, in order, those whose number is above `after`."""
        return self._db.execute(
            "SELECT line, start, size FROM lines WHERE batch = ? AND line > ? AND answer IS NULL ORDER BY line LIMIT ?",
            (batch, after, limit),
        ).fetchall()

    def answer(self, answers: Sequence[Answered]) -> None:
        """One transaction. A line that has an answer keeps it; a batch that is cancelled or late takes none."""
        with self._transaction():
            for answer in answers:
                changed = self._db.execute(
                    "UPDATE lines SET ok = ?1, answer = ?2 WHERE batch = ?3 AND line = ?4 AND answer IS NULL "
                    f"AND (SELECT status FROM batches WHERE number = ?3) = '{Status.IN_PROGRESS.value}'",
                    (answer.ok, answer.data, answer.batch, answer.line),
                )
                if changed.rowcount:
                    column = "completed" if answer.ok else "failed"
                    self._db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE number = ?", (answer.batch,))

    def answers(self, batch: int, after: int, limit: int) -> list[tuple[int, str, int | None, bytes | None]]:
        """(line, custom_id, ok, answer) in order, those whose number is above `after`."""
        return self._db.execute(
            "SELECT line, custom_id, ok, answer FROM lines WHERE batch = ? AND line > ? ORDER BY line LIMIT ?",
            (batch, after, limit),
        ).fetchall()

    def drop_lines(self, batch: int, limit: int) -> bool:
        """Forget at most `limit` of a batch's lines; whether there were any."""
        with self._transaction():
            dropped = self._db.execute(
                "DELETE FROM lines WHERE rowid IN (SELECT rowid FROM lines WHERE batch = ? LIMIT ?)", (batch, limit)
            )
            return dropped.rowcount > 0

    def ended_with_lines(self) -> list[int]:
        """Numbers of batches that have ended and whose lines are still there."""
        rows = self._db.execute(
            f"SELECT number FROM batches WHERE status NOT IN ({_OPEN}) "
            "AND EXISTS (SELECT 1 FROM lines WHERE lines.batch = batches.number)"
        )
        return [row[0] for row in rows]


def _batch(row: Any) -> BatchRecord:
    number, status, completed, failed, record = row
    batch = msgspec.json.decode(record, type=BatchRecord)
    return msgspec.structs.replace(batch, number=number, status=Status(status), completed=completed, failed=failed)


def line_errors(lines: Sequence[int]) -> list[LineError]:
    return [
        LineError("duplicate_custom_id", "the custom_id is that of an earlier line", line, "custom_id")
        for line in lines
    ]
