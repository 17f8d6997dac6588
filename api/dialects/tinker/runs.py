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
import re
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from api.client.calls import CallRefused
from api.client.client import EngineClient
from api.client.stream import EngineUnavailable
from api.dialects.tinker.futures import Futures, Result
from api.errors import ApiError, bad_request, shortened
from api.tenants.record import Tenant
from api.tuning.service import Tuning
from engine.tuning import Batch, CloseRun, LoadRun, OpenRun, OptimStep, Order, PublishRun, SaveRun, Tuned

ALPHA = 32.0
WEIGHTS, SAMPLER = "weights", "sampler_weights"
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RUN = re.compile("s-[0-9a-f]{16}:train:[0-9]{1,10}")
_RUNS, _PENDING = 16, 512  # of a tenant; orders of a run
_LIVE = 4  # snapshots of a run that are kept without a file

_SESSIONS, _SAMPLERS = 256, 4096  # of a tenant; the oldest are forgotten


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a run on disk."""

    id: str
    tenant: str
    base_model: str
    rank: int
    targets: tuple[str, ...]
    created_at: float


class Run:
    """`snapshots`: names of those that are served without a file, oldest first. A run that has been idle goes to disk
    when others want room, and comes back with its next order."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.last_s = time.time()
        self.lock = asyncio.Lock()  # held while it goes to disk and comes back
        self.on_disk = False
        self.pending = 0  # orders that have not ended
        self.learning = False  # there are gradients that no step has used
        self.snapshots: list[str] = []
        self._next = 1
        self._waiting: dict[int, Callable[[], None]] = {}
        self._numbered: dict[int, str] = {}  # futures by seq_id

    def numbered(self, seq_id: int) -> str | None:
        """The future of an order that has come before."""
        return self._numbered.get(seq_id)

    def take(self, seq_id: int, future: str, start: Callable[[], None]) -> None:
        """`start` when all orders before have started. Raises ApiError."""
        if seq_id < self._next or len(self._waiting) >= _PENDING or seq_id > self._next + _PENDING:
            raise ApiError(400, f"seq_id {seq_id}: {self._next} is the next one", param="seq_id")
        self.last_s = time.time()
        self._numbered[seq_id] = future
        self._numbered.pop(seq_id - 4 * _PENDING, None)
        self._waiting[seq_id] = start
        self.pending += 1
        while (now := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            now()


class Runs:
    """Of all tenants; what is another tenant's is as unknown. `idle_s`: after so long a run may go to disk."""

    def __init__(self, client: EngineClient, tuning: Tuning, idle_s: float = 600.0) -> None:
        self.client, self.tuning = client, tuning
        self.folder = tuning.batches.folder / "tinker"
        self.sessions: dict[str, str] = {}  # tenants by session
        self.samplers: dict[str, tuple[str, str | None]] = {}  # tenant and adapter (None: the base) by sampler
        self._runs: dict[str, Run] = {}
        self.futures = Futures()
        self._weights: dict[str, float] = {}  # of runs, their tenants'
        self.idle_s = idle_s
        self._created: dict[str, str] = {}  # futures of runs' openings
        self._restarts = client.restarts

    # ---- sessions and samplers

    def open_session(self, tenant: Tenant) -> str:
        session = f"s-{uuid.uuid4().hex[:16]}"
        own = [key for key, owner in self.sessions.items() if owner == tenant.name]
        for key in own[: max(0, len(own) - _SESSIONS + 1)]:
            del self.sessions[key]
        self.sessions[session] = tenant.name
        return session

    def check_session(self, tenant: Tenant, session: str) -> None:
        """Raises ApiError 404."""
        if self.sessions.get(session) != tenant.name:
            raise ApiError(404, f"there is no session {shortened(session)}", param="session_id")

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
        """The runs of an engine that has ended are gone."""
        if self.client.restarts != self._restarts:
            self._restarts = self.client.restarts
            self._runs = {key: run for key, run in self._runs.items() if run.on_disk}

    def run(self, tenant: Tenant, run_id: str) -> Run:
        """Raises ApiError 404; of a run whose engine has ended too, with what to do."""
        self._check_engine()
        run = self._runs.get(run_id)
        if run is None or run.record.tenant != tenant.name:
            message = f"there is no run {shortened(run_id)} (any more): begin from its last saved weights"
            raise ApiError(404, message, param="model_id", code="run_not_found")
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
        """The future of a run's opening, one for all requests that ask for it. Raises ApiError."""
        if (known := self._created.get(record.id)) is not None and known in self.futures:
            work.close()
            return known
        key = self._created[record.id] = self.futures.add(tenant, work)
        return key

    async def open(self, tenant: Tenant, record: RunRecord, seed: int, state: Path | None) -> None:
        """Raises ApiError, CallRefused or EngineUnavailable."""
        self._check_engine()
        for idle in [run for run in self._runs.values() if time.time() - run.last_s > self.idle_s]:
            await self._to_disk(idle)
        if sum(not run.on_disk and run.record.tenant == tenant.name for run in self._runs.values()) >= _RUNS:
            raise ApiError(429, f"{_RUNS} runs are open, the most that are: unload one", code="run_quota")
        folder = None if state is None else str(state)
        order = OpenRun(record.rank, ALPHA, record.targets, seed, folder, tenant.name, tenant.weight)
        await self.client.tune(record.id, order)
        self._runs[record.id], self._weights[record.id] = Run(record), tenant.weight
        await self.tuning.batches.in_thread(_write, self.folder / record.id / "run.json", msgspec.json.encode(record))

    async def finish(self, tenant: Tenant, session: str) -> None:
        """Its runs are closed."""
        self.sessions.pop(session)
        for run in [run for run in self._runs.values() if run.record.id.startswith(f"{session}:")]:
            await self.close_run(run)

    async def close_run(self, run: Run) -> None:
        for table in (self._runs, self._created, self._weights):
            table.pop(run.record.id, None)
        async with run.lock:
            if not run.on_disk:
                await self.client.tune(run.record.id, CloseRun())
        await self.tuning.batches.in_thread(shutil.rmtree, self._idle_state(run), True)

    def _idle_state(self, run: Run) -> Path:
        return self.folder / run.record.id / "idle"

    async def _to_disk(self, run: Run) -> None:
        """Unless it is at work, or would lose something."""
        async with run.lock:
            if run.on_disk or run.pending or run.learning:
                return
            await self.client.tune(run.record.id, SaveRun(str(self._idle_state(run))))
            await self.client.tune(run.record.id, CloseRun())
            run.on_disk = True

    async def _to_memory(self, run: Run) -> None:
        """Raises CallRefused if there is no room, or EngineUnavailable."""
        async with run.lock:
            if run.on_disk:
                record = run.record
                state = str(self._idle_state(run))
                order = OpenRun(record.rank, ALPHA, record.targets, 0, state, record.tenant, self._weights[record.id])
                await self.client.tune(record.id, order)
                run.on_disk = False

    def order(
        self, tenant: Tenant, run: Run, seq_id: int, order: Order, then: Callable[[Tuned], Awaitable[Result]]
    ) -> str:
        """A future of what `then` makes of the order's end. Raises ApiError."""
        if (known := run.numbered(seq_id)) is not None:
            return known

        async def work() -> Result:
            try:
                await self._to_memory(run)
                tuned = await self.client.tune(run.record.id, order)
            finally:
                run.pending -= 1
            if isinstance(order, Batch) and order.learn:
                run.learning = True
            elif isinstance(order, OptimStep | LoadRun):
                run.learning = False
            run.last_s = time.time()
            return await then(tuned)

        key, future = self.futures.reserve(tenant)
        try:
            run.take(seq_id, key, lambda: self.futures.start(work(), future))
        except ApiError:
            self.futures.drop(key)
            raise
        return key

    # ---- saved weights

    def place(self, run_id: str, kind: str, name: str) -> Path:
        """Raises ApiError 400 for a name that no folder has."""
        if not _NAME.fullmatch(name) or not _RUN.fullmatch(run_id):
            raise bad_request(f"path: 1 to 64 of A-Z a-z 0-9 . _ - are expected, got {shortened(name)}", "path")
        return self.folder / run_id / kind / name

    async def saved(self, tenant: Tenant, path: str, kind: str) -> tuple[RunRecord, Path]:
        """The run of a tinker:// path and its folder. Raises ApiError 404, for another tenant's too."""
        parts = path.removeprefix("tinker://").split("/")
        if path.startswith("tinker://") and len(parts) == 3 and parts[1] == kind:
            record = await self.record(parts[0])
            folder = self.place(parts[0], kind, parts[2])
            if record is not None and record.tenant == tenant.name and folder.is_dir():
                return record, folder
        raise ApiError(404, f"there are no weights {shortened(path)}", param="path", code="weights_not_found")

    async def record(self, run_id: str) -> RunRecord | None:
        if not _RUN.fullmatch(run_id):
            return None
        try:
            data = await self.tuning.batches.in_thread((self.folder / run_id / "run.json").read_bytes)
        except OSError:
            return None
        return msgspec.json.decode(data, type=RunRecord)

    async def records(self, tenant: Tenant) -> list[RunRecord]:
        """Newest first."""
        names = await self.tuning.batches.in_thread(lambda: sorted(path.name for path in self.folder.glob("s-*")))
        found = [record for name in names if (record := await self.record(name)) is not None]
        return sorted((r for r in found if r.tenant == tenant.name), key=lambda r: r.created_at, reverse=True)

    def checkpoints(self, record: RunRecord) -> list[dict[str, Any]]:
        """Newest first."""
        found = []
        for kind, label in ((WEIGHTS, "training"), (SAMPLER, "sampler")):
            for folder in (self.folder / record.id / kind).glob("*"):
                if folder.suffix in (".part", ".old"):
                    continue
                found.append(
                    {
                        "checkpoint_id": f"{kind}/{folder.name}",
                        "checkpoint_type": label,
                        "time": _time(folder.stat().st_mtime),
                        "tinker_path": f"tinker://{record.id}/{kind}/{folder.name}",
                        "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
                        "public": False,
                    }
                )
        return sorted(found, key=lambda each: str(each["time"]), reverse=True)

    def shown(self, record: RunRecord) -> dict[str, Any]:
        run, found = self._runs.get(record.id), self.checkpoints(record)
        last = {
            kind: next((c for c in found if c["checkpoint_type"] == kind), None) for kind in ("training", "sampler")
        }
        return {
            "training_run_id": record.id,
            "base_model": record.base_model,
            "model_owner": record.tenant,
            "is_lora": True,
            "lora_rank": record.rank,
            "last_request_time": _time(record.created_at if run is None else run.last_s),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
        }

    async def delete(self, tenant: Tenant, record: RunRecord, kind: str, name: str) -> None:
        """Raises ApiError 404."""
        path = f"tinker://{record.id}/{kind}/{name}"
        _, folder = await self.saved(tenant, path, kind)
        await self.unload(path)
        await self.tuning.batches.in_thread(shutil.rmtree, folder, True)

    # ---- samplers of a run

    def save_order(self, run: Run, kind: str, name: str) -> SaveRun:
        folder = str(self.place(run.record.id, kind, name))
        return SaveRun(folder) if kind == WEIGHTS else SaveRun(adapter=folder)

    async def serve(self, path: str, folder: Path, tenant: str) -> None:
        """Load an adapter that was saved, if it is not loaded. Raises CallRefused or EngineUnavailable."""
        self.tuning.owners[path] = tenant
        await self.client.load_adapter(path, str(folder), replace=True)

    async def snapshot(self, run: Run, name: str) -> None:
        """A snapshot was published; the oldest one goes if there are too many."""
        self.tuning.owners[name] = run.record.tenant
        run.snapshots.append(name)
        while len(run.snapshots) > _LIVE:
            await self.unload(run.snapshots.pop(0))

    async def unload(self, name: str) -> None:
        if name in self.client.adapters:
            try:
                await self.client.unload_adapter(name)
            except (CallRefused, EngineUnavailable):  # it is gone with its engine
                self.client.adapters.pop(name, None)
        self.tuning.owners.pop(name, None)


def publish_order(run: Run) -> PublishRun:
    return PublishRun(f"tinker://{run.record.id}/{SAMPLER}/live-{uuid.uuid4().hex[:8]}")


def load_order(folder: Path, *, optimizer: bool) -> LoadRun:
    return LoadRun(str(folder), optimizer)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(data)
