"""Files and batches as the routes see them: what is asked of the store, in its thread, and the files on disk."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from api.batches.records import OPEN, BatchRecord, FileRecord, Status
from api.batches.store import Store
from api.batches.upload import Form
from api.config import ServeConfig
from api.database import naming_a_full_disk
from api.errors import ApiError, bad_request, shortened
from engine.errors import UserError

_T = TypeVar("_T")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
PURPOSES = ("batch", "fine-tune")
_WINDOW = re.compile("([1-9][0-9]{0,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
_WRITE_BYTES = 2**20


class Batches:
    """Owns --data-dir: one server at a time. `changed` is called when a batch was made or is to be cancelled; `needed`
    names what else needs a file."""

    def __init__(self, config: ServeConfig, folder: Path, lock: BinaryIO) -> None:
        self.config = config
        self.changed: Callable[[BatchRecord], None] = lambda batch: None
        self.needed: Callable[[str], Awaitable[str | None]] = _by_nobody
        self._folder = folder
        self._lock = lock
        self._thread = ThreadPoolExecutor(1, "batches")
        self._incoming: Counter[str] = Counter()  # bytes that are being uploaded, by tenant
        self._uploads: Counter[str] = Counter()

    @classmethod
    async def open(cls, config: ServeConfig, data_dir: str) -> Batches:
        """Raises UserError if the folder cannot be used."""
        folder = Path(os.path.expanduser(data_dir)).absolute()  # the engine loads adapters by absolute paths alone
        try:
            for part in (folder, folder / "files", folder / "incoming"):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (folder / "lock").open("ab")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--data-dir {data_dir}: another server uses it", "data_dir") from None
        except OSError as error:
            raise UserError(f"--data-dir {data_dir}: {error.strerror}", "data_dir") from None
        batches = cls(config, folder, lock)
        try:
            await batches._open_store()
        except Exception as error:  # of SQLite or the file system: all of them mean that the folder cannot be used
            batches.close()
            raise UserError(f"--data-dir {data_dir}: {error}", "data_dir") from error
        return batches

    async def _open_store(self) -> None:
        self._store = await asyncio.get_running_loop().run_in_executor(
            self._thread, Store, self._folder / "batches.sqlite3"
        )
        known = await self.ask(Store.file_ids)
        for part, kept in (("files", known), ("incoming", set[str]())):  # what a killed server had not finished
            for path in (self._folder / part).iterdir():
                if path.name not in kept:
                    path.unlink()

    def close(self) -> None:
        if hasattr(self, "_store"):
            self._thread.submit(self._store.close)
        self._thread.shutdown()
        self._lock.close()

    async def ask(self, method: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """A method of the store, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: method(self._store, *args, **options)
        )

    async def in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """What reads or writes files; not in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(None, lambda: function(*args))

    # ---- files

    @property
    def folder(self) -> Path:
        return self._folder

    def partial(self, file_id: str) -> Path:
        return self._folder / "incoming" / file_id

    def path(self, file_id: str) -> Path:
        return self._folder / "files" / file_id

    async def upload(self, tenant: str, content_type: str, chunks: AsyncIterator[bytes]) -> FileRecord:
        """Raises ApiError; then nothing is left of the file."""
        form, file_id = Form(content_type), new_file_id()
        partial = self.partial(file_id)
        written = 0
        self._uploads[tenant] += 1
        try:
            room = await self._room(tenant, uploading=True)
            with naming_a_full_disk():
                with partial.open("xb", buffering=_WRITE_BYTES) as file:
                    async for chunk in chunks:
                        for data in form.feed(chunk):
                            written += len(data)
                            self._incoming[tenant] += len(data)
                            if written > self.config.max_file_bytes:
                                limit = self.config.max_file_bytes
                                message = f"the file is larger than {limit} bytes: spread its lines over several"
                                raise ApiError(413, message, code="file_too_large")
                            if written > room:
                                raise _over_quota(self.config.max_stored_bytes)
                            await asyncio.to_thread(file.write, data)
                    record = self._described(tenant, form, file_id, written)
                    await self._room(tenant, uploading=True)
                    await asyncio.to_thread(_sync, file)
                partial.rename(self.path(file_id))
            await self.ask(Store.add_file, record)
        except BaseException:
            partial.unlink(missing_ok=True)
            self.path(file_id).unlink(missing_ok=True)
            raise
        finally:
            self._uploads[tenant] -= 1
            self._incoming[tenant] -= written
        return record

    def _described(self, tenant: str, form: Form, file_id: str, size: int) -> FileRecord:
        filename, purpose = form.finish(), form.fields.get("purpose")
        if purpose not in PURPOSES:
            expected = " or ".join(map(repr, PURPOSES))
            raise bad_request(f"purpose: {expected} is expected, got {shortened(purpose)}", "purpose")
        anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        after = None
        if anchor is not None or seconds is not None:
            digits = seconds if seconds is not None and seconds.isascii() and seconds.isdecimal() else "0"
            after = expires_after({"anchor": anchor, "seconds": int(digits[:9])}, "expires_after")
        now = int(time.time())
        return FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            bytes=size,
            created_at=now,
            expires_at=None if after is None else now + after,
        )

    async def _room(self, tenant: str, *, uploading: bool = False) -> int:
        """Bytes that the tenant may still store. Raises ApiError if it has too much already."""
        files, size = await self.ask(Store.stored, tenant)
        files, size = files + self._uploads[tenant] - uploading, size + self._incoming[tenant]
        most, most_bytes = self.config.max_files, self.config.max_stored_bytes
        if files >= most:
            raise bad_request(f"{files} files are stored, {most} are allowed: delete some", "file", "file_quota")
        if size > most_bytes:
            raise _over_quota(most_bytes)
        return most_bytes - size

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises ApiError 404, for another tenant's file too."""
        file = await self.ask(Store.file, file_id)
        if file is None or file.tenant != tenant or (file.expires_at or time.time() + 1) <= time.time():
            raise ApiError(404, f"there is no file {shortened(file_id)}", param="file_id", code="file_not_found")
        return file

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises ApiError 409 while a batch or a fine-tuning job needs it."""
        await self.file(tenant, file_id)
        if (job := await self.needed(file_id)) is not None:
            raise ApiError(409, f"the job {job} needs the file: cancel it first", code="file_in_use")
        batch = await self.ask(Store.delete_file, file_id)
        if batch is not None:
            raise ApiError(409, f"the batch {batch} needs the file: cancel it first", code="file_in_use")
        self.path(file_id).unlink(missing_ok=True)

    async def add_file(self, tenant: str, filename: str, purpose: str, data: bytes) -> FileRecord:
        """A file that the server has made. Raises DiskFullError."""
        record = FileRecord(
            id=new_file_id(),
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            bytes=len(data),
            created_at=int(time.time()),
        )
        partial = self.partial(record.id)
        with naming_a_full_disk():
            await self.in_thread(_written, partial, data)
            partial.rename(self.path(record.id))
        await self.ask(Store.add_file, record)
        return record

    async def delete_expired_files(self) -> None:
        for file_id in await self.ask(Store.expired_files, int(time.time())):
            if await self.needed(file_id) is None and await self.ask(Store.delete_file, file_id) is None:
                self.path(file_id).unlink(missing_ok=True)

    # ---- batches

    async def create(
        self,
        tenant: str,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        output_expires_after_s: int | None,
    ) -> BatchRecord:
        """Raises ApiError."""
        if endpoint not in ENDPOINTS:
            raise bad_request(
                f"endpoint: one of {', '.join(ENDPOINTS)} is expected, got {shortened(endpoint)}", "endpoint"
            )
        window_s = _window_s(completion_window)
        file = await self.file(tenant, input_file_id)
        if file.purpose != "batch":
            raise bad_request(
                f"input_file_id: a file with the purpose 'batch' is expected, got {file.purpose!r}", "input_file_id"
            )
        await self._room(tenant)
        if len(await self.ask(Store.open_batches, tenant)) >= self.config.max_open_batches:
            most = self.config.max_open_batches
            message = f"{most} batches have not ended, the most that are allowed: wait for one, or cancel one"
            raise ApiError(429, message, code="batch_quota")
        now = int(time.time())
        batch = BatchRecord(
            id=f"batch_{uuid.uuid4().hex}",
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=metadata,
            output_expires_after_s=output_expires_after_s,
        )
        await self.ask(Store.add_batch, batch)
        batch = await self.batch(tenant, batch.id)
        self.changed(batch)
        return batch

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises ApiError 404, for another tenant's batch too."""
        batch = await self.ask(Store.batch, batch_id)
        if batch is None or batch.tenant != tenant:
            raise ApiError(404, f"there is no batch {shortened(batch_id)}", param="batch_id", code="batch_not_found")
        return batch

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises ApiError 409 if it has ended."""
        batch = await self.batch(tenant, batch_id)
        sources = (Status.VALIDATING, Status.IN_PROGRESS)
        moved = await self.ask(Store.move, batch_id, Status.CANCELLING, sources, cancelling_at=int(time.time()))
        if moved is not None:
            self.changed(moved)
            return moved
        batch = await self.batch(tenant, batch_id)
        if batch.status not in OPEN:
            raise ApiError(409, f"the batch is {batch.status.value}: it cannot be cancelled", code="batch_ended")
        return batch


def _over_quota(most_bytes: int) -> ApiError:
    return bad_request(f"{most_bytes} bytes may be stored: delete files", "file", "storage_quota")


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def expires_after(value: dict[str, Any], param: str) -> int:
    """Seconds. Raises ApiError."""
    anchor, seconds = value.get("anchor"), value.get("seconds")
    if anchor != "created_at":
        raise bad_request(f"{param}.anchor: 'created_at' is expected, got {shortened(anchor)}", f"{param}.anchor")
    if isinstance(seconds, float) and seconds.is_integer():  # JSON's 3600.0 is a whole number
        seconds = int(seconds)
    if type(seconds) is not int or not 3600 <= seconds <= _LONGEST_S:
        raise bad_request(
            f"{param}.seconds: 3600 to {_LONGEST_S} are expected, got {shortened(seconds)}", f"{param}.seconds"
        )
    return seconds


def _window_s(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise bad_request(
            f"completion_window: a number of s, m, h or d, at most 30d, is expected, got {shortened(window)}",
            "completion_window",
        )
    return seconds


async def _by_nobody(file_id: str) -> str | None:
    return None


def _written(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
