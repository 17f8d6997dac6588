"""Brings every fine-tuning job to its end.

validating_files -> queued -> running -> succeeded       any of them: -> cancelled, failed; -> paused -> queued

A job goes on from its last state on disk, whatever ended the work before: a pause, a kill, an engine that died. Steps
after that state are computed again, from the same examples, and what was noted of them is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from api.client.calls import CallRefused
from api.client.client import EngineClient
from api.client.stream import EngineUnavailable
from api.database import DiskFullError
from api.prepare.job import TextSettings
from api.tenants.record import Tenant
from api.tuning.plan import plan_of
from api.tuning.records import ENDED, WORKED, JobError, JobRecord, JobStatus
from api.tuning.service import Tuning, event, remove_all_but
from api.tuning.store import JobStore
from api.tuning.training import Interrupted, Training
from api.tuning.validate import check_file, error_of

log = logging.getLogger("ktserve")
_T = TypeVar("_T")
_LOOK_S = 0.1  # for an engine that does not serve now
_RETRY_S = 5.0  # after a fault of ours, or a full disk
_AT_ONCE, _CHECKED_AT_ONCE = 8, 2  # jobs that are trained, and whose files are checked, at a time
_CRASHES = 3  # engines that may end while they train a job without a step that is kept


class JobRunner:
    """`run` until cancelled. `longest`: tokens of a text (--training-tokens). `trained` is told how many tokens a job
    was trained on, each time that work on it ends."""

    def __init__(
        self,
        tuning: Tuning,
        client: EngineClient,
        text: TextSettings,
        tenant_named: Callable[[str], Tenant | None],
        longest: int,
        trained: Callable[[JobRecord, int], None],
    ) -> None:
        self._tuning, self._client, self._text, self._longest = tuning, client, text, longest
        self._tenant_named = tenant_named
        self._trained = trained
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._checking = asyncio.Semaphore(_CHECKED_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._moved: dict[str, asyncio.Event] = {}  # set when a job in work is to be cancelled or paused
        self._late: dict[str, JobRecord] = {}  # changed while the last work on them was ending

    async def run(self) -> None:
        tuning = self._tuning
        tuning.changed = self._take
        try:
            await self._engine_serves()
            for checkpoint in await tuning.ask(JobStore.checkpoints):
                await self._load(checkpoint.model, str(tuning.folder(checkpoint.job) / checkpoint.folder))
            for job in await tuning.ask(JobStore.with_status, WORKED):
                self._take(job)
            for job in await tuning.ask(JobStore.with_status, ENDED):
                await self._remove_work(job.id)
            await asyncio.Event().wait()
        finally:
            tuning.changed = lambda job: None
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, job: JobRecord) -> None:
        """A job is new, or is to be cancelled, paused or resumed."""
        if job.id in self._moved:
            self._moved[job.id].set()
        elif job.id in self._tasks:
            self._late[job.id] = job
        elif job.status is not JobStatus.PAUSED:
            task = self._tasks[job.id] = asyncio.create_task(self._process(job.id))
            task.add_done_callback(lambda task: self._ended(job.id, task))

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[job_id]
        late = self._late.pop(job_id, None)
        if late is not None and not task.cancelled():
            self._take(late)

    # ---- one job

    async def _process(self, job_id: str) -> None:
        crashes = 0
        while True:
            job = await self._known(job_id)
            if job.status not in WORKED:
                if job.status is not JobStatus.PAUSED:
                    await self._remove_work(job_id)
                return
            moved = self._moved[job_id] = asyncio.Event()
            try:
                await self._work(job, moved)
            except Interrupted:
                pass
            except CallRefused as error:
                await self._fail(job_id, JobError("training_failed", str(error), error.field))
            except EngineUnavailable as error:
                now = await self._known(job_id)
                crashes = 1 if now.step > job.step else crashes + 1
                log.warning("job %s: %s; it goes on from step %d", job_id, error, now.step)
                if crashes >= _CRASHES:
                    message = f"the engine ended {crashes} times while it trained this job"
                    await self._fail(job_id, JobError("engine_ended", message))
            except DiskFullError as error:
                log.error("job %s: %s", job_id, error)
                await asyncio.sleep(_RETRY_S)
            except Exception:  # a fault of ours must not lose the job: it goes on from what is on disk
                log.exception("job %s stopped and goes on in %g s", job_id, _RETRY_S)
                await asyncio.sleep(_RETRY_S)
            finally:
                del self._moved[job_id]

    async def _remove_work(self, job_id: str) -> None:
        """Of a job that has ended: all but the adapters that are served."""
        kept = {checkpoint.folder for checkpoint in await self._tuning.ask(JobStore.checkpoints, job_id)}
        await self._tuning.batches.in_thread(remove_all_but, kept, self._tuning.folder(job_id))

    async def _known(self, job_id: str) -> JobRecord:
        job = await self._tuning.ask(JobStore.job, job_id)
        if job is None:
            raise LookupError(f"job {job_id} has vanished from the store")
        return job

    async def _work(self, job: JobRecord, moved: asyncio.Event) -> None:
        """Raises Interrupted when somebody cancels or pauses the job."""
        if job.plan is None:
            async with self._checking:
                checked = await _unless(moved, self._check(job))
            if checked is None:
                return
            job = checked
        async with _place(self._places, moved):
            await self._engine_serves()
            note = event("Fine-tuning job started" if job.state is None else f"Going on from step {job.step}")
            changes = {"status": JobStatus.RUNNING, "started_at": job.started_at or int(time.time())}
            started = await self._tuning.ask(JobStore.change, job.id, WORKED, note, **changes)
            if started is None:
                return
            tenant = self._tenant_named(job.tenant)
            if tenant is None:
                message = "the server has no key of this tenant any more"
                await self._fail(job.id, JobError("tenant_not_found", message))
                return
            training = Training(self._tuning, self._client, started, tenant, moved)
            try:
                await training.run()
            finally:
                await training.close()
                self._trained(job, training.tokens)

    async def _check(self, job: JobRecord) -> JobRecord | None:
        """Both files; None if the job has failed."""
        found = {}
        for name in ("training", *(["validation"] if job.validation_file is not None else [])):
            checked = await check_file(self._tuning, job, name, self._text, self._longest)
            if checked.errors:
                for line in checked.errors:
                    await self._tuning.ask(JobStore.add_event, job.id, event(f"{name}_file: {line}", "error"))
                await self._fail(job.id, error_of(checked, name))
                return None
            found[name] = checked
        valid = found["validation"].examples if "validation" in found else 0
        plan = plan_of(job.asked, found["training"].examples, valid, found["training"].tokens)
        tenant = self._tenant_named(job.tenant)
        tokens, most = plan.n_epochs * plan.tokens, None if tenant is None else tenant.fine_tuning_tokens
        if most is not None and tokens > most:
            message = f"{tokens} tokens in {plan.n_epochs} epochs; {most} are allowed with this key"
            await self._fail(job.id, JobError("token_quota", message, "training_file"))
            return None
        note = event(f"Files validated: {plan.examples} examples, {plan.steps} steps; moving job to queued state")
        return await self._tuning.ask(JobStore.change, job.id, WORKED, note, status=JobStatus.QUEUED, plan=plan)

    async def _fail(self, job_id: str, error: JobError) -> None:
        note, now = event(f"The job failed: {error.message}", "error"), int(time.time())
        changes = {"status": JobStatus.FAILED, "error": error, "finished_at": now}
        await self._tuning.ask(JobStore.change, job_id, WORKED, note, **changes)

    # ---- the engine

    async def _engine_serves(self) -> None:
        while self._client.health != "ready":
            await asyncio.sleep(_LOOK_S)

    async def _load(self, model: str, folder: str) -> None:
        """A model of an earlier start. One that cannot be loaded is not served, and said so."""
        while True:
            try:
                await self._client.load_adapter(model, folder, replace=True)
                return
            except CallRefused as error:
                log.error("the fine-tuned model %s is not served: %s", model, error)
                self._tuning.owners.pop(model, None)
                return
            except EngineUnavailable:
                await self._engine_serves()


@contextlib.asynccontextmanager
async def _place(places: asyncio.Semaphore, moved: asyncio.Event) -> AsyncIterator[None]:
    """Raises Interrupted if `moved` is set before there is one."""
    await _unless(moved, places.acquire())
    try:
        yield
    finally:
        places.release()


async def _unless(moved: asyncio.Event, work: Awaitable[_T]) -> _T:
    """What comes of `work`, which is cancelled when `moved` is set: Interrupted then."""
    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(moved.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Interrupted
        return doing.result()
    finally:
        for task in (doing, waiting):
            task.cancel()
        await asyncio.gather(doing, waiting, return_exceptions=True)
