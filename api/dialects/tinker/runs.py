"""What Tinker's clients have here: sessions, tuning runs, samplers, and futures of what they have asked for.

A run's orders are sent to the engine in the order of their `seq_id`, whatever the order in which they come; an order
that comes twice is one. Sessions, futures and what was not saved end with the server; saved weights stay:

    DATA_DIR/tinker/RUN/run.json            who made the run, and how
                       /weights/NAME        masters and moments
                       /idle                the same, of a run that gave others room
                       /sampler_weights/NAME   an adapter that is served, as tinker://RUN/sampler_weights/NAME
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from api.client.calls import CallRefused
from api.client.client import EngineClient
from api.client.stream import EngineUnavailable
from api.dialects.tinker.futures import Futures, Result
from api.dialects.tinker.run import Early, Run
from api.dialects.tinker.saved import SAMPLER, WEIGHTS, RunRecord, Saved, timestamp
from api.errors import ApiError, shortened
from api.tenants.record import Tenant
from api.tuning.service import Tuning
from engine.tuning import GONE, Batch, CloseRun, LoadRun, OpenRun, OptimStep, Order, PublishRun, SaveRun, Tuned

ALPHA = 32.0
_RUNS, _RUNS_EVER = 16, 64  # of a tenant: in memory, and with those on disk
_TOKENS = 1 << 21  # of a tenant's batches that have not ended
_LIVE = 4  # snapshots of a run that are kept without a file
_EXPIRE_S = 60.0  # between two looks for weights whose time is over
_SILENT_S = 3600.0  # after so long without a word of its session a run gives others room
_SESSIONS, _SAMPLERS = 256, 4096  # of a tenant; the oldest are forgotten

log = logging.getLogger("ktserve")


class Runs:
    """Of all tenants; what is another tenant's is as unknown. `idle_s`: after so long a run may go to disk, and a
    request whose predecessor has not come fails."""

    def __init__(self, client: EngineClient, tuning: Tuning, idle_s: float = 600.0) -> None:
        self.client, self.tuning = client, tuning
        self.saved = Saved(tuning)
        self.sessions: dict[str, str] = {}  # tenants by session
        self._heard: dict[str, float] = {}  # when a session had its last request
        self.samplers: dict[str, tuple[str, str | None]] = {}  # tenant and adapter (None: the base) by sampler
        self._runs: dict[str, Run] = {}
        self.futures = Futures()
        self._opening: dict[str, str] = {}  # tenants of runs that come into memory
        self.idle_s = idle_s
        self._created: dict[str, str] = {}  # futures of runs' openings
        self._restarts = client.restarts

    # ---- sessions and samplers

    def open_session(self, tenant: Tenant) -> str:
        session = f"s-{uuid.uuid4().hex[:16]}"
        own = [key for key, owner in self.sessions.items() if owner == tenant.name]
        for key in own[: max(0, len(own) - _SESSIONS + 1)]:
            self._forget_session(key)
        self.sessions[session], self._heard[session] = tenant.name, time.monotonic()
        return session

    def _forget_session(self, session: str) -> None:
        del self.sessions[session], self._heard[session]

    def check_session(self, tenant: Tenant, session: str) -> None:
        """Raises ApiError 404."""
        if self.sessions.get(session) != tenant.name:
            raise ApiError(404, f"there is no session {shortened(session)}", param="session_id")
        self._heard[session] = time.monotonic()

    def _silent(self, run: Run) -> bool:
        """Whether nobody seems to want the run any more: its session sends no heartbeats."""
        heard = self._heard.get(run.session)
        quiet_s = _SILENT_S if heard is None else time.monotonic() - heard
        return quiet_s >= _SILENT_S and not run.pending and time.time() - run.last_s >= _SILENT_S

    def open_sampler(self, tenant: Tenant, adapter: str | None) -> str:
        sampler = f"sampler-{uuid.uuid4().hex}"
        own = [key for key, (owner, _) in self.samplers.items() if owner == tenant.name]
        for key in own[: max(0, len(own) - _SAMPLERS + 1)]:
            del self.samplers[key]
        self.samplers[sampler] = tenant.name, adapter
        return sampler

    def sampler(self, tenant: Tenant, sampler: str) -> str | None:
        """The adapter's name. Raises ApiError 404."""
        owner, adapter = self.samplers.get(sampler, (None, None))
        if owner != tenant.name:
            raise ApiError(404, f"there is no sampler {shortened(sampler)}", param="sampling_session_id")
        return adapter

    # ---- runs

    def _check_engine(self) -> None:
        """The runs and the snapshots of an engine that has ended are gone."""
        if self.client.restarts == self._restarts:
            return
        self._restarts = self.client.restarts
        for run in list(self._runs.values()):
            for name in run.snapshots:
                self.tuning.owners.pop(name, None)
            run.snapshots.clear()
            if not run.on_disk:
                self._forget(run)

    def _forget(self, run: Run) -> None:
        if self._runs.get(run.record.id) is run:
            del self._runs[run.record.id]
            self._created.pop(run.record.id, None)
        run.end(unknown(run.record.id))

    def run(self, tenant: Tenant, run_id: str) -> Run:
        """Raises ApiError 404; of a run whose engine has ended too, with what to do."""
        self._check_engine()
        run = self._runs.get(run_id)
        if run is None or run.record.tenant != tenant.name:
            raise unknown(run_id)
        return run

    def new(
        self, tenant: Tenant, session: str, number: int, base: str, rank: int, targets: tuple[str, ...]
    ) -> RunRecord:
        """Of a run that is to be opened. Its id is what clients expect."""
        return RunRecord(
            id=f"{session}:train:{number}",
            tenant=tenant.name,
            base_model=base,
            rank=rank,
            targets=targets,
            created_at=time.time(),
        )

    def creation(self, tenant: Tenant, record: RunRecord, work: Coroutine[Any, Any, Result]) -> str:
        """The future of a run's opening, one for all requests that ask for it, until it has failed. Raises ApiError."""

        async def opened() -> Result:
            try:
                return await work
            except BaseException:
                self._created.pop(record.id, None)
                raise

        if (known := self._created.get(record.id)) is not None and known in self.futures:
            work.close()
            return known
        try:
            key, future = self.futures.reserve(tenant)
        except ApiError:
            work.close()
            raise
        self._created[record.id] = key
        self.futures.start(opened(), future)
        return key

    async def open(self, tenant: Tenant, record: RunRecord, seed: int, state: Path | None) -> None:
        """Raises ApiError, CallRefused, EngineUnavailable or OSError."""
        await self._make_room(tenant)
        run = Run(record, tenant.weight, self.idle_s)
        await self._open(run, seed, state)
        self._runs[record.id] = run
        try:
            await self.saved.add(record)
        except OSError:
            await self.close_run(run)
            raise

    async def _make_room(self, tenant: Tenant) -> None:
        """For one more run of the tenant, on disk or in memory. Raises ApiError 429."""
        own = [run for run in self._runs.values() if run.record.tenant == tenant.name]
        for run in sorted(filter(self._silent, own), key=lambda run: run.last_s)[: len(own) - _RUNS_EVER + 1]:
            await self.close_run(run)
            own.remove(run)
        if len(own) >= _RUNS_EVER:
            message = f"{_RUNS_EVER} runs are open, those on disk included: unload one"
            raise ApiError(429, message, code="run_quota")

    async def _open(self, run: Run, seed: int, state: Path | None) -> None:
        """In the engine. Raises ApiError 429, CallRefused or EngineUnavailable."""
        self._check_engine()
        for other in list(self._runs.values()):
            if time.time() - other.last_s > self.idle_s and not other.lock.locked():
                await self._to_disk(other)
        record = run.record
        held = [each.record.tenant for each in self._runs.values() if not each.on_disk]
        if [*held, *self._opening.values()].count(record.tenant) >= _RUNS:
            raise ApiError(429, f"{_RUNS} runs are open, the most that are: unload one", code="run_quota")
        folder = None if state is None else str(state)
        self._opening[record.id] = record.tenant
        try:
            order = OpenRun(record.rank, ALPHA, record.targets, seed, folder, None, record.tenant, run.weight)
            await self.client.tune(record.id, order)
        finally:
            del self._opening[record.id]

    async def finish(self, tenant: Tenant, session: str) -> None:
        """Its runs are closed."""
        self._forget_session(session)
        for run in [run for run in self._runs.values() if run.session == session]:
            await self.close_run(run)

    async def close_run(self, run: Run) -> None:
        """Whether the engine still knows it or not."""
        self._forget(run)
        async with run.lock:
            if not run.on_disk:
                with contextlib.suppress(CallRefused, EngineUnavailable):  # it has ended already
                    await self.client.tune(run.record.id, CloseRun())
        await self._unload_snapshots(run)
        await self.saved.forget_unsaved(run.record.id)

    async def _unload_snapshots(self, run: Run) -> None:
        while run.snapshots:
            await self.unload(run.snapshots.pop())

    async def _lost(self, run: Run, error: CallRefused) -> bool:
        """Whether the engine has ended the run: then it is forgotten."""
        if error.status != GONE:
            return False
        self._forget(run)
        await self._unload_snapshots(run)
        return True

    def _idle_state(self, run: Run) -> Path:
        return self.saved.folder / run.record.id / "idle"

    async def _to_disk(self, run: Run) -> None:
        """Unless it is at work, or would lose something. One that cannot go stays: its reason is logged, for it is
        another one's request that wants the room."""
        async with run.lock:
            if run.on_disk or run.pending or run.learning or run.ended is not None:
                return
            try:
                await self.client.tune(run.record.id, SaveRun(str(self._idle_state(run))))
                await self.client.tune(run.record.id, CloseRun())
            except (CallRefused, EngineUnavailable) as error:
                log.warning("the idle run %s does not go to disk: %s", run.record.id, error)
                if isinstance(error, CallRefused):
                    await self._lost(run, error)
                return
            run.on_disk = True

    async def _to_memory(self, run: Run) -> None:
        """Raises ApiError if it has ended or its tenant has no room, CallRefused if the engine has none, or
        EngineUnavailable."""
        async with run.lock:
            if run.ended is not None:
                raise run.ended
            if run.on_disk:
                await self._open(run, 0, self._idle_state(run))
                run.on_disk = False

    def order(
        self,
        tenant: Tenant,
        run: Run,
        seq_id: int,
        order: Order,
        then: Callable[[Tuned], Awaitable[Result]],
        ended: Callable[[], None] = lambda: None,
    ) -> str:
        """A future of what `then` makes of the order's end; `ended` is called when that is known. Raises ApiError."""
        if (known := run.numbered(seq_id)) is not None:
            return known

        async def work() -> Result:
            try:
                await self._to_memory(run)
                tuned = await self.client.tune(run.record.id, order)
            except CallRefused as error:
                await self._lost(run, error)
                raise
            finally:
                run.started, run.tokens = run.started - 1, run.tokens - tokens
            if isinstance(order, Batch) and order.learn:
                run.learning = True
            elif isinstance(order, OptimStep | LoadRun):
                run.learning = False
            run.last_s = time.time()
            return await then(tuned)

        tokens = sum(len(sample.tokens) for sample in order.samples) if isinstance(order, Batch) else 0
        own = [each for each in self._runs.values() if each.record.tenant == tenant.name]
        held = sum(each.tokens if seq_id == run.next else each.tokens + each.early_tokens for each in own)
        if tokens and held >= _TOKENS:  # the next one waits for those that run alone: that ends
            message = f"requests with {held} tokens have not ended: wait for some"
            raise ApiError(429, message, code="too_many", retry_after_s=1.0)
        key, future = self.futures.reserve(tenant)
        try:
            run.take(seq_id, Early(key, future, lambda: self.futures.start(work(), future), tokens))
        except ApiError:
            self.futures.drop(key)
            raise
        future.result.add_done_callback(lambda _: ended())
        return key

    # ---- saved weights

    def shown(self, record: RunRecord) -> dict[str, Any]:
        run, found = self._runs.get(record.id), self.saved.checkpoints(record)
        last = {
            kind: next((c for c in found if c["checkpoint_type"] == kind), None) for kind in ("training", "sampler")
        }
        return {
            "training_run_id": record.id,
            "base_model": record.base_model,
            "model_owner": record.tenant,
            "is_lora": True,
            "lora_rank": record.rank,
            "last_request_time": timestamp(record.created_at if run is None else run.last_s),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
        }

    async def delete(self, tenant: Tenant, record: RunRecord, kind: str, name: str) -> None:
        """Raises ApiError 404."""
        path = f"tinker://{record.id}/{kind}/{name}"
        _, folder = await self.saved.find(tenant, path, kind)
        await self.unload(path)
        await self.saved.remove(folder)

    async def expire(self) -> None:
        """Weights whose time is over go, until this is cancelled."""
        while True:
            for path, folder in await self.saved.expired():
                await self.unload(path)
                await self.saved.remove(folder)
            await asyncio.sleep(_EXPIRE_S)

    # ---- samplers of a run

    def save_order(self, run: Run, kind: str, name: str) -> SaveRun:
        folder = str(self.saved.place(run.record.id, kind, name))
        return SaveRun(folder) if kind == WEIGHTS else SaveRun(adapter=folder)

    async def serve(self, path: str, folder: Path, tenant: str) -> None:
        """Load an adapter that was saved, if it is not loaded. Raises CallRefused or EngineUnavailable."""
        self.tuning.owners[path] = tenant
        try:
            await self.client.load_adapter(path, str(folder), replace=True)
        except (CallRefused, EngineUnavailable):
            if path not in self.client.adapters:
                self.tuning.owners.pop(path, None)
            raise

    async def snapshot(self, run: Run, name: str) -> None:
        """A snapshot was published; the oldest one goes if there are too many. It goes too if its run has ended."""
        self.tuning.owners[name] = run.record.tenant
        run.snapshots.append(name)
        if run.ended is not None:
            await self._unload_snapshots(run)
        while len(run.snapshots) > _LIVE:
            await self.unload(run.snapshots.pop(0))

    async def unload(self, name: str) -> None:
        if name in self.client.adapters:
            try:
                await self.client.unload_adapter(name)
            except (CallRefused, EngineUnavailable):  # it is gone with its engine
                self.client.adapters.pop(name, None)
        self.tuning.owners.pop(name, None)


def unknown(run_id: str) -> ApiError:
    message = f"there is no run {shortened(run_id)} (any more): begin from its last saved weights"
    return ApiError(404, message, param="model_id", code="run_not_found")


def publish_order(run: Run) -> PublishRun:
    return PublishRun(f"tinker://{run.record.id}/{SAMPLER}/live-{uuid.uuid4().hex[:8]}")


def load_order(folder: Path, *, optimizer: bool) -> LoadRun:
    return LoadRun(str(folder), optimizer)
