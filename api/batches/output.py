"""The files that a batch's answers go into at its end."""

from __future__ import annotations

import contextlib
import os
import time
from typing import BinaryIO

import msgspec

from api.batches.records import BatchRecord, FileRecord, Status
from api.batches.service import Batches, new_file_id
from api.batches.store import Store
from api.database import naming_a_full_disk

_ROWS = 64  # answers read at once; each may be megabytes
_LEFT = {
    Status.CANCELLING: ("batch_cancelled", "the batch was cancelled before this request was answered"),
    Status.FINALIZING: ("batch_expired", "the batch expired before this request was answered"),
}


async def assemble(batches: Batches, batch: BatchRecord) -> tuple[FileRecord | None, FileRecord | None]:
    """The output and the error file, None for one without lines. They are whole and in place, but known to nobody
    until the store has their records. Raises DiskFullError, after which nothing is left of them."""
    writers = _Writer(batches, "output"), _Writer(batches, "error")
    try:
        after = 0
        while rows := await batches.ask(Store.answers, batch.number, after, _ROWS):
            after = rows[-1][0]
            await batches.in_thread(_write, writers, batch, rows)
        for writer in writers:
            await batches.in_thread(writer.finish)
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    output, errors = (writer.record(batch) for writer in writers)
    return output, errors


class _Writer:
    def __init__(self, batches: Batches, kind: str) -> None:
        self._kind = kind
        self._id = new_file_id()
        self._partial, self._path = batches.partial(self._id), batches.path(self._id)
        self._file: BinaryIO | None = None
        self._bytes = 0

    def write(self, line: bytes) -> None:
        if self._file is None:
            self._file = self._partial.open("xb", buffering=2**20)
        self._file.write(line)
        self._bytes += len(line)

    def finish(self) -> None:
        if self._file is not None:
            with naming_a_full_disk():
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
            self._partial.rename(self._path)

    def discard(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what is still in its buffer does not fit either
                self._file.close()
            self._partial.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)

    def record(self, batch: BatchRecord) -> FileRecord | None:
        if self._file is None:
            return None
        now, after_s = int(time.time()), batch.output_expires_after_s
        return FileRecord(
            id=self._id,
            tenant=batch.tenant,
            filename=f"{batch.id}_{self._kind}.jsonl",
            purpose="batch_output",
            bytes=self._bytes,
            created_at=now,
            expires_at=None if after_s is None else now + after_s,
        )


def _write(
    writers: tuple[_Writer, _Writer], batch: BatchRecord, rows: list[tuple[int, str, int | None, bytes | None]]
) -> None:
    with naming_a_full_disk():
        for line, custom_id, ok, data in rows:
            if data is None:
                data = failure(*_LEFT[batch.status])
            head = msgspec.json.encode({"id": f"batch_req_{batch.id[6:]}_{line}", "custom_id": custom_id})
            writers[0 if ok else 1].write(head[:-1] + b"," + data + b"\n")


def failure(code: str, message: str) -> bytes:
    """The answer of a line that no endpoint has answered, as the store keeps it."""
    return msgspec.json.encode({"response": None, "error": {"code": code, "message": message}})[1:]


def answer(status: int, request_id: str, body: bytes) -> bytes:
    """An endpoint's answer, as the store keeps it. `body`: JSON."""
    flat = body.replace(b"\n", b"").replace(b"\r", b"")  # in JSON they stand only between values
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(flat)}
    return msgspec.json.encode({"response": response, "error": None})[1:]
