"""Fine-tuning jobs as the routes see them: what is asked of the store, in its thread, and the folders on disk.

DATA_DIR/tuning.sqlite3                   jobs, events, checkpoints
DATA_DIR/tuning/JOB/training.samples ...  the files as samples
                   /state-STEP            masters and moments that work goes on from
                   /adapter-STEP          an adapter that is served, as `checkpoints` says
                   /begin                 the adapter that the job begins with, hard links to its files
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from api.batches.service import Batches
from api.errors import ApiError, bad_request, shortened
from api.tenants.record import Tenant
from api.tuning.records import OPEN, Asked, EventRecord, JobRecord, JobStatus, Metrics
from api.tuning.store import JobStore
from engine.errors import UserError

_T = TypeVar("_T")
_MOST_JOBS = 100
BEGIN = "begin"  # the adapter that a job begins with, in its folder


class Tuning:
    """`owners`: the tenant of each model that was trained here. `changed` is called with a job that is new, or is to be
    paused, resumed or cancelled. `remove`: unloads a model and removes its folder."""

    def __init__(self, batches: Batches, store: JobStore, thread: ThreadPoolExecutor) -> None:
        self.batches = batches
        self.owners: dict[str, str] = {}
        self.changed: Callable[[JobRecord], None] = lambda job: None
        self._store, self._thread = store, thread

    @classmethod
    async def open(cls, batches: Batches) -> Tuning:
        """Raises UserError if the folder cannot be used."""
        thread = ThreadPoolExecutor(1, "tuning")
        try:
            (batches.folder / "tuning").mkdir(mode=0o700, exist_ok=True)
            path = batches.folder / "tuning.sqlite3"
            store = await asyncio.get_running_loop().run_in_executor(thread, JobStore, path)
        except Exception as error:  # of SQLite or the file system: all of them mean that the folder cannot be used
            thread.shutdown()
            raise UserError(f"--data-dir {batches.folder}: {error}", "data_dir") from error
        tuning = cls(batches, store, thread)
        batches.needed = lambda file_id: tuning.ask(JobStore.needs, file_id)
        jobs = {job.id: job for job in await tuning.ask(JobStore.with_status, frozenset(JobStatus))}
        await batches.in_thread(remove_all_but, set(jobs), tuning.folder(""))  # a killed server had not noted them yet
        for checkpoint in await tuning.ask(JobStore.checkpoints):
            tuning.owners[checkpoint.model] = jobs[checkpoint.job].tenant
        return tuning

    def close(self) -> None:
        self._thread.submit(self._store.close)
        self._thread.shutdown()

    async def ask(self, method: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """A method of the store, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: method(self._store, *args, **options)
        )

    def folder(self, job_id: str) -> Path:
        return self.batches.folder / "tuning" / job_id

    # ---- jobs

    async def create(
        self,
        tenant: Tenant,
        *,
        model: str,
        begins: str | None,
        training_file: str,
        validation_file: str | None,
        suffix: str | None,
        seed: int | None,
        metadata: dict[str, str] | None,
        asked: Asked,
    ) -> JobRecord:
        """Raises ApiError. `model`: the base's name, as it is known to be; `begins`: a model of this tenant."""
        for name, file_id in (("training_file", training_file), ("validation_file", validation_file)):
            if file_id is not None:
                await self._usable(tenant, name, file_id)
        self._check_models(tenant)
        most = _MOST_JOBS if tenant.fine_tuning_jobs is None else tenant.fine_tuning_jobs
        job_id = f"ftjob-{uuid.uuid4().hex[:24]}"
        job = JobRecord(
            id=job_id,
            tenant=tenant.name,
            model=model,
            begins=begins,
            training_file=training_file,
            validation_file=validation_file,
            suffix=suffix,
            metadata=metadata,
            created_at=int(time.time()),
            seed=int.from_bytes(uuid.uuid4().bytes[:4], "little") >> 1 if seed is None else seed,
            asked=asked,
        )
        if begins is not None:
            await self._copy_begin(begins, job_id)
        if not await self.ask(JobStore.add, job, event(f"Created fine-tuning job: {job_id}"), most):
            await self.batches.in_thread(shutil.rmtree, self.folder(job_id), True)
            message = f"{most} jobs have not ended, the most that are allowed: wait for one, or cancel one"
            raise ApiError(429, message, code="job_quota")
        self.changed(job)
        return job

    async def _copy_begin(self, model: str, job_id: str) -> None:
        """The model may be deleted before the job has begun. Raises ApiError."""
        found = next((each for each in await self.ask(JobStore.checkpoints) if each.model == model), None)
        if found is None:
            message = f"model: a job begins with the base, or with a model that a job has trained; not with {model!r}"
            raise bad_request(message, "model")
        source, begin = self.folder(found.job) / found.folder, self.folder(job_id) / BEGIN
        try:
            await self.batches.in_thread(partial(shutil.copytree, source, begin, copy_function=os.link))
        except (OSError, shutil.Error) as error:
            await self.batches.in_thread(shutil.rmtree, begin.parent, True)
            raise ApiError(409, f"model: {model!r} cannot be copied: it was deleted", param="model") from error

    async def _usable(self, tenant: Tenant, name: str, file_id: str) -> None:
        try:
            file = await self.batches.file(tenant.name, file_id)
        except ApiError as error:
            raise ApiError(400, f"{name}: {error.message}", param=name, code=error.code) from None
        if file.purpose != "fine-tune":
            raise bad_request(f"{name}: a file with the purpose 'fine-tune' is expected, got {file.purpose!r}", name)

    @staticmethod
    def check_allowed(tenant: Tenant) -> None:
        """Raises ApiError 403."""
        if tenant.fine_tuning_jobs == 0:
            raise ApiError(403, "fine-tuning is not allowed with this key", code="fine_tuning_not_allowed")

    def _check_models(self, tenant: Tenant) -> None:
        """Raises ApiError 403 or 429."""
        self.check_allowed(tenant)
        kept = sum(owner == tenant.name and name.startswith("ft:") for name, owner in self.owners.items())
        if tenant.fine_tuned_models is not None and kept >= tenant.fine_tuned_models:
            message = f"{kept} fine-tuned models are kept, {tenant.fine_tuned_models} are allowed: delete some"
            raise ApiError(429, message, code="model_quota")

    async def job(self, tenant: Tenant, job_id: str) -> JobRecord:
        """Raises ApiError 404, for another tenant's job too."""
        job = await self.ask(JobStore.job, job_id)
        if job is None or job.tenant != tenant.name:
            message = f"there is no fine-tuning job {shortened(job_id)}"
            raise ApiError(404, message, param="fine_tuning_job_id", code="job_not_found")
        return job

    async def move(self, tenant: Tenant, job_id: str, to: JobStatus, message: str) -> JobRecord:
        """Cancel, pause or resume. Raises ApiError 409 from another status."""
        job = await self.job(tenant, job_id)
        sources = _SOURCES[to]
        finished = {"finished_at": int(time.time())} if to is JobStatus.CANCELLED else {}
        moved = await self.ask(JobStore.change, job_id, sources, event(message), status=to, **finished)
        if moved is None:
            job = await self.job(tenant, job_id)
            named = ", ".join(sorted(status.value for status in sources))
            message = f"the job is {job.status.value}: only one that is {named} can become {to.value}"
            raise ApiError(409, message, code="wrong_status")
        self.changed(moved)
        return moved

    async def remove_model(self, model: str) -> None:
        """Of a model that serves no more: its checkpoint and its folder. Its job stays, for its figures."""
        found = [each for each in await self.ask(JobStore.checkpoints) if each.model == model]
        await self.ask(JobStore.drop_checkpoints, found)
        self.owners.pop(model, None)
        for each in found:
            await self.batches.in_thread(shutil.rmtree, self.folder(each.job) / each.folder, True)


_SOURCES = {
    JobStatus.CANCELLED: OPEN,
    JobStatus.PAUSED: OPEN - {JobStatus.PAUSED},
    JobStatus.QUEUED: frozenset({JobStatus.PAUSED}),
}


def event(message: str, level: Any = "info", metrics: Metrics | None = None) -> EventRecord:
    return EventRecord(
        id=f"ftevent-{uuid.uuid4().hex[:24]}",
        created_at=int(time.time()),
        message=message,
        level=level,
        metrics=metrics,
    )


def remove_all_but(kept: set[str], folder: Path) -> None:
    """Files and folders in a folder, but those that are `kept`."""
    for path in folder.glob("*"):
        if path.is_dir() and path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in kept:
            path.unlink(missing_ok=True)


def model_name(job: JobRecord, step: int | None = None) -> str:
    """`ft:BASE:TENANT:SUFFIX:ID`, of a checkpoint with its step; within the characters and the length of adapters'
    names."""
    base, tenant = (re.sub("[^A-Za-z0-9._-]", "-", name)[:24] for name in (job.model, job.tenant))
    name = f"ft:{base}:{tenant}:{(job.suffix or '')[:40]}:{job.id.removeprefix('ftjob-')[:12]}"
    return name if step is None else f"{name}:ckpt-step-{step}"
