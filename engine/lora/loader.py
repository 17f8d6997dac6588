"""Loads adapter versions into host memory, one at a time, and evicts others for them.

    disk --parsed by a reader process--> checked, of known size --room is made, taken--> host memory --evicted--> disk

A slot's copy stays when the one in host memory goes. Pinned adapters and those that are being copied into a slot are
not evicted. Of the others, adapters that requests wait for go later than those that nobody wants, and retiring
versions last, because their folders may hold another version by now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from engine.architectures.config import ModelConfig
from engine.errors import AdapterError, EngineError, KtserveError
from engine.lora.adapter import AdapterWeights
from engine.lora.budget import AdapterBudget, AdapterSize
from engine.lora.files.whole import BaseTable
from engine.lora.reader_process import ParsedAdapter, ParseRequest, ReaderLostError
from engine.lora.version import AdapterStatus, Version
from engine.work import Work
from scheduler.request import AdapterKey

LOAD = "adapter-load"  # the kind of work, and its thread's name


class AdapterReader(Protocol):
    """`parse` is called on a thread, as is what `ParsedAdapter` offers; `close` ends them."""

    def parse(self, request: ParseRequest) -> ParsedAdapter:
        """UserError for a folder that cannot be served; ReaderLostError if that was not the folder's doing."""

    def close(self) -> None: ...


@dataclass(eq=False)
class LoadJob:
    """Load `version`: for the call that named it, or again because `slot` is to be filled. `replaces` serves meanwhile
    and stays in host memory until the job has ended."""

    version: Version
    slot: int | None = None
    replaces: Version | None = None
    parsed: ParsedAdapter | None = None  # it waits for room
    retried: bool = False


class LoadEnded(NamedTuple):
    """`result`: what was loaded, or why nothing was."""

    job: LoadJob
    result: AdapterWeights | KtserveError


class Evicted(NamedTuple):
    version: Version


class Loader:
    """The queue of jobs, and the versions in host memory.

    `versions` are all that there are, on disk too; `wanted` says whether requests wait for one. `config`, `base`,
    `max_rank` and `tables` are those of `ParseRequest`. Parsing and taking run as `LOAD` on `work`; all methods belong
    to the engine's thread, which takes what has come of them by `outcomes`."""

    def __init__(
        self,
        reader: AdapterReader,
        work: Work,
        budget: AdapterBudget,
        versions: Mapping[AdapterKey, Version],
        wanted: Callable[[AdapterKey], bool],
        config: ModelConfig,
        base: str | None,
        max_rank: int | None,
        tables: Mapping[str, BaseTable],
    ) -> None:
        self._reader, self._work, self._budget, self._versions, self._wanted = reader, work, budget, versions, wanted
        self._config, self._base, self._max_rank, self._tables = config, base, max_rank, tables
        self._jobs: deque[LoadJob] = deque()  # the first of them runs
        self._outcomes: deque[LoadEnded | Evicted] = deque()
        self._held: dict[AdapterKey, None] = {}  # versions in host memory, the least recently used first
        self._closed = False
        self._num_reloads = self._num_evictions = 0

    def load(self, job: LoadJob) -> None:
        """After the jobs before it. Its end is one of the `outcomes`."""
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._parse()

    def outcomes(self) -> Iterator[LoadEnded | Evicted]:
        """What has happened since the last call. Never waits, and costs nothing if nothing has. The next job begins
        when the caller is done with a `LoadEnded`, whose version has its status by then."""
        self._take_if_room()
        while self._outcomes:
            outcome = self._outcomes.popleft()
            yield outcome
            if isinstance(outcome, LoadEnded):
                self._num_reloads += self._jobs.popleft().slot is not None
                if self._jobs and not self._closed:
                    self._parse()

    def close(self) -> None:
        """End a job that runs; others never begin."""
        self._closed = True
        self._reader.close()
        self._take_if_room()

    # ---- host memory

    def touch(self, version: Version) -> None:
        """The version, which is in host memory, is used now."""
        self._held.pop(version.key, None)
        self._held[version.key] = None

    def adopt(self, version: Version, weights: AdapterWeights, replaces: Version | None) -> bool:
        """Make room for weights that are in memory already; False if there is none until copies into slots are made.
        UserError if they never fit."""
        element = self._budget.element_bytes
        size = AdapterSize(weights.num_bytes, weights.slot_bytes(element), weights.gpu_bytes(element))
        if not self._make_room(LoadJob(version, replaces=replaces), size):
            return False
        version.size = size
        return True

    def drop(self, version: Version) -> None:
        version.weights = None
        self._held.pop(version.key, None)

    def stats(self) -> dict[str, float | int]:
        return {
            "adapters_in_host_memory": len(self._held),
            "adapter_host_bytes": sum(size.read for size in _sizes(self._in_memory())),
            "adapter_reads_again": self._num_reloads,
            "adapter_evictions": self._num_evictions,
        }

    def check_integrity(self) -> None:
        """EngineError if versions, jobs and host memory contradict each other."""
        loading = [version for version in self._versions.values() if version.status is AdapterStatus.LOADING]
        jobs = [job.version for job in self._jobs if job.slot is None]
        if loading != jobs:
            raise EngineError(f"{len(loading)} adapters are being loaded by {len(jobs)} jobs")
        again = [job.version for job in self._jobs if job.slot is not None]
        if any(version.weights is not None or not version.filling for version in again):
            raise EngineError("an adapter that is in host memory, or fills no slot, is to be loaded again")
        held = {version.key for version in self._versions.values() if version.weights is not None}
        if held != set(self._held):
            raise EngineError(f"adapters {sorted(held)} are in host memory, {sorted(self._held)} are known to be")
        if not self._budget.fits(_sizes(self._in_memory()), _sizes(self._versions.values())):
            raise EngineError(f"{len(held)} adapters in host memory take more than their budget")

    # ---- the job that runs: parse, make room, take

    def _parse(self) -> None:
        job = self._jobs[0]
        version = job.version
        kept, others = self._known_beside(job)
        request = ParseRequest(
            path=version.path,
            name=version.name,
            config=self._config,
            expert_scaling=version.expert_scaling,
            expert_b_layout=version.expert_b_layout,
            max_rank=self._max_rank,
            base=self._base,
            tables=self._tables,
            budget=self._budget,
            pinned=version.pinned,
            kept=kept,
            others=others,
        )
        self._work.start(LOAD, partial(self._reader.parse, request), partial(self._parsed, job))

    def _parsed(self, job: LoadJob, future: Future[ParsedAdapter]) -> None:
        try:
            job.parsed = future.result()
        except Exception as error:  # noqa: BLE001 - whatever parsing raises ends this job, not the engine
            self._failed(job, error)

    def _take_if_room(self) -> None:
        """Where there is none, copies into slots are being made, after which there is more."""
        job = self._jobs[0] if self._jobs else None
        if job is None or (parsed := job.parsed) is None:
            return
        try:
            if not self._make_room(job, parsed.size):
                return
        except KtserveError as error:
            parsed.close()
            self._failed(job, error)
        else:
            job.version.size = parsed.size
            self._work.start(LOAD, parsed.take, partial(self._taken, job))
        job.parsed = None

    def _taken(self, job: LoadJob, future: Future[AdapterWeights]) -> None:
        try:
            weights = future.result()
            if job.slot is not None and weights.digest != job.version.digest:
                raise _changed(job.version)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(job, error)
        else:
            self._outcomes.append(LoadEnded(job, weights))

    def _failed(self, job: LoadJob, error: Exception) -> None:
        if self._closed:
            error = EngineError(f"adapter {job.version.name!r}: the engine ends")
        elif isinstance(error, ReaderLostError) and not job.retried:
            job.retried = True
            self._parse()
            return
        elif not isinstance(error, KtserveError):
            error = EngineError(f"adapter {job.version.name!r} not read: {type(error).__name__}: {error}")
        self._outcomes.append(LoadEnded(job, error))

    # ---- room for it

    def _known_beside(self, job: LoadJob) -> tuple[list[AdapterSize], list[AdapterSize]]:
        """Sizes of all versions but the job's: of those that are not evicted until it has ended, and of the others."""
        beside = [version for version in self._versions.values() if version is not job.version]
        kept = [version for version in beside if version.kept or version is job.replaces]
        return _sizes(kept), _sizes(version for version in beside if version not in kept)

    def _make_room(self, job: LoadJob, size: AdapterSize) -> bool:
        """Evict versions until one of that size fits; False, and none is evicted, if that is not enough. UserError if
        it could never be served, AdapterError if it is no longer what it was."""
        version = job.version
        if self._closed:
            raise EngineError("the engine ends")
        if job.slot is None:
            self._budget.check(version.name, *self._known_beside(job), size, version.pinned)
        elif size != version.size:
            raise _changed(version)
        known = [*_sizes(v for v in self._versions.values() if v is not version), size]
        held = self._in_memory()
        evicted: list[Version] = []
        while not self._budget.fits([*_sizes(held), size], known):
            free = [v for v in held if not (v.kept or v.filling or v is job.replaces)]
            victim = min(free, key=self._reluctance, default=None)
            if victim is None:
                return False
            held.remove(victim)
            evicted.append(victim)
        for victim in evicted:
            self.drop(victim)
            self._outcomes.append(Evicted(victim))
        self._num_evictions += len(evicted)
        return True

    def _reluctance(self, version: Version) -> tuple[bool, bool]:
        """Of equal ones the least recently used is evicted first: they are compared in that order."""
        return version.status is AdapterStatus.RETIRING, self._wanted(version.key)

    def _in_memory(self) -> list[Version]:
        return [self._versions[key] for key in self._held]


def _sizes(versions: Iterable[Version]) -> list[AdapterSize]:
    return [v.size for v in versions if v.size is not None and v.status is not AdapterStatus.FAILED]


def _changed(version: Version) -> AdapterError:
    return AdapterError(
        f"adapter {version.name!r} is no longer in memory, and {version.path} holds something else by now: load it "
        "again, with replace"
    )
