"""What is known of fine-tuning jobs: SQLite in WAL mode, one transaction for each change.

All calls block: they belong into the thread of `api/tuning/service.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from api.database import Database
from api.tuning.records import OPEN, CheckpointRecord, EventRecord, JobRecord, JobStatus

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, status TEXT NOT NULL,
  record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS jobs_of ON jobs(tenant, number);
CREATE TABLE IF NOT EXISTS events(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job TEXT NOT NULL, step INTEGER NOT NULL,
  record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS events_of ON events(job, number);
CREATE TABLE IF NOT EXISTS checkpoints(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, job TEXT NOT NULL, model TEXT NOT NULL UNIQUE,
  record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS checkpoints_of ON checkpoints(job, number);
"""
_decode_job = msgspec.json.Decoder(JobRecord).decode
_decode_event = msgspec.json.Decoder(EventRecord).decode
_decode_checkpoint = msgspec.json.Decoder(CheckpointRecord).decode


class JobStore(Database):
    """Jobs with their events and checkpoints in one database."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SCHEMA)

    # ---- jobs

    def add(self, job: JobRecord, event: EventRecord, most: int) -> bool:
        """False, and nothing is added, if `most` jobs of the tenant have not ended."""
        with self._transaction():
            if len(self.with_status(OPEN, job.tenant)) >= most:
                return False
            self._db.execute(
                "INSERT INTO jobs(id, tenant, status, record) VALUES(?, ?, ?, ?)",
                (job.id, job.tenant, job.status.value, msgspec.json.encode(job)),
            )
            self._add_event(job.id, event)
            return True

    def job(self, job_id: str) -> JobRecord | None:
        row = self._db.execute("SELECT record FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else _decode_job(row[0])

    def jobs(
        self, tenant: str, after: str | None, limit: int, wanted: Callable[[JobRecord], bool] = lambda job: True
    ) -> list[JobRecord]:
        """At most `limit` of a tenant's jobs that are `wanted`, newest first, those that come after the job `after`."""
        condition, values = "", [tenant]
        if after is not None:
            condition, values = " AND number < (SELECT number FROM jobs WHERE id = ?)", [tenant, after]
        query = f"SELECT record FROM jobs WHERE tenant = ?{condition} ORDER BY number DESC"
        found = (_decode_job(row[0]) for row in self._db.execute(query, values))
        return list(islice(filter(wanted, found), limit))

    def with_status(self, statuses: Collection[JobStatus], tenant: str | None = None) -> list[JobRecord]:
        """Oldest first."""
        marks = ", ".join("?" * len(statuses))
        query = f"SELECT record FROM jobs WHERE status IN ({marks}) ORDER BY number"
        found = [_decode_job(row[0]) for row in self._db.execute(query, [status.value for status in statuses])]
        return found if tenant is None else [job for job in found if job.tenant == tenant]

    def change(
        self, job_id: str, sources: Collection[JobStatus], event: EventRecord | None = None, **changes: Any
    ) -> JobRecord | None:
        """Change a job that is in one of the `sources`, and note an event; None if it is in none of them."""
        with self._transaction():
            return self._change(job_id, sources, event, changes)

    def _change(
        self, job_id: str, sources: Collection[JobStatus], event: EventRecord | None, changes: dict[str, Any]
    ) -> JobRecord | None:
        job = self.job(job_id)
        if job is None or job.status not in sources:
            return None
        job = msgspec.structs.replace(job, **changes)
        self._db.execute(
            "UPDATE jobs SET status = ?, record = ? WHERE id = ?", (job.status.value, msgspec.json.encode(job), job_id)
        )
        if event is not None:
            self._add_event(job_id, event)
        return job

    def needs(self, file_id: str) -> str | None:
        """A job that has not ended and reads the file."""
        jobs = self.with_status(OPEN)
        return next((job.id for job in jobs if file_id in (job.training_file, job.validation_file)), None)

    # ---- events

    def _add_event(self, job_id: str, event: EventRecord) -> None:
        self._db.execute(
            "INSERT INTO events(id, job, step, record) VALUES(?, ?, ?, ?)",
            (event.id, job_id, 0 if event.metrics is None else event.metrics.step, msgspec.json.encode(event)),
        )

    def add_event(self, job_id: str, event: EventRecord) -> None:
        with self._transaction():
            self._add_event(job_id, event)

    def events(self, job_id: str, after: str | None, limit: int) -> list[EventRecord]:
        """At most `limit`, newest first, those that come after the event `after`."""
        condition, values = "", [job_id]
        if after is not None:
            condition, values = " AND number < (SELECT number FROM events WHERE id = ? AND job = ?)", [
                job_id, after, job_id,
            ]  # fmt: skip
        query = f"SELECT record FROM events WHERE job = ?{condition} ORDER BY number DESC LIMIT ?"
        return [_decode_event(row[0]) for row in self._db.execute(query, (*values, limit))]

    def events_since(self, job_id: str, number: int, limit: int) -> list[tuple[int, EventRecord]]:
        """Oldest first, those whose number is above `number`."""
        query = "SELECT number, record FROM events WHERE job = ? AND number > ? ORDER BY number LIMIT ?"
        return [(row[0], _decode_event(row[1])) for row in self._db.execute(query, (job_id, number, limit))]

    def metrics(self, job_id: str) -> list[EventRecord]:
        """In the order of steps."""
        query = "SELECT record FROM events WHERE job = ? AND step > 0 ORDER BY step"
        return [_decode_event(row[0]) for row in self._db.execute(query, (job_id,))]

    def go_back(self, job_id: str, step: int) -> list[CheckpointRecord]:
        """Forget events and checkpoints of later steps; returns those checkpoints."""
        with self._transaction():
            self._db.execute("DELETE FROM events WHERE job = ? AND step > ?", (job_id, step))
            late = [checkpoint for checkpoint in self.checkpoints(job_id) if checkpoint.metrics.step > step]
            self._drop(late)
        return late

    # ---- checkpoints

    def add_checkpoint(self, checkpoint: CheckpointRecord, **changes: Any) -> JobRecord | None:
        """And change its job; None, and nothing is added, if that has ended."""
        with self._transaction():
            job = self._change(checkpoint.job, OPEN, None, changes)
            if job is not None:
                self._db.execute(
                    "INSERT OR REPLACE INTO checkpoints(id, job, model, record) VALUES(?, ?, ?, ?)",
                    (checkpoint.id, checkpoint.job, checkpoint.model, msgspec.json.encode(checkpoint)),
                )
            return job

    def checkpoints(self, job_id: str | None = None) -> list[CheckpointRecord]:
        """Of a job, newest first; None: of all."""
        condition, values = ("", ()) if job_id is None else (" WHERE job = ?", (job_id,))
        query = f"SELECT record FROM checkpoints{condition} ORDER BY number DESC"
        return [_decode_checkpoint(row[0]) for row in self._db.execute(query, values)]

    def drop_checkpoints(self, checkpoints: Sequence[CheckpointRecord]) -> None:
        with self._transaction():
            self._drop(checkpoints)

    def _drop(self, checkpoints: Sequence[CheckpointRecord]) -> None:
        self._db.executemany("DELETE FROM checkpoints WHERE id = ?", [(each.id,) for each in checkpoints])
