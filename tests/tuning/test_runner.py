"""Jobs without an engine: what becomes of them and of their folders when they are created, moved and swept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.batches.service import Batches
from api.config import ServeConfig
from api.errors import ApiError
from api.tenants.record import Tenant
from api.tuning.records import Asked, CheckpointRecord, JobRecord, JobStatus, Metrics
from api.tuning.runner import JobRunner
from api.tuning.service import Tuning, event
from api.tuning.store import JobStore

TEAM = Tenant("team", fine_tuning_jobs=4)


class Jobs:
    """A runner whose work on a job is to wait until it is moved; `worked` counts the times that it began."""

    def __init__(self, tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
        client: Any = SimpleNamespace(health="ready", load_adapter=self._load)
        text: Any = None
        self.runner = JobRunner(tuning, client, text, lambda name: TEAM, 64, lambda job, tokens: None)
        self.tuning, self.worked, self.works = tuning, 0, asyncio.Event()
        self.ending = asyncio.Event()
        self.ending.set()
        monkeypatch.setattr(self.runner, "_work", self._work)

    async def _load(self, *args: Any, **options: Any) -> None: ...

    async def _work(self, job: JobRecord, moved: asyncio.Event) -> None:
        self.worked += 1
        self.works.set()
        await moved.wait()
        await self.ending.wait()

    async def working(self) -> None:
        await self.works.wait()
        self.works.clear()

    async def create(self) -> JobRecord:
        none: dict[str, Any] = dict.fromkeys(("begins", "validation_file", "suffix", "seed", "metadata"))
        return await self.tuning.create(TEAM, model="demo", training_file=self.file, asked=Asked(), **none)

    async def ended(self) -> None:
        while self.runner._tasks:
            await asyncio.gather(*self.runner._tasks.values())

    file = ""


def with_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    async def run() -> None:
        batches = await Batches.open(ServeConfig(), str(folder))
        tuning = await Tuning.open(batches)
        jobs = Jobs(tuning, monkeypatch)
        jobs.file = (await batches.add_file("team", "a.jsonl", "fine-tune", b"{}")).id
        running = asyncio.create_task(jobs.runner.run())
        try:
            await check(jobs)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            tuning.close()
            batches.close()

    asyncio.run(run())


def left(tuning: Tuning, job: JobRecord) -> set[str]:
    return {path.name for path in tuning.folder(job.id).glob("*")}


def files_of(tuning: Tuning, job: JobRecord) -> None:
    for name in ("state-3", ".state-4.part", "adapter-2", "adapter-3"):
        (tuning.folder(job.id) / name).mkdir(parents=True)
    (tuning.folder(job.id) / "training.samples").touch()


def test_a_data_dir_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Adapters are loaded by absolute paths alone."""

    async def check(jobs: Jobs) -> None:
        assert jobs.tuning.folder("job") == tmp_path / "data" / "tuning" / "job"

    monkeypatch.chdir(tmp_path)
    with_jobs(Path("data"), monkeypatch, check)


def test_jobs_created_at_once_keep_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def check(jobs: Jobs) -> None:
        ends = await asyncio.gather(*(jobs.create() for _ in range(9)), return_exceptions=True)
        refused = [end for end in ends if isinstance(end, ApiError)]
        assert len(refused) == 5 and {error.code for error in refused} == {"job_quota"}

    with_jobs(tmp_path, monkeypatch, check)


@pytest.mark.parametrize("paused", [False, True])
def test_a_cancelled_job_leaves_the_models_that_serve_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool
):
    async def check(jobs: Jobs) -> None:
        job = await jobs.create()
        await jobs.working()
        files_of(jobs.tuning, job)
        metrics = Metrics(step=2, train_loss=1.0, train_mean_token_accuracy=0.0)
        point = CheckpointRecord(id="p", job=job.id, created_at=0, model="ft:m", folder="adapter-2", metrics=metrics)
        await jobs.tuning.ask(JobStore.add_checkpoint, point)
        if paused:
            await jobs.tuning.move(TEAM, job.id, JobStatus.PAUSED, "paused")
            await jobs.ended()
            assert len(left(jobs.tuning, job)) == 5, "it may be resumed"
        await jobs.tuning.move(TEAM, job.id, JobStatus.CANCELLED, "cancelled")
        await jobs.ended()
        assert left(jobs.tuning, job) == {"adapter-2"}

    with_jobs(tmp_path, monkeypatch, check)


def test_a_job_that_is_resumed_while_its_work_ends_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def check(jobs: Jobs) -> None:
        job = await jobs.create()
        await jobs.working()
        jobs.ending.clear()
        for to in (JobStatus.PAUSED, JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.QUEUED):
            await jobs.tuning.move(TEAM, job.id, to, "moved")
        jobs.ending.set()
        await jobs.working()
        await jobs.tuning.move(TEAM, job.id, JobStatus.PAUSED, "paused")
        await asyncio.gather(*jobs.runner._tasks.values())
        await jobs.tuning.move(TEAM, job.id, JobStatus.QUEUED, "resumed")  # its task has ended, and is known still
        await jobs.working()
        assert jobs.worked == 3

    with_jobs(tmp_path, monkeypatch, check)


def test_what_a_killed_server_left_of_ended_jobs_goes_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def before() -> JobRecord:
        batches = await Batches.open(ServeConfig(), str(tmp_path))
        tuning = await Tuning.open(batches)
        job = JobRecord(
            id="ftjob-1", tenant="team", model="demo", training_file="f", created_at=0, seed=0, asked=Asked()
        )
        await tuning.ask(JobStore.add, job, event("created"), 1)
        files_of(tuning, job)
        await tuning.ask(JobStore.change, job.id, {JobStatus.VALIDATING}, status=JobStatus.FAILED)
        (tuning.folder("ftjob-unknown") / "begin").mkdir(parents=True)
        tuning.close()
        batches.close()
        return job

    job = asyncio.run(before())

    async def check(jobs: Jobs) -> None:
        while left(jobs.tuning, job):
            await asyncio.sleep(0.01)
        assert [path.name for path in jobs.tuning.folder("").iterdir()] == [job.id]

    with_jobs(tmp_path, monkeypatch, check)
