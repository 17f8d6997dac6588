"""One job's steps over the engine, from its last state to its end."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import shutil
import time
import uuid
from array import array
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from api.client.calls import CallRefused
from api.client.client import EngineClient
from api.client.stream import EngineUnavailable
from api.tenants.record import Tenant
from api.tuning.plan import ALPHA, RANK, base_rate, examples_of, learning_rate
from api.tuning.records import OPEN, CheckpointRecord, JobRecord, JobStatus, Metrics
from api.tuning.samples import Samples
from api.tuning.service import BEGIN, Tuning, event, model_name
from api.tuning.store import JobStore
from engine.tuning import NO_ROOM, Batch, CloseRun, OpenRun, OptimStep, Sample, SaveRun, Tuned

_SAVE_S = 20.0  # a state is saved after so long
_ROOM_S = 2.0  # between two looks for room in the engine
_KEPT = 3  # epochs, the last ones, whose ends are checkpoints that are served
_PATIENCE, _BETTER = 2, 0.99  # epochs without a validation loss that is so much of the least one before, then an end
_EVALUATIONS = 20  # of a few examples of the validation file, in a job
_AT_ONCE = 64  # examples of the validation file in one order


class Interrupted(Exception):
    """Somebody has cancelled or paused the job."""


class Training:
    """`moved` is set when the job is to stop: after the step that runs it saves a state and raises Interrupted. `close`
    comes after `run` however that ended. `tokens`: that were trained on here."""

    def __init__(
        self, tuning: Tuning, client: EngineClient, job: JobRecord, tenant: Tenant, moved: asyncio.Event
    ) -> None:
        assert job.plan is not None
        self.tokens = 0
        self._tuning, self._client, self._job, self._tenant, self._moved = tuning, client, job, tenant, moved
        self._plan = job.plan
        self._folder = tuning.folder(job.id)
        self._run = f"{job.id}:{uuid.uuid4().hex[:8]}"  # another one each time: an engine may know the last
        self._reference = f"{self._run}:reference"  # of dpo: what it began with, where that is not the base
        self._train = Samples(self._folder / "training")
        self._valid = Samples(self._folder / "validation") if job.validation_file is not None else None
        self._open: list[str] = []  # runs

    async def close(self) -> None:
        self._train.close()
        if self._valid is not None:
            self._valid.close()
        for run in self._open:
            with contextlib.suppress(EngineUnavailable, CallRefused):  # it has ended already
                await self._client.tune(run, CloseRun())

    async def run(self) -> None:
        """Raises Interrupted, CallRefused, EngineUnavailable, DiskFullError."""
        job, plan = self._job, self._plan
        for late in await self._tuning.ask(JobStore.go_back, job.id, job.step):
            await self._forget(late)
        state = None if job.state is None else str(self._folder / job.state)
        begin = None if job.begins is None else str(self._folder / BEGIN)
        order = OpenRun(RANK, ALPHA, seed=job.seed, adapter=begin, tenant=job.tenant, weight=self._tenant.weight)
        opened = await self._opened(self._run, replace(order, state=state))
        if begin is not None and job.asked.method == "dpo":
            await self._opened(self._reference, order)
        base = base_rate(job.asked.method, round(opened.metrics["hidden_size"]))
        saved_s = began_s = time.monotonic()
        step = job.step
        while step < plan.steps and not await self._converged(step):
            step += 1
            metrics = await self._step(step, learning_rate(plan, base, step))
            ends_epoch = step % plan.steps_an_epoch == 0
            metrics = await self._evaluated(metrics, whole=ends_epoch)
            message = f"Step {step}/{plan.steps}: training loss={metrics.train_loss:.4f}"
            if metrics.full_valid_loss is not None:
                message += f", full validation loss={metrics.full_valid_loss:.4f}"
            await self._tuning.ask(JobStore.add_event, job.id, event(message, metrics=metrics))
            stops = self._moved.is_set()
            kept = ends_epoch and (job.stops_early or step > plan.steps - _KEPT * plan.steps_an_epoch)
            if kept or stops or time.monotonic() - saved_s > _SAVE_S:
                left_s = (time.monotonic() - began_s) / (step - job.step) * (plan.steps - step)
                await self._save(step, metrics if kept else None, int(time.time() + left_s))
                saved_s = time.monotonic()
            if stops and step < plan.steps:
                raise Interrupted
        await self._finish(step)

    async def _converged(self, step: int) -> bool:
        """At the end of an epoch: whether the validation loss has ceased to fall."""
        if not self._job.stops_early or step % self._plan.steps_an_epoch:
            return False
        events = await self._tuning.ask(JobStore.metrics, self._job.id)
        found = [each.metrics.full_valid_loss for each in events if each.metrics is not None]
        losses = [loss for loss in found if loss is not None]
        before, last = losses[:-_PATIENCE], losses[-_PATIENCE:]
        return bool(before) and min(last) > _BETTER * min(before)

    async def _opened(self, run: str, order: OpenRun) -> Tuned:
        """As soon as the engine has room for one more run. Raises as `run`."""
        noted = False
        while True:
            try:
                opened = await self._client.tune(run, order)
                self._open.append(run)
                return opened
            except CallRefused as error:
                if error.status != NO_ROOM:
                    raise
                if not noted:
                    await self._tuning.ask(JobStore.add_event, self._job.id, event(f"The job waits: {error}"))
                    noted = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), _ROOM_S)
                raise Interrupted

    # ---- a step

    async def _step(self, step: int, rate: float) -> Metrics:
        chosen = examples_of(self._plan, self._job.seed, step)
        examples = await self._tuning.batches.in_thread(lambda: [self._train.example(number) for number in chosen])
        texts = [text for example in examples for text in example]
        found, count = await self._batch(texts, learn=True)
        await self._client.tune(self._run, OptimStep(rate, beta2=0.99, eps=1e-8, clip=1.0, scale=1 / max(count, 1)))
        self.tokens += sum(len(text.tokens) for text in texts)
        loss, accuracy = _means(found, count)
        return Metrics(step=step, train_loss=loss, train_mean_token_accuracy=accuracy)

    async def _batch(self, texts: Sequence[Sample], *, learn: bool) -> tuple[Tuned, float]:
        """And how many targets, or pairs, its loss is a sum over."""
        if self._job.asked.method == "supervised":
            found = await self._client.tune(self._run, Batch(list(texts), learn=learn))
            return found, found.metrics["targets"]
        of_base = self._job.begins is None
        reference = self._run if of_base else self._reference
        base = await self._client.tune(reference, Batch(list(texts), learn=False, base=of_base))
        pairs = [
            replace(text, numbers={**text.numbers, "reference": array("f", values).tolist()})
            for text, values in zip(texts, base.logprobs, strict=True)
        ]
        settings = {"beta": self._plan.beta}
        return await self._client.tune(self._run, Batch(pairs, "dpo", settings, learn)), len(pairs) / 2

    async def _evaluated(self, metrics: Metrics, *, whole: bool) -> Metrics:
        """With the validation file's: some examples of it now and then, all at the end of an epoch."""
        valid, plan = self._valid, self._plan
        if valid is None:
            return metrics
        every = max(1, plan.steps // _EVALUATIONS)
        if whole:
            loss, accuracy = await self._validation(range(len(valid)))
            metrics = replace(metrics, full_valid_loss=loss, full_valid_mean_token_accuracy=accuracy)
        if metrics.step % every == 0 or whole:
            first = (metrics.step // every * plan.batch_size) % len(valid)
            some = [(first + number) % len(valid) for number in range(min(plan.batch_size, len(valid)))]
            loss, accuracy = await self._validation(some)
            metrics = replace(metrics, valid_loss=loss, valid_mean_token_accuracy=accuracy)
        return metrics

    async def _validation(self, numbers: Sequence[int]) -> tuple[float, float]:
        valid = self._valid
        assert valid is not None
        loss = hits = targets = count = 0.0
        for first in range(0, len(numbers), _AT_ONCE):
            some = numbers[first : first + _AT_ONCE]
            texts = await self._tuning.batches.in_thread(
                lambda some=some: [text for number in some for text in valid.example(number)]
            )
            found, more = await self._batch(texts, learn=False)
            loss, hits = loss + found.metrics["loss"], hits + found.metrics["hits"]
            targets, count = targets + found.metrics["targets"], count + more
        return loss / max(count, 1), hits / max(targets, 1)

    # ---- states and checkpoints

    async def _save(self, step: int, metrics: Metrics | None, estimated: int) -> None:
        """A state to go on from; with the `metrics` of one of the last epochs, a checkpoint that is served too."""
        job, state = self._job, f"state-{step}"
        adapter = f"adapter-{step}" if metrics is not None else None
        await self._client.tune(
            self._run,
            SaveRun(str(self._folder / state), None if adapter is None else str(self._folder / adapter)),
        )
        changes = {"step": step, "state": state, "estimated_finish": estimated}
        if metrics is None or adapter is None:
            await self._tuning.ask(JobStore.change, job.id, OPEN, **changes)
        else:
            last = step == self._plan.steps
            model = model_name(job, None if last else step)
            self._tuning.owners[model] = job.tenant
            try:
                await self._client.load_adapter(model, str(self._folder / adapter), replace=True)
            except (CallRefused, EngineUnavailable):
                if model not in self._client.adapters:
                    self._tuning.owners.pop(model, None)
                raise
            checkpoint = CheckpointRecord(
                id=f"ftckpt-{uuid.uuid4().hex[:24]}",
                job=job.id,
                created_at=int(time.time()),
                model=model,
                folder=adapter,
                metrics=metrics,
            )
            if await self._tuning.ask(JobStore.add_checkpoint, checkpoint, **changes) is None:  # cancelled meanwhile
                await self._forget(checkpoint)
                return
            for old in (await self._tuning.ask(JobStore.checkpoints, job.id))[_KEPT:]:
                await self._tuning.ask(JobStore.drop_checkpoints, [old])
                await self._forget(old)
        await self._tuning.batches.in_thread(_remove_states, self._folder, state)

    async def _forget(self, checkpoint: CheckpointRecord) -> None:
        """Its model serves no more."""
        if checkpoint.model in self._client.adapters:
            await self._client.unload_adapter(checkpoint.model)
        self._tuning.owners.pop(checkpoint.model, None)
        await self._tuning.batches.in_thread(shutil.rmtree, self._folder / checkpoint.folder, True)

    async def _finish(self, step: int) -> None:
        """The model is that of the last epoch, or, where the job stops early, of the kept one with the least
        validation loss."""
        job, plan, tuning = self._job, self._plan, self._tuning
        events = await tuning.ask(JobStore.metrics, job.id)
        table = _table([each.metrics for each in events if each.metrics is not None])
        file = await tuning.batches.add_file(job.tenant, "step_metrics.csv", "fine-tune-results", table)
        model, epochs = model_name(job), step // plan.steps_an_epoch
        if job.stops_early:
            points = await tuning.ask(JobStore.checkpoints, job.id)
            model = min(points, key=lambda point: point.metrics.full_valid_loss or 0.0).model if points else model
        if epochs < plan.n_epochs:
            note = event(f"Stopped after epoch {epochs} of {plan.n_epochs}: the validation loss has ceased to fall")
            await tuning.ask(JobStore.add_event, job.id, note)
        done = await tuning.ask(
            JobStore.change,
            job.id,
            OPEN,
            event(f"The job has successfully completed; new fine-tuned model created: {model}"),
            status=JobStatus.SUCCEEDED,
            finished_at=int(time.time()),
            fine_tuned_model=model,
            trained_tokens=epochs * plan.tokens,
            result_files=[file.id],
        )
        if done is None:  # cancelled meanwhile
            await tuning.batches.delete_file(job.tenant, file.id)


def _means(found: Tuned, count: float) -> tuple[float, float]:
    metrics = found.metrics
    return metrics["loss"] / max(count, 1), metrics["hits"] / max(metrics["targets"], 1)


def _remove_states(folder: Path, but: str) -> None:
    for path in folder.glob("state-*"):
        if path.name != but:
            shutil.rmtree(path, ignore_errors=True)


def _table(rows: Sequence[Metrics]) -> bytes:
    names = ["step", "train_loss", "train_mean_token_accuracy", "valid_loss", "valid_mean_token_accuracy"]
    names += ["full_valid_loss", "full_valid_mean_token_accuracy"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if (value := getattr(row, name)) is None else value for name in names])
    return text.getvalue().encode()
